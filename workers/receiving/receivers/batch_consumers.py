"""Consumers that take a list of messages in one call (``@consumer(batch=...)``). Each receiver has one ``BatchCaller``
if its queue has such consumers.

    a batch --returned, or reported which messages failed--> these are judged, the others are done
            --raised, late, left its connection unclean--> none is judged --> halves --> one message --> judged
            --process died--> each of them was delivered once more, no attempt is counted --> by itself from then on

A message that cannot be read, or has had all its attempts, is no part of a call and is judged by itself. How a failed
call is divided is decided by the receiver of each semantics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import connections

from queueapp.consuming.context import BatchContext
from queueapp.errors import UndecodableMessage
from queueapp.failures import limits
from queueapp.failures.history import is_moved_back
from queueapp.messages.ids import as_uuid
from queueapp.sql import backend_of
from queueapp.sql.claims import BODY, CANCELS, DELIVERIES, FAILURES, HEADERS, ID, RECIPIENT, SEQ, Claimed

from .base import HandlerRoute, Receiver

#: The outcome of a call: None: all done; a dict: these have failed, by index; else all of it has.
Outcome = dict[int, BaseException] | BaseException | None
#: Routes that are remembered.
MAX_ROUTES = 1000


class ReadyMessage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A message that was read and can be handed to its handler."""

    row: Claimed
    message: Any
    attempt: int


class BatchCaller:
    """Groups claimed messages into calls, and makes the calls."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._handlers = receiver.handlers
        #: The largest batch of any consumer of the queue.
        self.largest = min(self._handlers.largest_batch, backend_of(connections[receiver.alias]).max_batch)
        self._wait = self._handlers.batch_wait
        self._routes: dict[tuple[str, str], HandlerRoute | None] = {}
        #: The contexts of the last call.
        self._contexts: BatchContext | None = None

    # -- grouping -----------------------------------------------------------------------------------------------------

    def route_of(self, row: Claimed) -> HandlerRoute | None:
        """Its route, if its consumer takes batches; None otherwise."""
        key = (row[HEADERS], row[RECIPIENT] if self._handlers.addressed else "")
        if self._handlers.copies and not key[1]:
            return _if_batch(self._look_up(row))  # not remembered: subscribers may change
        try:
            return self._routes[key]
        except KeyError:
            pass
        route = self._look_up(row)
        if route is None:
            return None  # not remembered: a class that has a consumer here may be imported late
        if len(self._routes) > MAX_ROUTES:
            self._routes.clear()
        found = self._routes[key] = _if_batch(route)
        return found

    def _look_up(self, row: Claimed) -> HandlerRoute | None:
        """Its route, whatever its consumer takes; None: it has no consumer here, or its headers do not parse."""
        try:
            return self._receiver.find_route(row)
        except UndecodableMessage:
            return None

    def is_quarantined(self, row: Claimed, *, leased: bool) -> bool:
        """Whether it was lost with a process: then it is handled by itself, so that a further death is counted against
        the message that causes it. Or it is poison that was moved back: it has one run, which has to be judged."""
        if row[DELIVERIES] - leased <= 0:
            return False
        if is_moved_back(row[FAILURES], row[DELIVERIES] - leased):
            return True
        keeps_counts = self._receiver.keeps_counts
        attempt = limits.attempt_of(row, keeps_counts=keeps_counts)
        return limits.suspicion_level(row, attempt, leased=leased, keeps_counts=keeps_counts) > 0

    def has_failed(self, row: Claimed, *, leased: bool) -> bool:
        """Whether it has failed before: such messages are handled together, and not with fresh ones."""
        return bool(row[DELIVERIES] - leased - row[CANCELS] > 0)

    def goes_with(self, row: Claimed, route: HandlerRoute, first: Claimed, *, leased: bool) -> bool:
        """Whether one call takes both."""
        if (
            row[HEADERS] == route.headers
            and row[DELIVERIES] <= leased
            and first[DELIVERIES] <= leased
            and not self._handlers.addressed
        ):
            return True  # nearly all; what follows comes to the same result for them, and costs more
        row_route = self.route_of(row)
        return (
            row_route is not None
            and row_route.consumer is route.consumer
            and not self.is_quarantined(row, leased=leased)
            and self.has_failed(row, leased=leased) == self.has_failed(first, leased=leased)
        )

    def next_call(
        self, waiting: list[Claimed], *, leased: bool
    ) -> tuple[HandlerRoute | None, list[Claimed], list[Claimed]]:
        """(route of the first of ``waiting``, the messages of its call, the rest). A route of None: its consumer takes
        one message."""
        first, following = waiting[0], waiting[1:]
        route = self.route_of(first)
        if route is None or self.is_quarantined(first, leased=leased):
            return route, [first], following
        together = [row for row in following if self.goes_with(row, route, first, leased=leased)]
        together = together[: route.consumer.batch - 1]
        taken = {row[SEQ] for row in together}
        return route, [first, *together], [row for row in following if row[SEQ] not in taken]

    # -- one call -----------------------------------------------------------------------------------------------------

    def prepare(self, route: HandlerRoute, row: Claimed, *, leased: bool) -> ReadyMessage | BaseException | None:
        """Read a message. An exception: why its attempt has failed; None: the filter of this subscriber does not
        match."""
        receiver = self._receiver
        quarantined = self.is_quarantined(row, leased=leased)
        try:
            receiver.begin(row[SEQ], quarantined)
            return self._read(route, row, leased=leased)
        finally:
            receiver.end(quarantined)

    def _read(self, route: HandlerRoute, row: Claimed, *, leased: bool) -> ReadyMessage | BaseException | None:
        receiver = self._receiver
        if receiver.filter is not None and not receiver.filter.passes(row[HEADERS], row[BODY]):
            return None
        route_of_row = route if row[HEADERS] == route.headers else self.route_of(row) or route
        body, decode = row[BODY], route_of_row.decode
        try:
            try:
                message = decode(body) if decode is not None and body else None
            except Exception:  # not this type, or a byte order mark
                message = None
            if message is None:
                message = route_of_row.read(body, row[HEADERS], as_uuid(row[ID]), receiver.alias)
        except BaseException as error:  # as in ``Receiver.call``
            return error
        if row[DELIVERIES] - leased <= 0:
            return ReadyMessage(row, message, 1)
        attempt = limits.attempt_of(row, keeps_counts=True)
        spent = limits.check_limits(row, attempt, route.consumer.attempts, receiver.queue.delivery, leased=leased)
        return spent or ReadyMessage(
            row, message, attempt + limits.unacknowledged_deliveries(row, attempt, leased=leased)
        )

    def call_batch(self, route: HandlerRoute, ready: Sequence[ReadyMessage], *, leased: bool) -> Outcome:
        """Call the handler once with these messages."""
        receiver = self._receiver
        receiver.session_lost = False
        rows = [item.row for item in ready]
        contexts = BatchContext(route.receiving, rows, [item.attempt for item in ready], receiver.extend_batch)
        self._contexts = contexts
        quarantined = len(ready) == 1 and self.is_quarantined(rows[0], leased=leased)
        with receiver.in_flight([row[SEQ] for row in rows], quarantined):
            failed = receiver.run(route.consumer, [item.message for item in ready], contexts, rows[0][SEQ])
        if failed is None and contexts.failures:
            return contexts.failures
        return failed

    def items_of(self, index: int) -> dict[str, Any] | None:
        """What the last call left for the policy about one of its messages."""
        return None if self._contexts is None else self._contexts.items_of(index)

    def call_one(self, route: HandlerRoute, claimed: Claimed, *, leased: bool) -> BaseException | bool | None:
        """Like ``Receiver.call``, for a message whose consumer takes batches."""
        receiver = self._receiver
        ready = self.prepare(route, claimed, leased=leased)
        if not isinstance(ready, ReadyMessage):
            receiver.items = None
            return False if ready is None else ready
        outcome = self.call_batch(route, [ready], leased=leased)
        receiver.items = self.items_of(0)
        return outcome[0] if isinstance(outcome, dict) else outcome

    # -- before a claim -----------------------------------------------------------------------------------------------

    def gather(self, limit: int) -> int:
        """Wait for more messages before a claim that does not follow a full one; return how many may be claimed then.
        0: stopping, or another receiver of this process waits already."""
        receiver, state = self._receiver, self._receiver.state
        if not receiver.may_gather or not self._wait or receiver.full:
            return limit
        if not state.gathering.acquire(blocking=False):
            receiver.full = False
            return 0
        try:
            if state.stopping.wait(self._wait):
                return 0
        finally:
            state.gathering.release()
        # What it was called for was seen before the wait.
        return limit if receiver.reserved or state.health.throttled else max(limit, receiver.size.n)


def _if_batch(route: HandlerRoute | None) -> HandlerRoute | None:
    return route if route is not None and route.consumer.batch else None
