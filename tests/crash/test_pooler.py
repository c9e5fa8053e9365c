"""Senders and workers behind a connection pooler in transaction mode, where a session belongs to no client for long."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg import capabilities

from tests.pgbouncer import find_pgbouncer, version
from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.scene import Scene
from .rig.server import PrivateServer, dying_with_parent
from .rig.waiting import wait_until
from .workload import ledger

Pooler = Callable[..., int]


@pytest.fixture
def pooler(server: PrivateServer, scene: Scene) -> Iterator[Pooler]:
    """Starts a PgBouncer in front of the server, with so many sessions, and returns its port."""
    program = find_pgbouncer()
    if program is None:
        pytest.skip("there is no pgbouncer (Debian and Ubuntu: apt-get install pgbouncer)")
    started: list[subprocess.Popen[bytes]] = []

    def start(sessions: int = 5, max_prepared_statements: int | None = None) -> int:
        settings = {"default_pool_size": sessions}
        if max_prepared_statements is not None:
            if version(program) < (1, 22):
                pytest.skip(f"PgBouncer {'.'.join(map(str, version(program)))} is older than max_prepared_statements")
            settings["max_prepared_statements"] = max_prepared_statements
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        directory = server.make_directory(f"pooler_{scene.name}")
        configuration = directory / "pgbouncer.ini"
        more = "\n".join(f"{name} = {value}" for name, value in settings.items())
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
max_client_conn = 200
server_reset_query_always = 0
{more}
"""
        )
        configuration.chmod(0o644)
        with (directory / "log").open("wb") as log:
            # PgBouncer refuses to be root: it runs as the account of the server, whose socket it has to open.
            process = subprocess.Popen(
                [*dying_with_parent(signal.SIGKILL), program, str(configuration)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **server.account.switch(),  # type: ignore[call-overload]
            )  # fmt: skip
        started.append(process)
        url = server.url(scene.name, port=port)
        wait_until(lambda: answers(url), "the pooler answers")
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def test_behind_a_pooler_everything_works_and_wake_ups_degrade_loudly(scene: Scene, pooler: Pooler) -> None:
    tree = scene.workers(*ledger.QUEUES, port=pooler(), prepared_statements=False, peek_delay=0.3)
    wait_until(lambda: "is there a connection pooler in transaction mode?" in tree.log_text(), "it is said")
    for number in range(300):
        queue = (Leased, Transactional, AtMostOnce)[number % 3]
        delay = timedelta(milliseconds=200) if number % 10 == 0 else None
        fail = 1 if number % 15 == 1 else 0  # of Transactional
        scene.send(
            queue, f"message {number}", delay=delay, fail=fail, send_key=f"{number} on", send_to="testapp.Leased"
        )

    verdict = scene.drained(effects=600)
    assert verdict.faultless, verdict
    assert (verdict.effects, verdict.poisoned) == (600, 0)
    assert verdict.duplicates["at_least_once"] == 0
    assert "prepared statement" not in tree.log_text() + scene.server.log_text()
    assert tree.stop() == 0


@pytest.mark.parametrize(
    ("sessions", "max_prepared_statements"),
    [
        pytest.param(1, None, id="one session"),
        pytest.param(2, None, id="two sessions"),
        pytest.param(2, 0, id="two sessions, names passed on as they are"),
        pytest.param(2, 100, id="two sessions, statements kept by the pooler"),
    ],
)
def test_processes_that_share_sessions_send_to_and_receive_from_their_own_queues_only(
    scene: Scene, pooler: Pooler, sessions: int, max_prepared_statements: int | None
) -> None:
    port = pooler(sessions, max_prepared_statements)
    logged = len(scene.server.log_text())
    labels = ("testapp.Leased", "testapp.Transactional")
    count = 300
    senders = [
        scene.program(
            f"sender of {label}", "-m", "tests.crash.workload.senders", label, str(count), str(scene.directory),
            # With one session there is one open transaction at a time.
            *(labels if sessions > 1 else ()), port=port,
        )
        for label in labels
    ]  # fmt: skip
    for sender in senders:
        sender.start()
    failed = [sender.wait(150) for sender in senders]
    misrouted = {
        label: scene.execute(
            f"SELECT count(*) FROM {ledger.QUEUES[label]} WHERE convert_from(body, 'UTF8')::json->>'key' NOT LIKE %s",
            f"{label} %",
        )[0][0]
        for label in labels
    }
    assert misrouted == dict.fromkeys(labels, 0)
    assert failed == [0, 0], "no send has failed"

    # No more tasks than sessions: one that looks keeps one that is in a transaction from going on.
    trees = [scene.workers(label, port=port, concurrency=sessions) for label in labels]
    verdict = scene.drained()
    assert verdict.faultless, verdict
    # Of six ways to send, three send two.
    assert (verdict.sent, verdict.effects, verdict.poisoned) == (2 * (1 + count * 9 // 6),) * 2 + (0,)
    strays = "SELECT s.key, e.queue FROM crash_sent s JOIN crash_effect e USING (key) WHERE e.queue <> s.queue"
    assert scene.execute(strays) == []
    assert [tree.stop() for tree in trees] == [0, 0]
    logs = [program.log_text() for program in (*senders, *trees)]
    assert not [log for log in logs if "Traceback" in log]
    assert 'prepared statement "' not in "".join(logs) + scene.server.log_text()[logged:]
    program = find_pgbouncer()
    assert program is not None
    kept = version(program) >= (1, 24) if max_prepared_statements is None else max_prepared_statements > 0
    kept = kept and capabilities.has_send_close_prepared()
    assert [log.count("Prepared statements are disabled") for log in logs[:2]] == [0 if kept else 1] * 2, (
        "said once, and if it is so"
    )
