"""AT_LEAST_ONCE: a leased batch, its renewals, and each of its messages by itself."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, connection, connections, transaction

from queueapp import Context, consumer
from queueapp.messages import new_id
from queueapp.models import PoisonMessage
from queueapp.sql import backend_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, AtMostOnce, Effect, Leased
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving.receivers import LeasedBatch, at_least_once, outcomes
from workers.services.lease_renewer import LeaseRenewer


@pytest.fixture
def receiver(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SingleReceiver]:
    """Makes a receive task of ``Leased`` with this handler and lease."""

    def make(act: Callable[[Nop, Context], None], *, lease_ms: int = 5_000, **options: Any) -> SingleReceiver:
        # Handlers are slow where a test says so, and not because the machine is.
        settings.QUEUEAPP = {"RETRY_DELAY": 0, "BATCH_TARGET": 30, **options}
        monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(milliseconds=lease_ms))

        @consumer(Leased, name="tests")
        def handler(message: Nop, context: Context) -> None:
            act(message, context)

        return SingleReceiver(Leased)

    return make


def send(count: int) -> list[int]:
    """Send so many messages; returns their seqs."""
    for number in range(1, count + 1):
        Leased.send(Nop(number, ""))
    return list(Leased.objects.order_by("seq").values_list("seq", flat=True))


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_renewal_in_the_middle_of_the_hand_over_covers_the_message(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the instant after it has left those that wait, before anything else is done with it."""
    renewed: list[int] = []

    class Watched(deque[Any]):
        def popleft(self) -> Any:
            taken = super().popleft()
            if isinstance(taken, tuple):  # a message that waited; else one that is done
                item.batch.expires = monotonic()  # it is high time
                before = Leased.objects.get(seq=taken[0]).lease_expires
                renewals.renew_once()
                assert Leased.objects.get(seq=taken[0]).lease_expires > before, "it was missed"
                renewed.append(taken[0])
            return taken

    monkeypatch.setattr(at_least_once, "deque", Watched)
    seqs = send(3)
    item = receiver(lambda message, context: None)
    renewals = LeaseRenewer("default", [item.pump])

    assert item.receive(3) == 3

    assert renewed == seqs
    assert not Leased.objects.exists()


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_renewal_that_a_hand_over_overtakes_covers_the_message() -> None:
    """It happens between the two looks of the renewal: at what waits, and at what is in flight."""

    class Overtaking(deque[Any]):
        overtaken = False

        def __iter__(self) -> Iterator[Any]:
            if not self.overtaken:
                self.overtaken = True
                batch.in_flight.append(self[0][0])
                self.popleft()
            return super().__iter__()

    rows = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3)]
    batch = LeasedBatch(object(), 0.0, ())  # type: ignore[arg-type]
    batch.waiting = Overtaking(rows)

    assert batch.leased() == {1, 2, 3}
    assert batch.in_flight == [1], "it happened"


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_message_that_is_given_back_in_the_middle_of_the_hand_over_is_not_in_flight(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one that waits is seen by the task, and gone when it reaches for it."""
    observed: list[int] = []
    handled: list[int] = []

    class Taken(deque[Any]):
        def popleft(self) -> Any:
            if len(self) == 1 and isinstance(self[0], tuple):
                item.task.sql.acks.release(connection, item.batch.take_waiting(), item.batch.token, cancelled=False)
            return super().popleft()

    monkeypatch.setattr(at_least_once, "deque", Taken)
    seqs = send(2)
    item = receiver(lambda message, context: handled.append(context.seq))
    really = at_least_once.BatchSizer.observe

    def observe(self: Any, count: int, seconds: float, *, full: bool = True) -> None:
        observed.append(count)
        really(self, count, seconds, full=full)

    monkeypatch.setattr(at_least_once.BatchSizer, "observe", observe)

    item.receive(2)

    assert handled == seqs[:1]
    assert observed == [1], "and it is not counted as handled"
    (row,) = Leased.objects.all()
    assert (row.seq, row.deliveries, row.lease_token) == (seqs[1], 0, None)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_of_what_waits_each_is_taken_by_one_of_two_that_take_at_once() -> None:
    """The other one is faster: what was seen to wait is gone."""
    rows: Any = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3)]
    batch = LeasedBatch(object(), 0.0, ())  # type: ignore[arg-type]
    rest: list[int] = []

    class Shared(deque[Any]):
        def pop(self) -> Any:  # type: ignore[override]
            if len(self) == 2:
                rest.extend(self.popleft()[0] for _ in range(2))
            return super().pop()

    batch.waiting = Shared(rows)

    assert batch.take_waiting() == [3]
    assert rest == [1, 2]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_what_is_taken_out_of_a_batch_is_in_the_order_of_the_queue() -> None:
    """In which everybody locks rows; also what an ack that failed had put back."""
    rows: Any = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3, 4)]
    batch = LeasedBatch(object(), 0.0, rows)  # type: ignore[arg-type]
    batch.done.extend([7, 5, 6])

    assert batch.take_waiting(keep=1) == [2, 3, 4]
    assert batch.take_done() == [5, 6, 7]


def until_expired(context: Context) -> None:
    """Take longer than the lease, by the database's clock and by the worker's."""
    expires = Leased.objects.get(seq=context.seq).lease_expires
    assert expires is not None
    eventually(lambda: backend_of(connection).now(connection) > expires)


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("target", [0.001, 10], ids=["a slow handler", "a fast one"])
def test_messages_that_wait_when_the_lease_expires_are_not_handled_beside_their_next_owner(
    receiver: Callable[..., SingleReceiver], caplog: pytest.LogCaptureFixture, target: float
) -> None:
    """Slow or fast is a matter of BATCH_TARGET: whether it would have looked at the clock at all."""
    calls: list[int] = []
    taken: list[int] = []

    def act(message: Nop, context: Context) -> None:
        calls.append(message.number)
        if message.number == 1:
            until_expired(context)
            with Leased.receive(10) as rest:
                for second_message in rest:
                    taken.append(second_message.body["number"])
                    second_message.ack()

    send(4)
    item = receiver(act, lease_ms=1_000, BATCH_TARGET=target)

    item.receive(4)

    assert taken == [1, 2, 3, 4]
    assert calls == [1]
    assert item.pump.stats.lost == 4
    assert "the lease of 3 waiting messages expired" in caplog.text


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_messages_that_wait_when_the_lease_expires_without_another_owner_are_released_uncounted(
    receiver: Callable[..., SingleReceiver],
) -> None:
    calls: list[int] = []

    def act(message: Nop, context: Context) -> None:
        calls.append(message.number)
        if message.number == 1:
            until_expired(context)

    seqs = send(3)
    item = receiver(act, lease_ms=1_000)

    item.receive(3)

    assert calls == [1]
    rows = Leased.objects.order_by("seq").values_list("seq", "deliveries", "lease_token")
    assert list(rows) == [(seqs[1], 0, None), (seqs[2], 0, None)]
    assert item.pump.stats.lost == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_messages_whose_lease_expired_before_the_claim_was_answered_are_not_handled_beside_their_next_owner(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another handler of the process kept the interpreter lock until the answer was read."""
    calls: list[int] = []
    taken: list[int] = []
    send(2)
    item = receiver(lambda message, context: calls.append(message.number), lease_ms=200)
    claims = item.pump.state.sql.claims
    claim = claims.claim_by_lease

    def are_taken() -> bool:
        with Leased.receive(10) as batch:
            for message in batch:
                taken.append(message.body["number"])
                message.ack()
        return len(taken) == 2

    def answered_late(*given: Any) -> Any:
        monkeypatch.setattr(claims, "claim_by_lease", claim)
        rows = claim(*given)
        eventually(are_taken)
        return rows

    monkeypatch.setattr(claims, "claim_by_lease", answered_late)

    item.receive(2)

    assert sorted(taken) == [1, 2]
    assert calls == []


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_while_failures_are_recorded_what_is_acked_is_not_renewed(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording may take long: what is still to be recorded is covered, and nothing is asked for that is gone."""
    covered: list[set[int]] = []

    def act(message: Nop, context: Context) -> None:
        if message.number > 1:
            raise ValueError(message.number)

    seqs = send(3)
    item = receiver(act)
    recover = outcomes.recover

    def recording(*given: Any) -> None:
        covered.append(item.batch.leased())
        recover(*given)

    monkeypatch.setattr(outcomes, "recover", recording)

    item.receive(3)

    assert covered == [set(seqs[1:]), set(seqs[1:])]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_only_a_lease_that_its_handler_has_shortened_is_renewed_out_of_turn(
    receiver: Callable[..., SingleReceiver],
) -> None:
    found: list[set[int]] = []

    def act(message: Nop, context: Context) -> None:
        for period in (None, timedelta(minutes=10), timedelta(seconds=5), timedelta(seconds=4)):
            context.extend(period)
            found.append(set(item.batch.renew_again))

    (seq,) = send(1)
    item = receiver(act, lease_ms=5_000)

    item.receive(1)

    assert found == [set(), set(), set(), {seq}]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_slow_handler_makes_those_after_it_end_their_messages_together_again(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock starts anew after it; else each of them would be acked by itself."""
    flushed: list[float] = []
    flush = at_least_once.AtLeastOnceReceiver.flush

    def act(message: Nop, context: Context) -> None:
        started = monotonic()
        while message.number == 1 and monotonic() < started + 1.1:
            pass

    def flushing(self: Any, *given: Any) -> None:
        flushed.append(monotonic())
        flush(self, *given)

    monkeypatch.setattr(at_least_once.AtLeastOnceReceiver, "flush", flushing)
    send(3)
    item = receiver(act, BATCH_TARGET=0.5)

    item.receive(3)

    assert len(flushed) == 1


MESSAGES = 4


#: What a handler may forget, and whose frames must stay meanwhile.
kept: list[Any] = []


class Note(msgspec.Struct):
    number: int


def run(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def closes() -> None:
    connection.close()


def closes_and_opens_another() -> None:
    connection.close()
    connection.connect()


def takes_the_session_away() -> None:
    kept.append(connection.connection)
    connection.connection = None


def puts_another_in_its_place() -> None:
    connections["default"] = connections["default"].copy()


def removes_it() -> None:
    del connections["default"]


def turns_autocommit_off() -> None:
    transaction.set_autocommit(False)


def says_that_autocommit_is_off() -> None:
    connection.autocommit = False


def enters_and_never_leaves() -> None:
    transaction.atomic().__enter__()


def asks_for_a_rollback() -> None:
    connection.needs_rollback = True


def leaves_a_hook() -> None:
    connection.run_on_commit.append((set(), lambda: None, False))


def leaves_a_savepoint() -> None:
    connection.savepoint_ids.append("s1")


def begins_by_itself() -> None:
    run("BEGIN")


def begins_with_the_driver() -> None:
    connection.connection.execute("BEGIN")


def fails_with_the_driver() -> None:
    begins_with_the_driver()
    with contextlib.suppress(Exception):
        connection.connection.execute("SELECT * FROM no_such_table")


def turns_the_drivers_autocommit_off() -> None:
    connection.connection.autocommit = False


def leaves_a_pipeline() -> None:
    kept.append(connection.connection.pipeline())
    kept[-1].__enter__()


def leaves_a_block_of_the_driver() -> None:
    kept.append(connection.connection.transaction())
    kept[-1].__enter__()


def leaves_another_alias_in_a_block() -> None:
    connections["another"] = connections["default"].copy()
    transaction.atomic(using="another").__enter__()


RUDE = [
    closes,
    closes_and_opens_another,
    takes_the_session_away,
    puts_another_in_its_place,
    removes_it,
    turns_autocommit_off,
    says_that_autocommit_is_off,
    enters_and_never_leaves,
    asks_for_a_rollback,
    leaves_a_hook,
    leaves_a_savepoint,
    begins_by_itself,
    begins_with_the_driver,
    fails_with_the_driver,
    turns_the_drivers_autocommit_off,
    leaves_a_pipeline,
    leaves_a_block_of_the_driver,
    leaves_another_alias_in_a_block,
]


@pytest.fixture
def nothing_is_registered(no_consumers: None) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("of the driver of PostgreSQL")
    kept.clear()


def receive(queue: Any, act: Callable[[Note], None]) -> list[tuple[int, Any]]:
    """A batch of all messages; returns what each handler met: its number, and the state of an open session.

    A task that has had its time, on a busy machine, gives back what it has not begun; that comes with the next batch.
    """
    met: list[tuple[int, Any]] = []

    def handler(message: Note, context: Context) -> None:
        raw = connection.connection
        met.append((message.number, None if raw is None else (raw.autocommit, raw.pgconn.transaction_status)))
        assert (connection.in_atomic_block, connection.needs_rollback, connection.run_on_commit) == (False, False, [])
        act(message)

    consumer(queue, name="batch", attempts=1)(handler)
    queue.send_many(Note(number) for number in range(MESSAGES))
    receiver = SingleReceiver(queue)
    try:
        for _ in range(MESSAGES):
            with receiver.receiving(MESSAGES):
                pass
            if len(met) == MESSAGES:
                break
    finally:
        kept.clear()
    return met


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
@pytest.mark.parametrize("place", [1, 2, MESSAGES - 1])
@pytest.mark.parametrize("abuse", RUDE)
def test_what_is_left_behind_in_a_batch_is_noticed_and_restored(
    queue: Any, place: int, abuse: Callable[[], None]
) -> None:
    def act(message: Note) -> None:
        if message.number == place:
            abuse()
        elif message.number > place:
            Effect.objects.create(name="behind")

    met = receive(queue, act)

    assert [number for number, _ in met] == list(range(MESSAGES))
    assert {session for _, session in met} <= {None, (True, 0)}
    assert "LeakedState" in PoisonMessage.objects.get().exception_type
    assert Effect.objects.count() == MESSAGES - 1 - place
    assert not queue.objects.exists()


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_session_changed_for_good_in_a_batch_is_not_the_next_messages(queue: Any) -> None:
    seen: list[str] = []

    def act(message: Note) -> None:
        if message.number == 1:
            run("SET search_path = nowhere")
        elif message.number == 2:
            seen.append(
                connection.connection is None or connection.connection.execute("SHOW search_path").fetchone()[0]
            )
            Effect.objects.create(name="behind")

    receive(queue, act)

    assert seen
    assert "nowhere" not in map(str, seen)
    assert Effect.objects.count() == 1
    assert not PoisonMessage.objects.exists()


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_an_error_that_is_swallowed_in_a_batch_is_harmless_and_forgotten(queue: Any) -> None:
    """The statement was rolled back, and nothing else was open."""

    def act(message: Note) -> None:
        if message.number == 1:
            with contextlib.suppress(DatabaseError):
                run("SELECT * FROM no_such_table")
        Effect.objects.create(name=str(message.number))

    receive(queue, act)

    assert Effect.objects.count() == MESSAGES
    assert not PoisonMessage.objects.exists()


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_session_that_was_replaced_between_two_batches_is_no_handlers_doing(queue: Any) -> None:
    handled: list[int] = []
    consumer(queue, name="batch", attempts=1)(lambda message: handled.append(message["number"]))
    queue.send_many({"number": number} for number in range(MESSAGES))
    task = SingleReceiver(queue).task
    task.bind()

    assert task.receive(2) == 2
    connection.close()
    assert task.receive(2) == 2

    assert handled == list(range(MESSAGES))
    assert not PoisonMessage.objects.exists()


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_a_session_that_was_lost_at_an_ack_is_not_the_next_handlers_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    def handler(message: dict[str, int]) -> None:
        handled.append(message["number"])
        if len(handled) == 1:
            second_connection = connection.copy()
            with second_connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
            second_connection.close()

    consumer(Leased, name="batch", attempts=1)(handler)
    Leased.send_many({"number": number} for number in range(MESSAGES))
    task = SingleReceiver(Leased).task
    task.bind()
    monkeypatch.setattr(task, "target", 0.0)  # it acks after each

    task.receive(MESSAGES)

    assert handled == [0, 1]
    assert not PoisonMessage.objects.exists()


class HeaderNote(msgspec.Struct):
    number: int = 0


class Unrelated(msgspec.Struct):
    number: int = 0


def headers_of(cls: type, content_type: str = "application/json") -> str:
    return f'{{"type":"{cls.__module__}.{cls.__qualname__}","content-type":"{content_type}"}}'


def put(queue: Any, *messages: tuple[str, bytes | None]) -> None:
    for headers, body in messages:
        queue.objects.create(id=new_id(), headers=headers, body=body)


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_each_body_is_read_by_what_its_own_message_states(queue: Any) -> None:
    got: list[Any] = []
    consumer(queue, name="note", attempts=1)(_typed(HeaderNote, got))
    consumer(queue, name="other", attempts=1)(_typed(Unrelated, got))
    note, second, raw = (
        headers_of(HeaderNote),
        headers_of(Unrelated),
        headers_of(HeaderNote, "application/octet-stream"),
    )
    put(
        queue,
        (note, b'{"number":1}'),
        (note, b'\xef\xbb\xbf{"number":2}'),
        (note, None),
        (note, b""),
        (note, b"null"),
        (second, b'{"number":3}'),
        (note, b'{"number":4}'),
        (raw, b'{"number":7}'),
        (note, b'{"number":"5"}'),
        ("{", b""),
        (note, b'{"number":6}'),
    )

    SingleReceiver(queue).receive(20)

    assert got == [HeaderNote(1), HeaderNote(2), Unrelated(3), HeaderNote(4), HeaderNote(7), HeaderNote(6)]
    assert (
        PoisonMessage.objects.count() == 5
    )  # two that are empty, null, a number that is a text, and headers that are none
    assert not queue.objects.exists()


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_equal_headers_for_another_recipient_go_to_another_consumer() -> None:
    got: list[tuple[str, Any]] = []
    consumer(Addressed, name="one")(_named("one", got))
    consumer(Addressed, name="two")(_named("two", got))
    for name in ("one", "two", "one", "two"):
        Addressed.send(HeaderNote(1), recipient=name)

    SingleReceiver(Addressed).receive(10)

    assert sorted(name for name, _ in got) == ["one", "one", "two", "two"]


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_unknown_ones_between_known_ones_stay_where_they_are(queue: Any) -> None:
    got: list[Any] = []
    consumer(queue, name="note")(_typed(HeaderNote, got))
    put(
        queue,
        *((headers_of(Unrelated if number % 2 else HeaderNote), b'{"number":%d}' % number) for number in range(6)),
    )
    receiver = SingleReceiver(queue)

    while receiver.receive(6):
        pass

    assert got == [HeaderNote(0), HeaderNote(2), HeaderNote(4)]
    assert [row.body for row in queue.objects.order_by("seq")] == [b'{"number":%d}' % number for number in (1, 3, 5)]
    assert not PoisonMessage.objects.exists()


def _typed(cls: type, got: list[Any]) -> Any:
    def handler(message: Any) -> None:
        got.append(message)

    handler.__annotations__["message"] = cls
    return handler


def _named(name: str, got: list[tuple[str, Any]]) -> Any:
    def handler(message: HeaderNote) -> None:
        got.append((name, message))

    return handler
