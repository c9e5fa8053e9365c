"""Helpers of the tests of lease renewal: a receiver in the middle of a batch, and rows that another session has
locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import connection

from queueapp import Context, consumer
from tests.conformance.gate import Gate
from tests.in_process_worker import eventually
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.services.lease_renewer import LeaseRenewer, RenewedQueue


@contextmanager
def another() -> Iterator[Any]:
    """A second session with an open transaction, which is rolled back."""
    second_connection = connection.copy()
    second_connection.inc_thread_sharing()
    second_connection.set_autocommit(False)
    try:
        yield second_connection
    finally:
        second_connection.rollback()
        second_connection.close()


@contextmanager
def locked(*seqs: int) -> Iterator[None]:
    """Another session has these rows locked."""
    with another() as second_session, second_session.cursor() as cursor:
        hint, end = ("", " FOR UPDATE") if second_session.vendor == "postgresql" else (" WITH (UPDLOCK, ROWLOCK)", "")
        table = second_session.ops.quote_name(Leased._meta.db_table)
        for seq in seqs:
            cursor.execute(f"SELECT seq FROM {table}{hint} WHERE seq = %s{end}", (seq,))
            assert cursor.fetchall()
        yield


@contextmanager
def locked_table(queue: Any) -> Iterator[None]:
    """A migration alters this queue's table."""
    with another() as migration, migration.cursor() as cursor:
        table = migration.ops.quote_name(queue._meta.db_table)
        if migration.vendor == "postgresql":
            cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        else:
            cursor.execute(f"ALTER TABLE {table} ADD [soon gone] int NULL")
        yield


def seqs_of(queue: Any) -> list[int]:
    return list(queue.objects.order_by("seq").values_list("seq", flat=True))


def expiry(queue: Any, seq: int) -> datetime:
    expires = queue.objects.get(seq=seq).lease_expires
    assert expires is not None
    return expires


class Slow:
    """A batch of five: two are handled, the third is in its handler until the gate opens, two wait."""

    def __init__(self, gate: Gate) -> None:
        @consumer(Leased, name="tests")
        def handler(message: Nop, context: Context) -> None:
            self.calls.append(message.number)
            if message.number == 3:
                gate.enter()

        self.calls: list[int] = []
        for number in range(1, 6):
            Leased.send(Nop(number, ""))
        self.seqs = seqs_of(Leased)
        self.receiver = SingleReceiver(Leased)
        self.renewals = LeaseRenewer("default", [self.receiver.pump])
        self.gate = gate

    @contextmanager
    def handling(self) -> Iterator[None]:
        with self.receiver.receiving(5):
            eventually(lambda: self.gate.inside == 1)
            try:
                yield
            finally:
                self.gate.let(1)

    def look(self) -> None:
        """One look, on this thread, and no rest after it."""
        self.renewals.renew_once()
        self.watched.paused_until = 0.0

    @property
    def watched(self) -> RenewedQueue:
        (watched,) = self.renewals.queues
        return watched

    def free(self) -> list[int]:
        """What was given back."""
        rows = Leased.objects.filter(lease_token=None, deliveries=0)
        return list(rows.order_by("seq").values_list("seq", flat=True))

    def expiries(self) -> list[datetime]:
        return [expiry(Leased, seq) for seq in seqs_of(Leased)]
