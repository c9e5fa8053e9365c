"""Consumers that take a list of messages a call (``@consumer(batch=...)``), in each of the semantics.

    several --returned, or told which ones failed--> these are judged, the others are done
            --raised, late, left its connection unclean--> nobody is judged --> halves --> one --> judged
            --process died--> each of them was handed out once more, nobody's attempt is counted --> alone from then on

What cannot be read, or has had all its attempts, is no part of a call and is judged by itself. A queue whose consumers take one
message each knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from django.db import connections

from queueapp.conf import settings
from queueapp.consuming.batch_context import BatchContext
from queueapp.errors import UndecodableMessage
from queueapp.failures import limits
from queueapp.messages.ids import as_uuid
from queueapp.sql import backend_of
from queueapp.sql.claims import BODY, CANCELS, DELIVERIES, HEADERS, ID, RECIPIENT, SEQ, Claimed

from ..batch_sizer import BatchSizer
from ..queue_state import QueueState
from ..slot import Slot
from .base import HandlerRoute, Receiver

#: What became of a call: all is done; these have failed, by their places; all of it has.
Outcome = dict[int, BaseException] | BaseException | None


class Ready(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A message that can be handed to its handler."""

    row: Claimed
    message: Any
    attempt: int


class WholeBatches(BatchSizer):
    """As many as the largest batch, whatever handlers take: who asks for 500 at once wants to have 500. Bodies bound it."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, 1.0, settings.MAX_BATCH_BYTES)
        self.n = limit

    def weigh(self, rows: Sequence[Claimed]) -> None:
        self.n = self.limit
        super().weigh(rows)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """It stays as it is."""


class SeveralTask(Receiver):
    """Mixed into the task of each semantics, where a consumer takes several messages."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        backend = backend_of(connections[self.alias])
        self._largest = min(self.handlers.largest_batch, backend.max_batch)
        self._wait = self.handlers.batch_wait
        self.size: BatchSizer = WholeBatches(self._largest)
        self._routes: dict[tuple[str, str], HandlerRoute | None] = {}
        #: The contexts of the last call.
        self._contexts: BatchContext | None = None

    # -- who takes what -----------------------------------------------------------------------------------------------

    def route_of(self, row: Claimed) -> HandlerRoute | None:
        """Where it goes, if that is a consumer of several; None: it is somebody else's business."""
        key = (row[HEADERS], row[RECIPIENT] if self.handlers.addressed else "")
        if self.handlers.copies and not key[1]:
            return _if_several(self._look_up(row))  # not remembered: who subscribes may change
        try:
            return self._routes[key]
        except KeyError:
            pass
        route = self._look_up(row)
        if route is None:
            return None  # not remembered: a class that somebody here takes may be imported late
        if len(self._routes) > 1000:
            self._routes.clear()
        found = self._routes[key] = _if_several(route)
        return found

    def _look_up(self, row: Claimed) -> HandlerRoute | None:
        """Where it goes, whatever its consumer takes; None: nobody here takes it, or it cannot be told."""
        try:
            return self._find(row)
        except UndecodableMessage:
            return None

    def is_suspect(self, row: Claimed, *, leased: bool) -> bool:
        """Whether it was lost with a process: it is handled alone, so that the next death says who it was."""
        if row[DELIVERIES] - leased <= 0:
            return False
        attempt = limits.attempt_of(row, keeps_counts=self._keeps_counts)
        return limits.suspicion_level(row, attempt, leased=leased, keeps_counts=self._keeps_counts) > 0

    def has_failed(self, row: Claimed, *, leased: bool) -> bool:
        """Whether it has failed before: such ones are handled with their like, not with fresh ones."""
        return bool(row[DELIVERIES] - leased - row[CANCELS] > 0)

    def goes_with(self, row: Claimed, route: HandlerRoute, first: Claimed, *, leased: bool) -> bool:
        """Whether one call takes both."""
        if (
            row[HEADERS] == route.headers
            and row[DELIVERIES] <= leased
            and first[DELIVERIES] <= leased
            and not self.handlers.addressed
        ):
            return True  # nearly all; what follows says the same of them, for more
        other = self.route_of(row)
        return (
            other is not None
            and other.entry is route.entry
            and not self.is_suspect(row, leased=leased)
            and self.has_failed(row, leased=leased) == self.has_failed(first, leased=leased)
        )

    def next_call(
        self, waiting: list[Claimed], *, leased: bool
    ) -> tuple[HandlerRoute | None, list[Claimed], list[Claimed]]:
        """Of what waits: who takes the first, which of them one call takes, and the rest. None: who takes one message."""
        first, others = waiting[0], waiting[1:]
        route = self.route_of(first)
        if route is None or self.is_suspect(first, leased=leased):
            return route, [first], others
        mine = [row for row in others if self.goes_with(row, route, first, leased=leased)][: route.entry.batch - 1]
        taken = {row[SEQ] for row in mine}
        return route, [first, *mine], [row for row in others if row[SEQ] not in taken]

    # -- one call -----------------------------------------------------------------------------------------------------

    def make_ready(self, route: HandlerRoute, row: Claimed, *, leased: bool) -> Ready | BaseException | None:
        """The message, read; or why its attempt has failed; None: this subscriber does not take it."""
        suspect = self.is_suspect(row, leased=leased)
        try:
            self.begin(row[SEQ], suspect)
            return self._read(route, row, leased=leased)
        finally:
            self.end(suspect)

    def _read(self, route: HandlerRoute, row: Claimed, *, leased: bool) -> Ready | BaseException | None:
        if self._filter is not None and not self._filter.passes(row[HEADERS], row[BODY]):
            return None
        own = route if row[HEADERS] == route.headers else self.route_of(row) or route
        body, decode = row[BODY], own.decode
        try:
            try:
                message = decode(body) if decode is not None and body else None
            except Exception:  # not this type, or a byte order mark
                message = None
            if message is None:
                message = own.read(body, row[HEADERS], as_uuid(row[ID]), self.alias)
        except BaseException as error:  # as in ``Receiver.call``
            return error
        if row[DELIVERIES] - leased <= 0:
            return Ready(row, message, 1)
        attempt = limits.attempt_of(row, keeps_counts=True)
        spent = limits.check_limits(row, attempt, route.entry.attempts, self.queue.delivery, leased=leased)
        return spent or Ready(row, message, attempt + limits.unacknowledged_deliveries(row, attempt, leased=leased))

    def call_several(self, route: HandlerRoute, ready: Sequence[Ready], *, leased: bool) -> Outcome:
        """Call the handler of several once."""
        self.cut_loose = False
        rows = [one.row for one in ready]
        contexts = BatchContext(route.receiving, rows, [one.attempt for one in ready], self.extend_several)
        self._contexts = contexts
        suspect = len(ready) == 1 and self.is_suspect(rows[0], leased=leased)
        with self.in_hand([row[SEQ] for row in rows], suspect):
            failed = self.run(route.entry, [one.message for one in ready], contexts, rows[0][SEQ])
        if failed is None and contexts.failures:
            return contexts.failures
        return failed

    def items_of(self, place: int) -> dict[str, Any] | None:
        """What the last handler left for the policy about one of its messages."""
        return None if self._contexts is None else self._contexts.items_of(place)

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        route = self.route_of(claimed)
        if route is None:
            if self._route is not None and self._route.entry.batch:
                self._route = None  # so that ``Receiver.call`` looks again, and does not call a consumer of several
            return super().call(claimed, leased=leased)
        ready = self.make_ready(route, claimed, leased=leased)
        if not isinstance(ready, Ready):
            self.items = None
            return False if ready is None else ready
        outcome = self.call_several(route, [ready], leased=leased)
        self.items = self.items_of(0)
        return outcome[0] if isinstance(outcome, dict) else outcome

    def extend_several(self, seqs: Sequence[int], period: timedelta | None) -> None:
        """``BatchContext.extend``; only leased messages have something to extend."""

    def gather(self, limit: int) -> int:
        """Let more messages come before a claim that does not follow a full one; how many may be claimed then. 0: stopping, or
        another task of this process is at it."""
        if not self._wait or self.full:
            return limit
        if not self.state.gathering.acquire(blocking=False):
            self.full = False
            return 0
        try:
            if self.state.stopping.wait(self._wait):
                return 0
        finally:
            self.state.gathering.release()
        # What it was called for was seen before.
        return limit if self.reserved or self.state.throttled else max(limit, self.size.n)


def _if_several(route: HandlerRoute | None) -> HandlerRoute | None:
    return route if route is not None and route.entry.batch else None
