"""Workers behind a connection pooler in transaction mode, where a session is nobody's for long."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.scene import Scene
from .rig.server import PrivateServer, dying_with_parent
from .rig.waiting import wait_until
from .workload import ledger

PGBOUNCER = shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


@pytest.fixture
def pooler(server: PrivateServer, scene: Scene) -> Iterator[int]:
    """The port of a PgBouncer in front of the server."""
    if PGBOUNCER is None:
        pytest.skip("there is no pgbouncer (Debian and Ubuntu: apt-get install pgbouncer)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = server.make_directory(f"pooler_{scene.name}")
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"""
        [databases]
        * = host={server.sockets} port={server.port} user=postgres
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        default_pool_size = 5
        max_client_conn = 200
        server_reset_query_always = 0
        """
    )
    configuration.chmod(0o644)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*dying_with_parent(signal.SIGKILL), PGBOUNCER, str(configuration)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **server.account.switch(),  # type: ignore[call-overload]
        )  # fmt: skip
    try:
        url = server.url(scene.name, port=port)
        wait_until(lambda: answers(url), "the pooler answers", seconds=20)
        yield port
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def test_behind_a_pooler_everything_works_and_wake_ups_degrade_loudly(scene: Scene, pooler: int) -> None:
    tree = scene.workers(*ledger.QUEUES, port=pooler, prepared_statements=False, peek_delay=0.3)
    wait_until(lambda: "is there a connection pooler in transaction mode?" in tree.log_text(), "it is said")
    for number in range(300):
        queue = (Leased, Transactional, AtMostOnce)[number % 3]
        delay = timedelta(milliseconds=200) if number % 10 == 0 else None
        fail = 1 if number % 15 == 1 else 0  # of Transactional
        scene.send(
            queue, f"message {number}", delay=delay, fail=fail, send_key=f"{number} on", send_to="testapp.Leased"
        )

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert (verdict.effects, verdict.poisoned) == (600, 0)
    assert verdict.duplicates["at_least_once"] == 0
    assert "prepared statement" not in tree.log_text() + scene.server.log_text()
    assert tree.stop() == 0
