"""What a pump's looks settle behind its floor, beside real transactions: what may still come there is found, and what nobody can
bring any more is not walked over."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from queueapp import consumer
from queueapp.models import Now
from queueapp.receiving import settled
from queueapp.receiving.settled import Settled
from queueapp.sql import queue_sql
from queueapp.sql.claimed import MAX_SEQ, SEQ, Peek, Range
from tests.conformance.gate import Gate
from tests.databases import only_on_postgresql, skip_unless_prepared
from tests.in_process_worker import eventually, real_commits
from tests.late_commits import committed_late, jump
from tests.queueapp.sql.server import outgoing
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.receiving.test_pump import Start, idle_pump
from tests.workers.services.upkeep import another
from workers.receiving.pump import QueuePump

pytestmark = [real_commits, only_on_postgresql, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture(autouse=True)
def each_walk_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is settled is looked at once and not again."""
    monkeypatch.setattr(settled, "BRIEF", -1.0)
    monkeypatch.setattr(settled, "ASK_EVERY", 0.0)
    monkeypatch.setattr(settled, "REST_OF_ASKING", 0)
    monkeypatch.setattr(Settled, "walked_over_settled", lambda self, seconds: setattr(self, "_again_at", math.inf))


@pytest.fixture(autouse=True)
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def send(queue: Any, count: int = 1) -> list[int]:
    """Send messages; their seqs."""
    last = queue.objects.order_by("-seq").values_list("seq", flat=True).first() or 0
    queue.send_many(Nop(number, "") for number in range(count))
    return list(queue.objects.filter(seq__gt=last).order_by("seq").values_list("seq", flat=True))


def pass_over(pump: QueuePump, limit: int = 1_000) -> list[int]:
    """Claim by deletion, ahead of the floor, as one process would in a moment; what was there."""
    with pump.desk.claiming.claim(limit) as claim:
        claim.rows = pump.desk.sql.claim_by_delete(connection, claim.ranges, limit)
    return [row[SEQ] for row in claim.rows]


def look(pump: QueuePump, times: int = 20, *, all_: bool = False) -> Peek:
    """So many looks, each due; the last of them. ``all_``: also at what is settled, as is done for a hundredth of the time."""
    for _ in range(times):
        pump.desk.claiming._rescan_at = 0.0
        if all_:
            pump.floors.settled._again_at = 0.0
        seen = pump._peek()
        assert seen is not None
    return seen


@pytest.fixture
def pump() -> QueuePump:
    return idle_pump()


def test_all_that_was_handled_is_settled(pump: QueuePump) -> None:
    seqs = send(Leased, 10)
    assert pass_over(pump) == seqs

    look(pump)

    assert pump.floors.settled.to == pump.floors.lowest == seqs[-1] + 1
    pump.desk.claiming._rescan_at = 0.0
    assert pump.desk.claiming.look()[1] == []


def test_beside_a_reader_that_stays_open_as_well(pump: QueuePump) -> None:
    with another() as reader, reader.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM testapp_leased")
        send(Leased, 10)
        pass_over(pump)

        look(pump)

        assert pump.floors.settled.to == pump.floors.lowest > 1


def test_what_is_committed_late_is_found(pump: QueuePump) -> None:
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        passed = send(Leased, 5)
        assert pass_over(pump) == passed
        look(pump)
        assert pump.floors.settled.to < passed[0]
        commit()

        (late,) = Leased.objects.values_list("seq", flat=True)
        assert late < passed[0]
        assert look(pump).behind == 1
    assert pass_over(pump) == [late]
    look(pump)
    assert pump.floors.settled.to == passed[-1] + 1


@pytest.mark.parametrize("leased", [False, True], ids=["deleted", "leased"])
def test_what_a_rollback_brings_back_is_found(pump: QueuePump, leased: bool) -> None:
    seqs = send(Leased, 5)
    with another() as other:
        sql = queue_sql(Leased, other)
        only = [Range(seqs[2], seqs[2])]
        if leased:
            assert sql.claim_by_lease(other, only, 1, uuid4(), uuid4(), 60_000)
        else:
            assert sql.claim_by_delete(other, only, 1)
        assert pass_over(pump) == [*seqs[:2], *seqs[3:]]
        look(pump)
        assert pump.floors.settled.to <= seqs[2]

    assert look(pump).behind == 1
    assert pass_over(pump) == [seqs[2]]


def test_what_a_prepared_transaction_brings_is_found(pump: QueuePump) -> None:
    skip_unless_prepared(connection)
    with another() as other, other.cursor() as cursor:
        queue_sql(Leased, other).insert(other, outgoing())
        passed = send(Leased, 5)
        pass_over(pump)
        look(pump, 1)
        cursor.execute("PREPARE TRANSACTION 'settling'")
    try:
        look(pump)
        assert pump.floors.settled.to < passed[0]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT PREPARED 'settling'")

    assert look(pump).behind == 1


def test_what_a_lapsed_lease_frees_is_found(pump: QueuePump) -> None:
    seqs = send(Leased, 5)
    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() + timedelta(hours=1))
    pass_over(pump)
    look(pump)
    assert pump.floors.settled.to == seqs[1]

    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() - timedelta(seconds=1))

    assert look(pump).behind == 1


def test_a_seq_that_somebody_has_chosen_hides_those_that_are_given_later_once(pump: QueuePump) -> None:
    send(Leased, 4)
    Leased.objects.filter(seq=Leased.objects.latest("seq").seq).update(seq=MAX_SEQ - 5)
    pass_over(pump)
    assert pump.floors.lowest == MAX_SEQ - 4
    look(pump, 160)
    assert pump.floors.settled.to == MAX_SEQ - 4
    later = send(Leased)
    assert look(pump, 80).behind == 0

    assert look(pump, 160, all_=True).behind == 1
    assert pass_over(pump) == later

    look(pump, 160)
    send(Leased)
    assert look(pump, 80).behind == 1, "nothing is believed any more"


def test_seqs_that_begin_anew_are_found(pump: QueuePump) -> None:
    jump(Leased, 1_000_000)
    send(Leased, 3)
    pass_over(pump)
    look(pump)
    assert pump.floors.settled.to > 1_000_000
    jump(Leased, 1)
    try:
        again = send(Leased)
        assert again[0] < 1_000_000
        assert look(pump, 80, all_=True).behind == 1
    finally:
        jump(Leased, 2_000_000)


def test_where_the_database_fails_to_tell_looks_go_on(pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes is a hint that looks can do without; the session is as it was."""
    seqs = send(Leased, 5)
    pass_over(pump)
    monkeypatch.setattr(pump.desk.sql, "_q", '"not there"')

    looked = [look(pump, 1) for _ in range(10)]

    assert looked == [Peek(0, 0, 0)] * 10
    assert pump.floors.settled.to == 0
    assert pump.floors.question() is None
    assert pump.floors.lowest == seqs[-1] + 1
    assert not pump.peek_breaker.failures


def test_what_lies_behind_a_message_that_stays_is_not_settled(pump: QueuePump) -> None:
    seqs = send(Leased, 5)
    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() + timedelta(hours=1))
    pass_over(pump)

    look(pump)

    assert pump.floors.settled.to == seqs[1]
    assert pump.floors.question() is None


def test_what_a_handler_has_in_hand_is_not_settled(pump: QueuePump) -> None:
    """Looks leave it out, whatever has become of its row."""
    seqs = send(Leased, 5)
    pass_over(pump)
    pump.desk.claiming.hold(seqs[1])

    look(pump)

    assert pump.floors.settled.to == seqs[1]
    pump.desk.claiming.let_go(seqs[1])
    look(pump)
    assert pump.floors.settled.to == seqs[-1] + 1


def test_two_looks_at_once_settle_what_each_has_seen(pump: QueuePump) -> None:
    """The one began before a message came, and is known after the other."""
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        passed = send(Leased, 5)
        pass_over(pump)
        early = pump.floors.before
        seen = pump.desk.sql.peek(connection, [Range(passed[-1] + 1)], [Range(0, passed[-1])], 10)
        commit()
    pump.floors.settled.over = passed[-1] + 1

    pump.desk.claiming.seen(seen, [Range(0, passed[-1])], 0.001, early)

    assert pump.floors.settled.to < passed[0]
    assert look(pump).behind == 1


@pytest.mark.parametrize("told", [False, True])
def test_a_look_beside_which_a_floor_came_down_settles_nothing(
    pump: QueuePump, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    seqs = send(Leased, 5)
    pass_over(pump)
    monkeypatch.setattr(Settled, "lower", lambda self, seq: None)
    pump.floors.settled.over = seqs[-1]
    before = pump.floors.before
    pump.floors.lower(seqs[2], told=told)

    pump.desk.claiming.seen(Peek(0, 0, 0), [Range(0, seqs[-1])], 0.001, before)

    assert pump.floors.settled.to == 0


def test_what_is_known_before_a_look_is_so_before_it_is_decided_where_it_goes(
    pump: QueuePump, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = send(Leased, 5)
    pass_over(pump)
    monkeypatch.setattr(Settled, "lower", lambda self, seq: None)
    pump.floors.settled.over = seqs[-1] + 1
    claiming = pump.desk.claiming
    where = claiming.look

    def comes_down() -> tuple[list[Range], list[Range]]:
        found = where()
        pump.floors.lower(seqs[2], told=False)
        return found

    monkeypatch.setattr(claiming, "look", comes_down)
    look(pump, 1)
    assert pump.floors.settled.to == 0

    monkeypatch.setattr(claiming, "look", where)
    pump.floors.passed([(seqs[-1],)], pump.floors.returns)
    look(pump)
    assert pump.floors.settled.to == seqs[-1] + 1


def test_the_floor_is_read_before_it_is_asked_who_writes(pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim raises it meanwhile, past what those may bring who began after the answer was made."""
    seqs = send(Leased, 5)
    pass_over(pump)
    pump.floors.settled.walked(1.0)
    writers = type(pump.desk.sql).writers

    def raises_it(self: Any, on: Any) -> Any:
        found = writers(self, on)
        pump.floors.passed([(seqs[-1] + 100,)], pump.floors.returns)
        return found

    monkeypatch.setattr(type(pump.desk.sql), "writers", raises_it)
    pump.desk.claiming.look_behind(pump.desk.sql, connection)

    assert pump.floors.settled._mark.floor == seqs[-1] + 1


def test_an_answer_of_before_a_reconnect_is_none(pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> None:
    send(Leased, 5)
    pass_over(pump)
    pump.floors.settled.walked(1.0)

    def reconnects(self: Any, on: Any) -> Any:
        pump.floors.connected_anew()
        return set()

    monkeypatch.setattr(type(pump.desk.sql), "writers", reconnects)
    pump.desk.claiming.look_behind(pump.desk.sql, connection)

    assert pump.floors.settled._mark.floor == 0


def test_it_is_asked_when_it_is_to_be_and_not_else(pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> None:
    send(Leased, 5)
    pass_over(pump)
    asked: list[Any] = []
    monkeypatch.setattr(type(pump.desk.sql), "writers", lambda self, on: asked.append(on) or set())
    pump.desk.claiming.look_behind(pump.desk.sql, connection)
    assert asked == []

    pump.floors.settled.walked(1.0)
    pump.desk.claiming.look_behind(pump.desk.sql, connection)

    assert len(asked) == 1
    assert pump.floors.settled._mark.floor == pump.floors.lowest


def test_a_database_that_does_not_tell_settles_nothing(pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> None:
    send(Leased, 5)
    pass_over(pump)
    asked: list[Any] = []
    monkeypatch.setattr(type(pump.desk.sql), "writers", lambda self, on: asked.append(on))

    look(pump)

    assert pump.floors.settled.to == pump.floors.settled.over == 0
    assert len(asked) == 1


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_worker_finds_all_that_comes_back_or_late(queue: Any, start_worker: Start) -> None:
    """A handler is under way for long, and a commit comes late, while others are handled."""
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


def test_beside_millions_of_dead_rows_few_of_them_are_walked_over(
    pump: QueuePump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the whole is for: looks that follow begin where nothing is settled."""
    seqs = send(Leased, 2_000)
    pass_over(pump, 2_000)
    looked: list[Range] = []
    peek = type(pump.desk.sql).peek

    def peeks(self: Any, on: Any, ahead: Any, behind: Any, limit: int) -> Peek:
        looked.extend(behind)
        return peek(self, on, ahead, behind, limit)

    look(pump)
    monkeypatch.setattr(type(pump.desk.sql), "peek", peeks)
    more = send(Leased, 3)
    pass_over(pump)
    look(pump, 1)

    assert looked == [Range(seqs[-1] + 1, more[-1])]
