"""Random histories of one queue, compared step by step with a model of it that fits on a page.

Three receivers send, receive, ack, cancel, extend, expire, crash and come back, while leases lapse and messages expire
(the test moves their times in the database, not a clock). After every step the table says what the model says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from django.core.management.color import no_style
from django.db import connections, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from queueapp import LeaseLost
from queueapp.models import Now
from queueapp.receiving import floors
from queueapp.sql import queue_sql
from queueapp.sql.claimed import MAX_SEQ, Range
from tests.inprocess import real_commits
from tests.killing import kill, session_of
from tests.testapp.models import Leased, Transactional, Urgent
from workers.services.housekeeping import purge_expired

HOUR = timedelta(hours=1)
AGO = -timedelta(minutes=1)


def empty(queue: Any) -> None:
    """As if the table had just been made: the first message will be number 1."""
    connection = connections["default"]
    for sql in connection.ops.sql_flush(no_style(), [queue._meta.db_table], reset_sequences=True):
        with connection.cursor() as cursor:
            cursor.execute(sql)
    floors._floors.clear()


@dataclass
class Row:
    """What the model knows of a message that is in the table."""

    number: int
    priority: int = 0
    deliveries: int = 0
    cancels: int = 0
    #: The batch that holds the lease, whether or not it has lapsed.
    held_by: object = None
    lapsed: bool = True
    expired: bool = False

    @property
    def available(self) -> bool:
        return self.lapsed and not self.expired


@dataclass
class Model:
    """The reference: a list in order of arrival."""

    rows: list[Row] = field(default_factory=list)

    def claim(self, limit: int, batch: object) -> list[Row]:
        found = sorted((row for row in self.rows if row.available), key=lambda row: -row.priority)[:limit]
        for row in found:
            row.deliveries += 1
            row.held_by, row.lapsed = batch, False
        return found

    def release(self, row: Row) -> None:
        row.held_by, row.lapsed = None, True


@dataclass(eq=False)
class Taken:
    """A message in somebody's hand, and its row in the model."""

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

    @rule(one=consumes(taken))
    def ack(self, one: Taken) -> None:
        self._end(one, "ack")

    @rule(one=consumes(taken))
    def expire(self, one: Taken) -> None:
        self._end(one, "expire")

    @rule(one=consumes(taken))
    def cancel(self, one: Taken) -> None:
        self._end(one, "cancel")

    def _end(self, one: Taken, how: str) -> None:
        if not one.owned:
            with pytest.raises(LeaseLost):
                getattr(one.message, how)()
            return
        getattr(one.message, how)()
        self.model.release(one.row)
        if how == "cancel":
            one.row.cancels += 1
        else:
            self.model.rows.remove(one.row)

    @rule(one=taken)
    def extend(self, one: Taken) -> None:
        if one.message._state:
            return
        if not one.owned:
            with pytest.raises(LeaseLost):
                one.message.extend(HOUR)
            return
        one.message.extend(HOUR)
        one.row.lapsed = False

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
        """The receiver is gone without a word: its leases stay until they lapse."""
        if self.batches:
            self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))

    # -- what time does -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def leases_lapse(self, data: st.DataObject) -> None:
        held = [row for row in self.model.rows if not row.lapsed]
        for row in data.draw(st.lists(st.sampled_from(held), unique_by=id)) if held else []:
            self._where(row).update(lease_expires=Now() + AGO)
            row.lapsed = True

    @rule(data=st.data())
    def messages_expire(self, data: st.DataObject) -> None:
        live = [row for row in self.model.rows if not row.expired]
        for row in data.draw(st.lists(st.sampled_from(live), max_size=3, unique_by=id)) if live else []:
            self._where(row).update(expires=Now() + AGO)
            row.expired = True

    @rule()
    def expired_messages_are_purged(self) -> None:
        gone = [row for row in self.model.rows if row.expired and row.lapsed]
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
        levels = [Range(0, MAX_SEQ, "", priority) for priority in range(self.priorities - 1, -1, -1)]
        seen = queue_sql(self.queue, connection).peek(connection, levels, [], 1000)
        assert seen.ahead == sum(row.available for row in self.model.rows)


class UrgentQueue(LeasedQueue):
    """AT_LEAST_ONCE with priorities."""

    queue = Urgent
    priorities = 3


class TransactionalQueue(RuleBasedStateMachine):
    """TRANSACTIONAL: blocks that commit, blocks that fail, and blocks whose connection dies."""

    queue: Any = Transactional

    @initialize()
    def begin(self) -> None:
        empty(self.queue)
        self.model = Model()
        self.numbers = itertools.count()
        self.other = connections["default"].copy()

    def teardown(self) -> None:
        if hasattr(self, "other"):
            self.other.close()

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
            kill(self.other, session_of(connections["default"]))
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


def _case(machine: type[RuleBasedStateMachine], histories: int) -> Any:
    # No check of how fast or how selective the rules are: the database is real, and the machine may be busy.
    machine.TestCase.settings = settings(
        max_examples=histories, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return real_commits(machine.TestCase)


TestLeasedQueue = _case(LeasedQueue, 30)
TestUrgentQueue = _case(UrgentQueue, 30)
TestTransactionalQueue = _case(TransactionalQueue, 15)
