"""Random histories of one queue, compared step by step with a model of it that fits on a page.

Three receivers send, receive, ack, cancel, extend, expire, crash and come back, while leases and messages expire
(the test moves their times in the database, not a clock). After every step the table says what the model says.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from django.core.management.color import no_style
from django.db import connections, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from queueapp import FairnessModel, LeaseLost
from queueapp.flow.limited_claims import LimitedClaims
from queueapp.messages import new_id
from queueapp.models import FairTurn, Now, Subscriber
from queueapp.operations import control
from queueapp.receiving import low_water_marks
from queueapp.services.maintenance import purge_expired
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, SEQ, SeqRange
from tests.in_process_worker import real_commits
from tests.kill_session import kill, session_of
from tests.testapp.models import (
    Capped,
    CappedEach,
    CappedOnce,
    CappedTransactional,
    InProportion,
    InTurns,
    Leased,
    Transactional,
    Urgent,
)
from tests.testapp.ordering import Fenced, FencedAtMostOnce, FencedTransactional

HOUR = timedelta(hours=1)
AGO = -timedelta(minutes=1)


def empty(queue: Any) -> None:
    """As if the table had just been made: the first message will be number 1."""
    connection = connections["default"]
    for sql in connection.ops.sql_flush(no_style(), [queue._meta.db_table], reset_sequences=True):
        with connection.cursor() as cursor:
            cursor.execute(sql)
    low_water_marks.forget()


@dataclass
class Row:
    """What the model knows of a message that is in the table."""

    number: int
    priority: int = 0
    deliveries: int = 0
    cancels: int = 0
    #: The batch that holds the lease, whether or not it has lease_expired.
    held_by: object = None
    lease_expired: bool = True
    expired: bool = False
    is_barrier: bool = False

    @property
    def available(self) -> bool:
        return self.lease_expired and not self.expired


@dataclass
class Model:
    """The reference: a list in order of arrival."""

    rows: list[Row] = field(default_factory=list)

    def claim(self, limit: int, batch: object) -> list[Row]:
        found = sorted((row for row in self.rows if row.available), key=lambda row: -row.priority)[:limit]
        for row in found:
            row.deliveries += 1
            row.held_by, row.lease_expired = batch, False
        return found

    def release(self, row: Row) -> None:
        row.held_by, row.lease_expired = None, True


@dataclass(eq=False)
class Taken:
    """A message in flight, and its row in the model."""

    message: Any
    row: Row
    batch: Any

    @property
    def owned(self) -> bool:
        """Whether the lease it was received under is still the one on the row."""
        return self.row.held_by is self.batch


class LeasedQueue(RuleBasedStateMachine):
    """AT_LEAST_ONCE, plain first in first out."""

    queue: Any = Leased
    priorities = 1
    #: Whether an expired lease that was not taken over can be lengthened.
    revives = True
    taken = Bundle("taken")

    @initialize()
    def begin(self) -> None:
        empty(self.queue)
        self.model = Model()
        self.batches: list[Any] = []
        self.numbers = itertools.count()

    def teardown(self) -> None:
        for batch in self.batches:
            batch.__exit__(None, None, None)

    # -- what a user does ---------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), data=st.data())
    def send(self, count: int, data: st.DataObject) -> None:
        for number in itertools.islice(self.numbers, count):
            priority = data.draw(st.integers(0, self.priorities - 1)) if self.priorities > 1 else 0
            self.queue.send({"number": number}, priority=priority)
            self.model.rows.append(Row(number, priority))

    @rule(count=st.integers(1, 30))
    def send_many(self, count: int) -> None:
        numbers = list(itertools.islice(self.numbers, count))
        self.queue.send_many({"number": number} for number in numbers)
        self.model.rows += [Row(number) for number in numbers]

    @rule(count=st.integers(1, 3))
    def send_and_roll_back(self, count: int) -> None:
        with transaction.atomic():
            self.queue.send_many({"number": -1} for _ in range(count))
            transaction.set_rollback(True)

    @rule(limit=st.integers(1, 12), target=taken)
    def receive(self, limit: int) -> Any:
        batch = self.queue.receive(limit, lease_period=HOUR)
        batch.__enter__()
        self.batches.append(batch)
        messages = list(batch)
        rows = self.model.claim(limit, batch)
        assert [message.body["number"] for message in messages] == [row.number for row in rows]
        assert [message.deliveries for message in messages] == [row.deliveries for row in rows]
        return multiple(*(Taken(message, row, batch) for message, row in zip(messages, rows, strict=True)))

    @rule(taken=consumes(taken))
    def ack(self, taken: Taken) -> None:
        self._end(taken, "ack")

    @rule(taken=consumes(taken))
    def expire(self, taken: Taken) -> None:
        self._end(taken, "expire")

    @rule(taken=consumes(taken))
    def cancel(self, taken: Taken) -> None:
        self._end(taken, "cancel")

    def _end(self, taken: Taken, how: str) -> None:
        if not taken.owned:
            with pytest.raises(LeaseLost):
                getattr(taken.message, how)()
            return
        getattr(taken.message, how)()
        self.model.release(taken.row)
        if how == "cancel":
            taken.row.cancels += 1
        else:
            self.model.rows.remove(taken.row)

    @rule(taken=taken)
    def extend(self, taken: Taken) -> None:
        if taken.message._state:
            return
        if not taken.owned or (taken.row.lease_expired and not self.revives):
            with pytest.raises(LeaseLost):
                taken.message.extend(HOUR)
            return
        taken.message.extend(HOUR)
        taken.row.lease_expired = False

    @rule(data=st.data())
    def leave_a_block(self, data: st.DataObject) -> None:
        """What was neither acked nor cancelled nor expired is given back."""
        if not self.batches:
            return
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        batch.__exit__(None, None, None)
        for row in self.model.rows:
            if row.held_by is batch:
                row.cancels += 1
                self.model.release(row)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """The receiver is gone without deregistering: its leases stay until they expire."""
        if self.batches:
            self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))

    # -- what time does -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def leases_expire(self, data: st.DataObject) -> None:
        held = [row for row in self.model.rows if not row.lease_expired]
        for row in data.draw(st.lists(st.sampled_from(held), unique_by=id)) if held else []:
            self._where(row).update(lease_expires=Now() + AGO)
            row.lease_expired = True

    @rule(data=st.data())
    def messages_expire(self, data: st.DataObject) -> None:
        live = [row for row in self.model.rows if not row.expired]
        for row in data.draw(st.lists(st.sampled_from(live), max_size=3, unique_by=id)) if live else []:
            self._where(row).update(expires=Now() + AGO)
            row.expired = True

    @rule()
    def expired_messages_are_purged(self) -> None:
        gone = [row for row in self.model.rows if row.expired and row.lease_expired]
        assert purge_expired(self.queue, "default") == len(gone)
        for row in gone:
            self.model.rows.remove(row)
            self.model.release(row)

    def _where(self, row: Row) -> Any:
        return self.queue.objects.filter(body=b'{"number":%d}' % row.number)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        columns = ("body", "priority", "deliveries", "cancels")
        there = list(self.queue.objects.order_by("seq").values_list(*columns))
        assert there == [
            (b'{"number":%d}' % row.number, row.priority, row.deliveries, row.cancels) for row in self.model.rows
        ]

    @invariant()
    def a_peek_counts_what_is_available(self) -> None:
        if not hasattr(self, "model"):
            return
        connection = connections["default"]
        levels = [SeqRange(0, MAX_SEQ, "", priority) for priority in range(self.priorities - 1, -1, -1)]
        seen = queue_sql(self.queue, connection).claims.peek(connection, levels, [], 1000)
        assert seen.ahead == sum(row.available for row in self.model.rows)


class UrgentQueue(LeasedQueue):
    """AT_LEAST_ONCE with priorities."""

    queue = Urgent
    priorities = 3


class CappedQueue(LeasedQueue):
    """AT_LEAST_ONCE of which no more than so many are out, a number that an operator changes."""

    queue = Capped
    revives = False

    @initialize()
    def begin(self) -> None:
        super().begin()
        control.set_option(Capped, "max_backlog", None)
        self.model = CappedModel(max_backlog=5)

    @rule(limit=st.one_of(st.none(), st.integers(1, 9)))
    def set_max_backlog(self, limit: int | None) -> None:
        control.set_option(Capped, "max_backlog", limit)
        assert isinstance(self.model, CappedModel)
        self.model.max_backlog = 5 if limit is None else limit

    @rule(data=st.data())
    def its_subscriber_is_dead(self, data: st.DataObject) -> None:
        """What it holds is free at once, and was delivered."""
        if self.batches:
            batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
            connection = connections["default"]
            held = [row for row in self.model.rows if row.held_by is batch]
            owner = Capped.objects.filter(body=b'{"number":%d}' % held[0].number).get().lease_owner if held else None
            if owner is not None:
                assert queue_sql(Capped, connection).maintenance.release_owner(
                    connection, owner, 100, started=True
                ) == len(held)
            for row in held:
                self.model.release(row)

    @invariant()
    def a_process_that_has_just_begun_knows_what_is_out(self) -> None:
        if hasattr(self, "model"):
            connection = connections["default"]
            out = sum(lease.messages for lease in queue_sql(Capped, connection).limits.leases(connection))
            assert out == sum(not row.lease_expired for row in self.model.rows)


@dataclass
class CappedModel(Model):
    max_backlog: int = 0

    def claim(self, limit: int, batch: object) -> list[Row]:
        return super().claim(
            min(limit, max(0, self.max_backlog - sum(not row.lease_expired for row in self.rows))), batch
        )


@dataclass
class FencedModel(Model):
    """No claim goes beyond the first barrier, which comes when nothing at all stands before it."""

    def claim(self, limit: int, batch: object) -> list[Row]:
        every, self.rows = self.rows, self.before_barrier()
        try:
            return super().claim(limit, batch)
        finally:
            self.rows = every

    def before_barrier(self) -> list[Row]:
        return list(itertools.takewhile(lambda row: not row.is_barrier or row.expired, self.rows))

    def release_barriers(self) -> list[Row]:
        released = []
        while self.rows and self.rows[0].is_barrier and not self.rows[0].expired:
            released.append(self.rows.pop(0))
        return released


@dataclass
class CappedEachModel(Model):
    """So many to one receiver at a time, however many it asks for."""

    max_per_subscription: int = 0

    def claim(self, limit: int, batch: object) -> list[Row]:
        return super().claim(min(limit, self.max_per_subscription), batch)


class CappedEachQueue(LeasedQueue):
    """AT_LEAST_ONCE with a limit for each subscriber."""

    queue = CappedEach

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.model = CappedEachModel(max_per_subscription=4)


class FencedQueue(LeasedQueue):
    """AT_LEAST_ONCE with barriers, and one client at a time, who gets each."""

    queue = Fenced

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.model = FencedModel()

    @rule()
    def send_barrier(self) -> None:
        number = next(self.numbers)
        self.queue.send({"number": number}, is_barrier=True)
        self.model.rows.append(Row(number, is_barrier=True))

    @rule(limit=st.integers(1, 12), target=LeasedQueue.taken)
    def receive(self, limit: int) -> Any:
        batch = self.queue.receive(limit, lease_period=HOUR)
        batch.__enter__()
        self.batches.append(batch)
        messages, rows = list(batch), self.model.claim(limit, batch)
        assert isinstance(self.model, FencedModel)
        if not rows:
            barriers = self.model.release_barriers()
            assert [message.body["number"] for message in messages] == [row.number for row in barriers]
            assert all(message.is_barrier for message in messages)
            return multiple()
        assert [message.body["number"] for message in messages] == [row.number for row in rows]
        return multiple(*(Taken(message, row, batch) for message, row in zip(messages, rows, strict=True)))

    @invariant()
    def a_peek_counts_what_is_available(self) -> None:
        if hasattr(self, "model"):
            assert isinstance(self.model, FencedModel)
            connection = connections["default"]
            seen = queue_sql(self.queue, connection).claims.peek(connection, [SeqRange()], [], 1000)
            assert seen.ahead == sum(row.available for row in self.model.before_barrier())


class SentQueue(RuleBasedStateMachine):
    """AT_MOST_ONCE with a limit: what was sent is never handed out again, and keeps its place until it has ended."""

    queue: Any = CappedOnce
    held = Bundle("held")

    @initialize()
    def begin(self) -> None:
        empty(self.queue)
        self.model: Model = CappedModel(max_backlog=3)
        self.numbers = itertools.count()
        self.batches: list[Any] = []

    def teardown(self) -> None:
        for batch in getattr(self, "batches", ()):
            batch.__exit__(None, None, None)

    @rule(count=st.integers(1, 9))
    def send(self, count: int) -> None:
        numbers = list(itertools.islice(self.numbers, count))
        self.queue.send_many({"number": number} for number in numbers)
        self.model.rows += [Row(number) for number in numbers]

    @rule(limit=st.integers(1, 6), target=held)
    def receive(self, limit: int) -> Any:
        batch = self.queue.receive(limit)
        batch.__enter__()
        self.batches.append(batch)
        messages, rows = list(batch), self.model.claim(limit, batch)
        if not rows and isinstance(self.model, FencedModel):
            rows = self.model.release_barriers()
            assert [message.body["number"] for message in messages] == [row.number for row in rows]
            return multiple()
        assert [message.body["number"] for message in messages] == [row.number for row in rows]
        return multiple(*(Taken(message, row, batch) for message, row in zip(messages, rows, strict=True)))

    @rule(taken=consumes(held), how=st.sampled_from(["ack", "cancel", "expire"]))
    def end(self, taken: Taken, how: str) -> None:
        """A cancel gives nothing back here: it frees the place, as the others."""
        if taken.row in self.model.rows:
            getattr(taken.message, how)()
            self.model.rows.remove(taken.row)

    @rule(data=st.data())
    def leave_a_block(self, data: st.DataObject) -> None:
        if self.batches:
            batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
            batch.__exit__(None, None, None)
            self.model.rows = [row for row in self.model.rows if row.held_by is not batch]

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        if hasattr(self, "model"):
            there = list(self.queue.objects.order_by("seq").values_list("body", flat=True))
            assert there == [b'{"number":%d}' % row.number for row in self.model.rows]


class FencedSentQueue(SentQueue):
    """AT_MOST_ONCE with barriers, which wait for the acks of what was sent."""

    queue = FencedAtMostOnce

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.model = FencedModel()

    @rule()
    def send_barrier(self) -> None:
        number = next(self.numbers)
        self.queue.send({"number": number}, is_barrier=True)
        self.model.rows.append(Row(number, is_barrier=True))


class SharedOutQueue(RuleBasedStateMachine):
    """Three subscribers of a queue with a fairness model, against dealing out one message at a time."""

    queue: Any = InTurns
    backlogs = 1, 3, 6

    @initialize()
    def begin(self) -> None:
        empty(self.queue)
        Subscriber.objects.all().delete(), FairTurn.objects.all().delete()
        self.ids = sorted(uuid.uuid4() for _ in self.backlogs)
        now = datetime.now(UTC)
        for place, (key, backlog) in enumerate(zip(self.ids, self.backlogs, strict=True)):
            Subscriber.objects.create(
                id=key, queue=self.queue._meta.label, host="h", process=place, supervisor=key, backlog=backlog,
                started_at=now + timedelta(seconds=place), alive_until=now + HOUR,
            )  # fmt: skip
        # It is there for barriers alone, and takes part in nothing.
        Subscriber.objects.create(
            queue=self.queue._meta.label, host="h", process=9, supervisor=uuid.uuid4(), backlog=0,
            started_at=now - HOUR, alive_until=now + HOUR,
        )  # fmt: skip
        self.waiting: list[int] = []
        self.shared: list[list[int]] = [[] for _ in self.ids]
        self.held: list[list[tuple[Any, int]]] = [[] for _ in self.ids]
        self.last = 0

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        self.queue.send_many({"number": number} for number in range(self.last, self.last + count))
        self.waiting += range(self.last + 1, self.last + count + 1)  # their seqs
        self.last += count

    def out(self, place: int) -> int:
        return len(self.shared[place]) + len(self.held[place])

    @rule(place=st.integers(0, 2), limit=st.integers(1, 4), bounded=st.booleans())
    def claim(self, place: int, limit: int, bounded: bool) -> None:
        """``bounded``: as a worker does, which knows what it holds."""
        connection, token = connections["default"], new_id()
        taking = LimitedClaims(self.queue, "default", queue_sql(self.queue, connection))
        if bounded and not (limit := min(limit, self.backlogs[place] - len(self.held[place]))):
            return
        rows = taking.take(connection, [SeqRange()], limit, token, self.ids[place], 3_600_000, bounded=bounded).rows
        if not self.shared[place]:
            free = sum(backlog - self.out(n) for n, backlog in enumerate(self.backlogs))
            if free and len(self.waiting) >= free:  # more than there is room for: each takes its own
                first = min(limit, self.backlogs[place] - self.out(place))
                taken, self.waiting = self.waiting[:first], self.waiting[first:]
                assert [row[SEQ] for row in rows] == taken
                self.held[place] += [(token, seq) for seq in taken]
                return
            self.deal_out()
        taken, self.shared[place] = self.shared[place][:limit], self.shared[place][limit:]
        assert [row[SEQ] for row in rows] == taken
        self.held[place] += [(token, seq) for seq in taken]

    turn = -1

    def deal_out(self) -> None:
        """One at a time, by what the model of the queue says."""
        while self.waiting:
            able = [n for n, backlog in enumerate(self.backlogs) if self.out(n) < backlog]
            if not able:
                return
            if self.queue.delivery.fairness_model is FairnessModel.ROUND_ROBIN:
                place = min(able, key=lambda n: (n - self.turn - 1) % len(self.ids))
                self.turn = place
            else:
                place = min(able, key=lambda n: (Fraction(self.out(n), self.backlogs[n]), n))
            self.shared[place].append(self.waiting.pop(0))

    @rule(place=st.integers(0, 2), count=st.integers(1, 4))
    def ack(self, place: int, count: int) -> None:
        connection = connections["default"]
        for token, seq in self.held[place][:count]:
            assert queue_sql(self.queue, connection).acks.ack(connection, [seq], token) == 1
        del self.held[place][:count]

    @invariant()
    def in_flight_is_within_limits(self) -> None:
        if hasattr(self, "waiting"):
            connection = connections["default"]
            out = Counter[uuid.UUID]()
            for lease in queue_sql(self.queue, connection).limits.leases(connection):
                out[lease.owner] += lease.messages
            assert [out[key] for key in self.ids] == [self.out(place) for place in range(3)]


class SharedInProportionQueue(SharedOutQueue):
    """The same, in proportion."""

    queue = InProportion


class TransactionalQueue(RuleBasedStateMachine):
    """TRANSACTIONAL: blocks that commit, blocks that fail, and blocks whose connection dies."""

    queue: Any = Transactional

    @initialize()
    def begin(self) -> None:
        empty(self.queue)
        self.model = Model()
        self.numbers = itertools.count()
        self.admin_session = connections["default"].copy()

    def teardown(self) -> None:
        if hasattr(self, "other"):
            self.admin_session.close()

    @rule(count=st.integers(1, 20))
    def send(self, count: int) -> None:
        numbers = list(itertools.islice(self.numbers, count))
        self.queue.send_many({"number": number} for number in numbers)
        self.model.rows += [Row(number) for number in numbers]

    @rule(limit=st.integers(1, 12), endings=st.lists(st.sampled_from(["ack", "cancel", "expire", "", "send"])))
    def receive_and_commit(self, limit: int, endings: list[str]) -> None:
        with self.queue.receive(limit) as batch:
            rows = self.model.claim(limit, batch)
            sent = self._end_some(batch, rows, endings)
        for row, how in itertools.zip_longest(rows, endings[: len(rows)], fillvalue="not begun"):
            self.model.release(row)
            if how in ("ack", "expire"):
                self.model.rows.remove(row)
            elif how == "not begun":
                row.deliveries -= 1
            else:
                row.cancels += 1
        self.model.rows += sent

    def _end_some(self, batch: Any, rows: list[Row], endings: list[str]) -> list[Row]:
        """Take a message for each ending; returns what was sent meanwhile."""
        sent = []
        messages = iter(batch)
        for row, how in zip(rows, endings, strict=False):
            message = next(messages)
            assert message.body == {"number": row.number}
            if how == "send":
                sent.append(Row(next(self.numbers)))
                self.queue.send({"number": sent[-1].number})
            elif how:
                getattr(message, how)()
        return sent

    @rule(limit=st.integers(1, 12), endings=st.lists(st.sampled_from(["ack", "cancel", "expire", "", "send"])))
    def receive_and_fail(self, limit: int, endings: list[str]) -> None:
        with pytest.raises(LookupError):
            self._receive_and_raise(limit, endings, LookupError)

    @rule(limit=st.integers(1, 12), endings=st.lists(st.sampled_from(["ack", "cancel", "send"])))
    def receive_and_lose_the_connection(self, limit: int, endings: list[str]) -> None:
        def cut() -> Exception:
            kill(self.admin_session, session_of(connections["default"]))
            return LookupError()

        with pytest.raises(LookupError):
            self._receive_and_raise(limit, endings, cut)
        connections["default"].close()

    def _receive_and_raise(self, limit: int, endings: list[str], error: Any) -> None:
        with self.queue.receive(limit) as batch:
            rows = self.model.claim(limit, batch)
            for row in rows:
                row.deliveries -= 1
                self.model.release(row)
            self._end_some(batch, rows, endings)
            raise error()

    @rule(data=st.data())
    def messages_expire(self, data: st.DataObject) -> None:
        live = [row for row in self.model.rows if not row.expired]
        for row in data.draw(st.lists(st.sampled_from(live), max_size=3, unique_by=id)) if live else []:
            self.queue.objects.filter(body=b'{"number":%d}' % row.number).update(expires=Now() + AGO)
            row.expired = True

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        there = list(self.queue.objects.order_by("seq").values_list("body", "deliveries", "cancels", "lease_token"))
        assert there == [(b'{"number":%d}' % row.number, row.deliveries, row.cancels, None) for row in self.model.rows]


class CappedTransactionalQueue(TransactionalQueue):
    """TRANSACTIONAL with a limit: its places are those of open transactions, and a block in a block has those that are
    left."""

    queue = CappedTransactional

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.model = CappedEachModel(max_per_subscription=3)

    @rule(outer=st.integers(1, 5), inner=st.integers(1, 5), fails=st.booleans())
    def receive_in_a_block(self, outer: int, inner: int, fails: bool) -> None:
        rows: list[Row] = []
        try:
            with self.queue.receive(outer) as first, self.queue.receive(inner) as second:
                for limit, batch in ((outer, first), (min(inner, 3 - min(outer, 3)), second)):
                    found = self.model.claim(limit, batch)
                    rows += found
                    assert [message.body["number"] for message in batch if message.ack() is None] == [
                        row.number for row in found
                    ]
                if fails:
                    raise LookupError
        except LookupError:
            for row in rows:
                row.deliveries -= 1
                self.model.release(row)
        else:
            for row in rows:
                self.model.rows.remove(row)


class FencedTransactionalQueue(TransactionalQueue):
    """TRANSACTIONAL with barriers, and one client, who gets each; of a block that fails they come back with the
    rest."""

    queue = FencedTransactional

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.model = FencedModel()

    @rule()
    def send_barrier(self) -> None:
        number = next(self.numbers)
        self.queue.send({"number": number}, is_barrier=True)
        self.model.rows.append(Row(number, is_barrier=True))

    @rule(fails=st.booleans())
    def receive_barriers(self, fails: bool) -> None:
        assert isinstance(self.model, FencedModel)
        if any(row.available for row in self.model.before_barrier()):
            return
        before, barriers = list(self.model.rows), self.model.release_barriers()
        try:
            with self.queue.receive(5) as batch:
                assert [(message.body["number"], message.is_barrier) for message in batch] == [
                    (row.number, True) for row in barriers
                ]
                if fails:
                    raise LookupError
        except LookupError:
            self.model.rows = before

    def _end_some(self, batch: Any, rows: list[Row], endings: list[str]) -> list[Row]:
        if rows:
            return super()._end_some(batch, rows, endings)
        assert isinstance(self.model, FencedModel)
        self.model.release_barriers()  # they are gone when the block commits
        return []

    def _receive_and_raise(self, limit: int, endings: list[str], error: Any) -> None:
        before = list(self.model.rows)
        try:
            super()._receive_and_raise(limit, endings, error)
        finally:
            self.model.rows = before


def _case(machine: type[RuleBasedStateMachine], histories: int) -> Any:
    # No check of how fast or how selective the rules are: the database is real, and the machine may be busy.
    machine.TestCase.settings = settings(
        max_examples=histories, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return real_commits(machine.TestCase)


TestLeasedQueue = _case(LeasedQueue, 30)
TestUrgentQueue = _case(UrgentQueue, 30)
TestCappedQueue = _case(CappedQueue, 25)
TestFencedQueue = _case(FencedQueue, 25)
TestSentQueue = _case(SentQueue, 12)
TestFencedSentQueue = _case(FencedSentQueue, 12)
TestSharedOutQueue = _case(SharedOutQueue, 15)
TestSharedInProportionQueue = _case(SharedInProportionQueue, 15)
TestCappedEachQueue = _case(CappedEachQueue, 10)
TestTransactionalQueue = _case(TransactionalQueue, 12)
TestCappedTransactionalQueue = _case(CappedTransactionalQueue, 10)
TestFencedTransactionalQueue = _case(FencedTransactionalQueue, 12)
