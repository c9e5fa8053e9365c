"""The rescan finds every message that appears behind a low-water mark, beside real transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections

from queueapp import consumer, messages
from queueapp.models import Now
from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, SEQ, PeekResult, SeqRange
from tests.conformance.gate import Gate
from tests.databases import only_on_postgresql, skip_unless_prepared
from tests.in_process_worker import Worker, eventually, real_commits
from tests.late_commits import committed_late, jump
from tests.queueapp.sql.server import outgoing
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.receiving.test_pump import Start, idle_pump
from tests.workers.services.slow_handler import another
from workers.receiving.claim_tracker import ClaimTracker
from workers.receiving.pump import QueuePump


@pytest.fixture
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def send(queue: Any, count: int = 1) -> list[int]:
    """Send messages; their seqs."""
    last = queue.objects.order_by("-seq").values_list("seq", flat=True).first() or 0
    queue.send_many(Nop(number, "") for number in range(count))
    return list(queue.objects.filter(seq__gt=last).order_by("seq").values_list("seq", flat=True))


def pass_over(pump: QueuePump, limit: int = 1_000) -> list[int]:
    """Claim by deletion, ahead of the floor, as one process would in a moment; what was there."""
    with pump.state.claims.claim(limit) as claim:
        claim.rows = pump.state.sql.claims.claim_by_delete(connection, claim.ranges, limit)
    return [row[SEQ] for row in claim.rows]


def look(pump: QueuePump, times: int = 20) -> PeekResult:
    """Peek so many times, each time with a window of the rescan. Returns the last peek."""
    for _ in range(times):
        pump.state.claims.next_window_at = 0.0
        seen = pump.peek()
        assert seen is not None
    return seen


@pytest.fixture
def pump() -> QueuePump:
    return idle_pump()


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_message_committed_late_is_found(pump: QueuePump) -> None:
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        passed = send(Leased, 5)
        assert pass_over(pump) == passed
        look(pump)
        commit()

        (late,) = Leased.objects.values_list("seq", flat=True)
        assert late < passed[0]
        assert look(pump).behind == 1
    assert pass_over(pump) == [late]
    assert look(pump).behind == 0


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_message_committed_late_is_found_beside_an_old_snapshot(pump: QueuePump) -> None:
    with another() as reader, reader.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM testapp_leased")
        with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
            send(Leased, 10)
            pass_over(pump)
            assert look(pump).behind == 0
            commit()

            assert look(pump).behind == 1


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("leased", [False, True], ids=["deleted", "leased"])
def test_message_restored_by_a_rollback_is_found(pump: QueuePump, leased: bool) -> None:
    seqs = send(Leased, 5)
    with another() as second_session:
        sql = queue_sql(Leased, second_session)
        only = [SeqRange(seqs[2], seqs[2])]
        if leased:
            assert sql.claims.claim_by_lease(second_session, only, 1, uuid4(), uuid4(), 60_000)
        else:
            assert sql.claims.claim_by_delete(second_session, only, 1)
        assert pass_over(pump) == [*seqs[:2], *seqs[3:]]
        assert look(pump).behind == 0

    assert look(pump).behind == 1
    assert pass_over(pump) == [seqs[2]]


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_message_of_a_prepared_transaction_is_found(pump: QueuePump) -> None:
    skip_unless_prepared(connection)
    with another() as second_session, second_session.cursor() as cursor:
        queue_sql(Leased, second_session).inserts.insert(second_session, outgoing())
        send(Leased, 5)
        pass_over(pump)
        look(pump, 1)
        cursor.execute("PREPARE TRANSACTION 'rescan'")
    try:
        assert look(pump).behind == 0
    finally:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT PREPARED 'rescan'")

    assert look(pump).behind == 1


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_message_with_an_expired_lease_is_found(pump: QueuePump) -> None:
    seqs = send(Leased, 5)
    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() + timedelta(hours=1))
    pass_over(pump)
    assert look(pump).behind == 0

    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() - timedelta(seconds=1))

    assert look(pump).behind == 1


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_messages_below_a_seq_chosen_by_the_sender_are_found(pump: QueuePump) -> None:
    send(Leased, 4)
    Leased.objects.filter(seq=Leased.objects.latest("seq").seq).update(seq=MAX_SEQ - 5)
    pass_over(pump)
    assert pump.marks.lowest == MAX_SEQ - 4
    assert look(pump, 160).behind == 0
    later = send(Leased)

    assert look(pump, 160).behind == 1
    assert pass_over(pump) == later


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
def test_messages_of_a_restarted_sequence_are_found(pump: QueuePump) -> None:
    jump(Leased, 1_000_000)
    send(Leased, 3)
    pass_over(pump)
    assert look(pump).behind == 0
    jump(Leased, 1)
    try:
        again = send(Leased)
        assert again[0] < 1_000_000
        assert look(pump, 80).behind == 1
    finally:
        jump(Leased, 2_000_000)


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_worker_handles_late_commits_and_slow_messages_beside_the_backlog(queue: Any, start_worker: Start) -> None:
    done: list[int] = []
    gate = Gate()

    @consumer(queue, name="tests")
    def handle(message: Nop) -> None:
        if message.number == 3:
            gate.enter()
        done.append(message.number)

    start_worker(queue, concurrency=2)
    with committed_late(lambda: queue.send(Nop(99, ""))) as commit:
        for first in range(0, 60, 10):
            queue.send_many(Nop(number, "") for number in range(first, first + 10))
            eventually(lambda last=first + 9: last in done)
        commit()
        eventually(lambda: 99 in done)
    gate.let(1)

    eventually(lambda: not queue.objects.exists())
    assert sorted(done) == [*range(60), 99]


_GATE = 7_401


@pytest.fixture
def handled(settings: Any, start_worker: Callable[..., Worker]) -> list[int]:
    """What a worker has handled that looks ten times a second."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    numbers: list[int] = []

    @consumer(Leased, name="tests")
    def handle(message: Nop) -> None:
        numbers.append(message.number)

    start_worker(Leased)
    return numbers


@pytest.fixture
def slow_trigger() -> Iterator[None]:
    """Inserts of messages with the number -1 wait, before the row is stored, until the test releases a lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF position('-1' in convert_from(NEW.body, 'UTF8')) > 0 THEN "
            f"PERFORM pg_advisory_xact_lock_shared({_GATE}); END IF; RETURN NEW; END $$"
        )
        cursor.execute("CREATE TRIGGER late BEFORE INSERT ON testapp_leased FOR EACH ROW EXECUTE FUNCTION late()")
        cursor.execute(f"SELECT pg_advisory_lock({_GATE})")
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_unlock({_GATE})")  # where the test has not come to it; else a warning
        cursor.execute("DROP TRIGGER late ON testapp_leased")
        cursor.execute("DROP FUNCTION late()")


def ten_others_are_handled(handled: list[int]) -> None:
    """One by one, so that floors rise and looks come by."""
    for number in range(10):
        Leased.send(Nop(number, ""))
        eventually(lambda wanted=number: wanted in handled)


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
def test_a_send_whose_trigger_waits_is_found_soon(handled: list[int], slow_trigger: None) -> None:
    def send() -> None:
        Leased.send(Nop(-1, ""))
        connections.close_all()

    sender = threading.Thread(target=send)
    sender.start()
    with connection.cursor() as cursor:

        def waits() -> bool:
            cursor.execute(
                "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s", [_GATE]
            )
            return bool(cursor.fetchone()[0])

        eventually(waits)
        ten_others_are_handled(handled)
        cursor.execute("SELECT pg_advisory_unlock(%s)", [_GATE])
        sender.join()

    eventually(lambda: handled == [*range(10), -1], 10)


@real_commits
@only_on_postgresql
@pytest.mark.usefixtures("no_consumers")
def test_a_copy_that_is_not_at_its_end_is_found_soon(handled: list[int]) -> None:
    """``send_many`` is one: its rows have their seqs before the first of them is stored."""
    before, numbers = last_seq(), range(-100, 0)
    second_connection = connection.copy()
    second_connection.inc_thread_sharing()
    second_connection.ensure_connection()
    try:
        with second_connection.connection.cursor().copy("COPY testapp_leased (id, headers, body) FROM STDIN") as copy:
            for number in numbers:
                headers, body = messages.encode(Nop(number, "x" * 1_000))
                copy.write_row((messages.new_id(), headers, body))
            eventually(lambda: last_seq() > before)
            ten_others_are_handled(handled)
    finally:
        second_connection.close()

    eventually(lambda: sorted(handled) == [*numbers, *range(10)], 10)


def last_seq() -> int:
    """The seq that was given last."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sequence_last_value(pg_get_serial_sequence('testapp_leased', 'seq')::regclass)")
        return cursor.fetchone()[0] or 0


def _insert_highest() -> None:
    if connection.vendor == "microsoft":
        pytest.skip("a seq is an identity, which cannot be set")
    Leased.send(Nop(1, ""))
    Leased.objects.update(seq=MAX_SEQ)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_worker_handles_it_and_those_that_come_after_it(start_worker) -> None:
    seen: list[int] = []

    @consumer(Leased, name="tests")
    def handle(message: Nop) -> None:
        seen.append(message.number)

    _insert_highest()
    start_worker(Leased, concurrency=2)
    eventually(lambda: seen == [1])
    for number in (2, 3):
        Leased.send(Nop(number, ""))
        eventually(lambda wanted=number: seen[-1] == wanted and not Leased.objects.exists())

    assert seen == [1, 2, 3]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_receive_takes_it_and_those_that_come_after_it() -> None:
    _insert_highest()
    found: list[int] = []

    def received() -> list[int]:
        with Leased.receive(5) as batch:
            for message in batch:
                found.append(message.body["number"])
                message.ack()
        return found

    assert received() == received() == [1]
    for number in (2, 3):
        Leased.send(Nop(number, ""))
        assert received()[-1] == number

    assert found == [1, 2, 3]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_floor_is_a_seq_and_never_the_highest_one_by_a_claim() -> None:
    floors = LowWaterMarks()
    floors.share(memoryview(bytearray(8)).cast("q"), [0, 0])
    floors.advance([(MAX_SEQ,)], 0)
    floors.advance_to(MAX_SEQ)
    assert floors.ahead() == [SeqRange(0, MAX_SEQ)]
    floors.advance([(MAX_SEQ - 1,)], 0)
    assert floors.ahead() == [SeqRange(MAX_SEQ, MAX_SEQ)]
    floors.skip(("", 0), lambda low: low + 1)
    assert floors.ahead() == [SeqRange(MAX_SEQ, MAX_SEQ)]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_floor_of_a_level_is_one_too() -> None:
    floors = LowWaterMarks([("", 1), ("", 0)], leveled=True)
    floors.advance([(MAX_SEQ, *(None,) * 6, "", 1)], 0)
    assert floors.ahead()[0] == SeqRange(0, MAX_SEQ, "", 1)
    floors.advance([(MAX_SEQ - 1, *(None,) * 6, "", 1)], 0)
    assert floors.ahead()[0] == SeqRange(MAX_SEQ, MAX_SEQ, "", 1)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_the_rescan_comes_round_soon() -> None:
    floors = LowWaterMarks()
    floors.advance([(MAX_SEQ - 1,)], 0)
    looks = 0
    while not floors.rescanned(0.0):
        looks += 1
        assert looks < 100


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_claims_beside_each_other_look_no_higher() -> None:
    floors = LowWaterMarks()
    floors.advance([(MAX_SEQ - 1,)], 0)
    claiming = ClaimTracker(floors)
    claiming.begin(500)

    assert claiming.begin(500).ranges == [SeqRange(MAX_SEQ, MAX_SEQ)]
