"""Crashes of worker processes are counted once each, and what delays that delays no other."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp.circuit_breaker import CircuitBreaker
from queueapp.models import PoisonMessage
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Many, Ping
from tests.testapp.models import AtMostOnce, Effect, Leased, SeveralTransactional, Transactional
from tests.workers.trees import Tree
from workers.processes import crash_recovery
from workers.processes.crash_recovery import CrashRecorder, CrashReport, record
from workers.processes.shared_memory import InFlightMessage

pytestmark = real_commits
Start = Callable[..., Tree]
NONE = uuid.UUID(int=0)


def script(before: str = "", options: str = "") -> tuple[str, str]:
    """A supervisor of the queue that is named first, with something done to it."""
    lines = ["import sys", "import django", "django.setup()", "from tests.testapp import models",
             "from workers.processes import supervisor", before,
             f"sys.exit(supervisor.Supervisor([getattr(models, sys.argv[1])], {options}).run())"]  # fmt: skip
    return "-c", "\n".join(lines)


def failures_of(row: Any) -> list[Any]:
    found: list[Any] = json.loads(row.failures or "[]")
    return found


@pytest.mark.parametrize("queue", [Transactional, Leased], ids=lambda queue: queue.__name__)
def test_a_worker_that_died_is_counted_once_though_the_tree_is_stopped_before_it_is_replaced(
    start_tree: Start, queue: Any
) -> None:
    """Seen beside four busy loops, where a test stopped a tree in the tenth of a second before it had replaced a
    worker: it ended with 1, and had counted that death twice."""
    queue.send(Ping("pill", die=True))
    patient = script("supervisor.FIRST_BACKOFF = supervisor.LONGEST_BACKOFF = 600.0")
    tree = start_tree(queue.__name__, command=patient)
    eventually(lambda: "restarting in 600.0 s" in tree.output, 4 * DEADLINE)

    assert tree.terminate() == 0, tree.output
    (row,) = queue.objects.all()
    assert len(failures_of(row)) == 1
    assert not PoisonMessage.objects.exists()


NO_MORE_PROCESSES = """
import errno, os, subprocess
Popen = subprocess.Popen
def refusing(*args, **kwargs):
    if os.path.exists(sys.argv[2]):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return Popen(*args, **kwargs)
supervisor.subprocess.Popen = refusing
"""


def test_where_no_process_can_be_started_the_others_go_on_and_it_is_tried_again(
    start_tree: Start, tmp_path: Path
) -> None:
    """It was the end of the tree: all of the others were killed, with what they had in flight."""
    no_more = tmp_path / "no more"
    tree = start_tree("AtMostOnce", str(no_more), command=script(NO_MORE_PROCESSES, "processes=2"))
    tree.wait_for_workers(2)
    no_more.touch()
    AtMostOnce.send(Ping("pill", die=True))
    eventually(lambda: "cannot be started: [Errno 11] Resource temporarily unavailable" in tree.output, 4 * DEADLINE)

    AtMostOnce.send(Ping("still handled"))
    eventually(Effect.objects.exists, 4 * DEADLINE)
    no_more.unlink()
    eventually(lambda: tree.output.count("receives testapp.AtMostOnce") == 1, 4 * DEADLINE)

    assert tree.terminate() == 0, tree.output
    for once in ("at-most-once message is lost", "was killed by SIGKILL; restarting"):
        assert tree.output.count(once) == 1, "its death is no other one each time"


FAILING = """
watch = supervisor.Supervisor._watch
def failing(self, life_read):
    import os
    if os.path.exists(sys.argv[2]):
        raise LookupError("an error in the supervisor")
    watch(self, life_read)
supervisor.Supervisor._watch = failing
"""


def test_a_supervisor_that_fails_lets_handlers_end(start_tree: Start, tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    AtMostOnce.send(Ping("in flight", sleep_ms=2000))
    tree = start_tree("AtMostOnce", str(fail), command=script(FAILING))
    eventually(lambda: not AtMostOnce.objects.exists(), 4 * DEADLINE)

    fail.touch()

    assert tree.wait() == 1
    assert "LookupError: an error in the supervisor" in tree.output
    assert [*Effect.objects.values_list("name", flat=True)] == ["in flight"]


def test_a_receiver_that_ends_its_process_does_not_end_the_tree(start_tree: Start) -> None:
    """The supervisor reports a message that was lost with its process."""
    exiting = script("from queueapp import signals; signals.crashed.connect(lambda **_: sys.exit(0), weak=False)")
    AtMostOnce.send(Ping("pill", die=True))
    tree = start_tree("AtMostOnce", command=exiting)
    eventually(lambda: "at-most-once message is lost" in tree.output, 4 * DEADLINE)
    AtMostOnce.send(Ping("next"))
    eventually(Effect.objects.exists, 4 * DEADLINE)

    assert tree.terminate() == 0, tree.output
    assert "SystemExit in the receivers of a signal" in tree.output


def test_a_tree_that_ends_before_a_death_could_be_counted_reports_it(start_tree: Start) -> None:
    """The loop waited for the row, and SIGTERM for the loop."""
    Leased.send(Ping("in flight", sleep_ms=3_600_000, tell=True))
    tree = start_tree("testapp.Leased")
    (worker,) = tree.wait_for_workers()
    eventually(Effect.objects.exists, 4 * DEADLINE)
    with transaction.atomic():
        seq = Leased.objects.select_for_update().get().seq
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: "restarting in" in tree.output)
        assert tree.terminate() == 1
    assert f"was killed by SIGKILL, in flight: testapp.Leased seq {seq}." in tree.output


RECORD_CRASH = """
supervisor.FIRST_BACKOFF = 0.0
watch = supervisor.Supervisor._watch
def record_crash(self, life_read):
    watch(self, life_read)
    print("turned", flush=True)
supervisor.Supervisor._watch = record_crash
"""


def test_a_process_is_not_replaced_before_its_death_was_tried_to_be_counted(start_tree: Start) -> None:
    Leased.send(Ping("in flight", sleep_ms=3_600_000, tell=True))
    tree = start_tree("Leased", command=script(RECORD_CRASH))
    (worker,) = tree.wait_for_workers()
    eventually(Effect.objects.exists, 4 * DEADLINE)
    with transaction.atomic():
        Leased.objects.select_for_update().get()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: "restarting in 0.0 s" in tree.output)
        turns = tree.output.count("turned")
        eventually(lambda: tree.output.count("turned") > turns + 5)
        assert "receives testapp.Leased" not in tree.output
    eventually(lambda: tree.output.count("receives testapp.Leased") == 1, 4 * DEADLINE)

    assert len(failures_of(Leased.objects.get())) == 1


# -- the accounts themselves ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_recovery, "MAX_LOCK_WAIT", timedelta(0))
    monkeypatch.setattr(crash_recovery, "LOCK_WAIT", timedelta(milliseconds=200))


@contextmanager
def held(queue: Any, seq: int) -> Iterator[None]:
    """Another session has this row."""
    second_connection = connection.copy()
    try:
        second_connection.set_autocommit(False)
        with second_connection.cursor() as cursor:
            cursor.execute(f"UPDATE {queue._meta.db_table} SET deliveries = deliveries WHERE seq = %s", [seq])
        yield
    finally:
        second_connection.close()


def crash_of(queue: Any, *in_flight: Sequence[int]) -> CrashReport:
    owner = uuid.uuid4()
    found = [InFlightMessage(0, seqs[0], NONE, owner, "", tuple(seqs) if len(seqs) > 1 else ()) for seqs in in_flight]
    return CrashReport([(queue, item) for item in found], [(queue, owner)], "was killed")


def test_a_locked_row_does_not_delay_the_rest_of_a_crash() -> None:
    Transactional.send_many([Ping("one"), Ping("two"), Ping("three")])
    first, second, third = Transactional.objects.order_by("seq")
    crash = crash_of(Transactional, [first.seq], [second.seq], [third.seq])
    breaker = CircuitBreaker("accounts")

    with held(Transactional, second.seq):
        assert record([crash], breaker)[0] == [crash]
        assert [message.seq for _, message in crash.in_flight] == [second.seq]
        assert len(crash.subscribers) == 1, "its leases tell whose the row is"
        assert [len(failures_of(row)) for row in Transactional.objects.order_by("seq")] == [1, 0, 1]
    assert record([crash], breaker) == ([], 0.0)
    assert crash.is_recorded

    assert [len(failures_of(row)) for row in Transactional.objects.order_by("seq")] == [1, 1, 1]
    assert not crash.subscribers


def test_a_call_with_several_is_counted_whole_or_not_yet() -> None:
    SeveralTransactional.send_many([Many("one"), Many("two"), Many("three")])
    seqs = [*SeveralTransactional.objects.order_by("seq").values_list("seq", flat=True)]
    crash = crash_of(SeveralTransactional, seqs)
    breaker = CircuitBreaker("accounts")
    deliveries = SeveralTransactional.objects.order_by("seq").values_list("deliveries", flat=True)

    with held(SeveralTransactional, seqs[-1]):
        for _ in range(2):
            assert record([crash], breaker)[0] == [crash]
            assert [*deliveries.all()] == [0, 0, 0]
    assert record([crash], breaker) == ([], 0.0)

    assert [*deliveries.all()] == [1, 1, 1]


def test_a_row_is_waited_for_when_everybody_else_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may take a moment to notice that a receiver is gone."""
    monkeypatch.setattr(crash_recovery, "MAX_LOCK_WAIT", timedelta(seconds=DEADLINE))
    Transactional.send(Ping("one"))
    (row,) = Transactional.objects.all()
    waited = threading.Event()
    really_record = crash_recovery.record

    def record_crash(*given: Any) -> tuple[list[CrashReport], float]:
        found = really_record(*given)
        if found[0]:
            waited.set()
        return found

    monkeypatch.setattr(crash_recovery, "record", record_crash)
    recorder = CrashRecorder(lambda: None)
    recorder.start()
    with held(Transactional, row.seq):
        recorder.add(crash_of(Transactional, [row.seq]))
        recorder.ask_to_stop()
        eventually(waited.is_set)

    assert recorder.end(DEADLINE) == []
    assert len(failures_of(Transactional.objects.get())) == 1


def test_an_uncountable_crash_does_not_block_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of the user's is asked there, and may never answer."""
    asked, answer = threading.Event(), threading.Event()

    def hanging(pending: Sequence[CrashReport], breaker: CircuitBreaker) -> tuple[list[CrashReport], float]:
        seen.extend(pending)
        asked.set()
        answer.wait(DEADLINE)
        return [], 0.0

    seen: list[CrashReport] = []

    monkeypatch.setattr(crash_recovery, "record", hanging)
    counted = threading.Event()
    recorder = CrashRecorder(counted.set)
    recorder.start()
    first, second = crash_of(Transactional, [1]), crash_of(Transactional, [2])
    recorder.add(first)
    eventually(asked.is_set)
    recorder.add(second)

    assert recorder.end(0.1) == [first, second]
    answer.set()
    assert recorder.join(DEADLINE)
    assert counted.is_set()
    assert (seen, recorder.end(0)) == ([first, second], []), "what came meanwhile was counted, too"
