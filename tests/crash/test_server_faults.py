"""A database server that restarts, turns read-only, fills up, deadlocks or has no connection left."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.holding import holding
from .rig.scene import Scene
from .rig.server import PrivateServer
from .rig.servers import on_both
from .rig.waiting import holds_for, wait_until

QUEUES = (Leased, Transactional)

#: Of the two that a handler adds to (``Act.lock``).
ACCOUNTS = {
    "postgresql": "CREATE TABLE accounts (name text PRIMARY KEY, amount int)",
    "microsoft": "CREATE TABLE accounts (name nvarchar(10) NOT NULL PRIMARY KEY, amount int)",
}


def send_some(scene: Scene, count: int, prefix: str = "message", **behaviour: object) -> None:
    for number in range(count):
        queue = QUEUES[number % 2]
        scene.send(queue, f"{prefix} {number}", **behaviour)


def test_the_server_crashes_under_load_and_nothing_is_lost_or_doubled(scene: Scene) -> None:
    tree = scene.workers("testapp.Leased", "testapp.Transactional")
    send_some(scene, 600, sleep_ms=2)
    wait_until(lambda: scene.effects() > 100, "the workers are at work")
    scene.server.crash_and_restart()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    # A leased message whose effect was committed in the instant of the crash, before its ack: at most a batch per task.
    assert verdict.duplicates["at_least_once"] <= 100
    assert verdict.poisoned == 0
    assert tree.restarts == 0, "an outage costs no process"
    assert tree.stop() == 0


def test_after_an_outage_notifications_are_back_at_once_and_each_process_has_logged_two_lines(scene: Scene) -> None:
    # On a busy machine the outage takes longer than a subscriber of this suite may be silent.
    tree = scene.workers("testapp.Leased", "testapp.Transactional", "--processes=2", dead_after=120)

    def listening() -> int:
        return len(scene.backends("query LIKE 'LISTEN%%'"))

    wait_until(lambda: listening() == 3, "two workers and a dispatcher listen")
    processes = {child.pid for child in tree.children()}
    scene.server.stop("immediate")
    # Longer than the first few steps of the listeners' back-off, which doubles: 1 s, 2 s, 4 s, 8 s.
    assert holds_for(lambda: tree.restarts == 0, 8), "an outage costs no process"
    scene.server.start()
    wait_until(lambda: listening() == len(processes), "all of them listen again")
    # By the server's clock: how busy the harness is does not count.
    ((seconds,),) = scene.execute(
        "SELECT extract(epoch FROM max(backend_start) FILTER (WHERE query LIKE 'LISTEN%%') - min(backend_start)) "
        "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'tree%%'"
    )
    assert seconds < 4, "with the first connection of each process, and each tries once a second"

    send_some(scene, 20)
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert {child.pid for child in tree.children()} == processes
    assert tree.stop() == 0
    line = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) queueapp\.workers (\d+) (.*)$", re.MULTILINE)
    said = {
        # The table of a foreign queue of the test project is not in this database.
        process: [
            text
            for _, who, text in line.findall(tree.log_text())
            if int(who) == process and "ForeignPostgres" not in text
        ]
        for process in processes
    }
    for lines in said.values():
        first, last = lines
        assert first.startswith("Database 'default' does not answer: ")
        assert last.startswith("Database 'default' answers again after ")


def test_a_failover_leaves_the_workers_on_a_read_only_server_until_it_ends(scene: Scene) -> None:
    tree = scene.workers("testapp.Leased", "testapp.Transactional")
    send_some(scene, 20)
    wait_until(lambda: scene.effects() >= 20, "the workers work")

    scene.execute(f"ALTER DATABASE {scene.name} SET default_transaction_read_only = on")
    scene.terminate_workers()
    send_some(scene, 20, "meanwhile")  # on a connection from before
    for queue in QUEUES:
        failed = f"Receive from {queue._meta.label} failed; trying again: InternalError: cannot execute"
        wait_until(lambda line=failed: line in tree.log_text(), "the workers have found out")  # type: ignore[misc]
    with scene.server.connect() as administrator:
        administrator.execute(f"ALTER DATABASE {scene.name} RESET default_transaction_read_only")

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.handled == 40
    assert tree.restarts == 0


def test_without_a_connection_left_the_workers_wait_until_there_is_one(scene: Scene) -> None:
    tree = scene.workers("testapp.Leased", "testapp.Transactional", "--no-dispatcher", "--no-maintenance")
    wait_until(lambda: len(scene.backends()) > 2, "the workers are connected")
    hogs = [scene.server.connect()]

    def squeeze() -> bool:
        """Take the workers' connections away, and every one that is free."""
        with contextlib.suppress(psycopg.OperationalError):
            hogs[0].execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'tree%'"
            )
            while True:
                hogs.append(scene.server.connect())
        return "too many clients" in tree.log_text()

    try:
        wait_until(squeeze, "the workers find no connection", pause=0.3)
    finally:
        for connection in hogs:
            connection.close()
    send_some(scene, 20)

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.handled == 20
    assert tree.restarts == 0


@on_both
def test_rows_that_another_session_locks_in_a_savepoint_do_not_block_the_others(scene: Scene) -> None:
    send_some(scene, 6, "held")
    with holding(scene.server, scene.name) as holder:
        assert [holder.hold_all(queue._meta.db_table) for queue in QUEUES] == [3, 3]
        tree = scene.workers("testapp.Leased", "testapp.Transactional", "--no-dispatcher", "--no-maintenance")
        for wave in range(3):
            send_some(scene, 20, f"wave {wave}")
            wait_until(lambda sent=20 * (wave + 1): scene.effects() == sent, "what is free is handled")
        assert holds_for(lambda: scene.effects() == 60, 2), "what is held is not"
        holder.release(committed=False)
        verdict = scene.drained()

    assert verdict.faultless, verdict
    assert verdict.effects == verdict.sent
    assert tree.stop() == 0
    # The looks saw rows that no claim got. They were not claimed as fast as that went (2,000 times a second).
    assert sum(int(count) for count in re.findall(r"empty receives (\d+)", tree.log_text())) < 300


@on_both
def test_a_deadlock_victim_is_handled_again_without_costing_it_an_attempt(scene: Scene) -> None:
    private = scene.server.vendor == "postgresql"
    scene.execute(ACCOUNTS[scene.server.vendor])
    scene.execute("INSERT INTO accounts VALUES ('a', 0), ('b', 0)")
    for number in range(20):
        scene.send(Transactional, f"transfer {number}", lock="ab" if number % 2 else "ba")
    tree = scene.workers("testapp.Transactional", "--concurrency=2", environ={"CRASH_ATTEMPTS": "1"})

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.effects == 20, "with a single attempt each, a counted deadlock would have been poison"
    assert scene.execute("SELECT sum(amount) FROM accounts") == [(40,)]
    if private:  # no other server shows its log
        assert "deadlock detected" in scene.server.log_text()
    assert "failed" not in tree.log_text()


@pytest.fixture
def tiny_disk(server: PrivateServer, scene: Scene) -> Iterator[Path]:
    """A directory of the server's on a file system of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("a disk that fills up needs root, to mount one")
    directory = server.make_directory(f"disk_{scene.name}")
    options = f"size=8m,uid={server.account.uid},gid={server.account.gid},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"a disk that fills up cannot be mounted here: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield directory
    finally:
        scene.execute("ALTER TABLE testapp_leased SET TABLESPACE pg_default")
        scene.execute("DROP TABLE IF EXISTS filler")
        scene.execute("DROP TABLESPACE tiny")
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(scene: Scene, rows: int) -> bool:
    """Take room for so many rows of 6.4 kB; False when there is none."""
    text = "string_agg(md5(random()::text), '')"  # not compressible
    try:
        scene.execute(
            f"INSERT INTO filler SELECT {text} FROM generate_series(1, %s) r, generate_series(1, 200) GROUP BY r", rows
        )
    except psycopg.errors.DiskFull:
        return False
    return True


def test_on_a_full_disk_the_workers_slow_down_and_go_on_when_there_is_room(scene: Scene, tiny_disk: Path) -> None:
    scene.execute(f"CREATE TABLESPACE tiny LOCATION '{tiny_disk}'")
    scene.execute("ALTER TABLE testapp_leased SET TABLESPACE tiny")
    for number in range(200):
        scene.send(Leased, f"message {number}")
    # No free space within its pages either: a lease is a new version of the row, which needs a new page.
    scene.execute("ALTER TABLE testapp_leased SET (fillfactor = 100)")
    scene.execute("VACUUM (FULL) testapp_leased")
    scene.execute("CREATE TABLE filler (x text) TABLESPACE tiny")
    for size in (1000, 100, 10, 1):
        while fill(scene, size):
            pass

    tree = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
    wait_until(lambda: "No space left on device" in tree.log_text(), "the workers have found out")
    scene.execute("DROP TABLE filler")

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.poisoned == 0
    assert tree.restarts == 0
    assert tree.stop() == 0


def test_an_at_most_once_message_is_not_handled_twice_whatever_happens_to_the_server(scene: Scene) -> None:
    scene.workers("testapp.AtMostOnce")
    for number in range(300):
        scene.send(AtMostOnce, f"message {number}", sleep_ms=2)
    wait_until(lambda: scene.effects() > 50, "the workers are at work")
    scene.server.crash_and_restart()
    scene.terminate_workers()

    verdict = scene.drained()
    assert verdict.faultless, verdict  # no effect twice
    # What was claimed and not handled, at most a batch of 100 per task, is kept as poison or gone by contract.
    assert len(verdict.at_most_once_gone) <= 200
    assert len(verdict.at_most_once_gone) + verdict.effects + verdict.poisoned >= 300
