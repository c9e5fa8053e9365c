"""AT_LEAST_ONCE: lease a batch, handle each message, ack the batch in one statement of its own, seqs ascending.

    claim (UPDATE, committed) --> handlers --> ack (DELETE, fenced by the lease token) --> next claim
                                          --slow--> ack what is done, keep what fits, release the rest --> handlers
                                          --a message failed--> recoverability, after the ack of the others

Claim and ack are never in one transaction: that deadlocks. ``services.lease_renewer`` renews the leases
meanwhile.

``BatchLeaser`` is the part that leases: AT_LEAST_ONCE has one, and TRANSACTIONAL has one while it tracks crashes.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.errors import LeaseLost
from queueapp.flow.limited_claims import LimitedClaims
from queueapp.messages import ORDERING_KEY, new_id
from queueapp.messages.headers import readable_headers
from queueapp.models.delivery import Leasing
from queueapp.sending.isolation import atomic_on, isolated_connection
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import backend_of
from queueapp.sql.acks import LeaseHolder
from queueapp.sql.claims import FOREVER_MS, HEADERS, SEQ, Claimed

from ..claim_tracker import ActiveClaim
from ..events import InFlightSlot
from ..handlers import WorkerStopped
from ..limits import BatchSizer, Multiples
from ..quarantine import SMALL_BATCH, LeaseLock
from ..queue_state import QueueState
from . import outcomes
from .base import HandlerRoute, Receiver
from .batch_consumers import BatchCaller, ReadyMessage

log = logging.getLogger("queueapp.workers")

#: A table that is locked as a whole is waited for so long by a statement that has an alternative.
EXTEND_WAIT_MS = 100

#: A message of a batch, what its handler raised, and what it had left in ``Context.items``.
Failed = tuple[Claimed, BaseException, dict[str, Any] | None]


class LeasedBatch:
    """A leased batch: each message goes from ``waiting`` to ``in_flight``, and when it was handled to ``done``.

    ``waiting`` and ``done`` are shared with the service that renews leases: the thread that takes a message out of one
    of them is the only one that has it, so neither needs a lock.
    """

    __slots__ = ("acked", "done", "expires", "in_flight", "period", "renew_again", "token", "waiting")

    def __init__(self, token: uuid.UUID, expires: float, rows: Sequence[Claimed], period: float = math.inf) -> None:
        self.token = token
        #: How long its leases last, in seconds, from a claim or a renewal; infinite if the queue says so.
        self.period = period
        #: When its leases expire at the earliest, except those in ``renew_again``. Moved on by renewals alone.
        self.expires = expires
        self.waiting: deque[Claimed] = deque(rows)
        #: Handled, and not yet acked.
        self.done: deque[int] = deque()
        #: In its handler, or handled since the receiver last acked what was done.
        self.in_flight: list[int] = []
        #: Acked early, behind a slow handler.
        self.acked: set[int] = set()
        #: To be renewed at the next look: locked by another session at the last one, or shortened by their handler.
        self.renew_again: set[int] = set()

    def leased(self) -> set[int]:
        """What a renewal has to cover. ``waiting`` first: what moves to ``in_flight`` is in both for a moment."""
        waiting = [row[SEQ] for row in list(self.waiting)]
        return {*waiting, *self.in_flight} - self.acked

    def take_waiting(self, keep: int = 0) -> list[int]:
        """Take what was not started, from the right, all but ``keep``; ascending."""
        taken: list[int] = []
        while len(self.waiting) > keep:
            try:
                taken.append(self.waiting.pop()[SEQ])
            except IndexError:  # the other thread took the last one
                break
        taken.sort()
        return taken

    def take_done(self) -> list[int]:
        """Take everything out of ``done``, ascending."""
        taken: list[int] = []
        try:
            while True:
                taken.append(self.done.popleft())
        except IndexError:
            taken.sort()
            return taken


class HeldKeys:
    """The ordering keys of one batch of which a message was not handled: those behind it are given back."""

    def __init__(self, leaser: BatchLeaser) -> None:
        self._leaser = leaser
        self._keys: set[str] = set()
        self._seqs: list[int] = []

    def add(self, row: Claimed) -> None:
        """This message was not handled."""
        key = readable_headers(row[HEADERS]).get(ORDERING_KEY)
        if key is not None:
            self._keys.add(key)

    def keeps_back(self, row: Claimed) -> bool:
        """Whether this message has to wait; then it is remembered for ``release``."""
        if not self._keys or readable_headers(row[HEADERS]).get(ORDERING_KEY) not in self._keys:
            return False
        self._seqs.append(row[SEQ])
        return True

    def release(self, batch: LeasedBatch) -> None:
        """Give back what was kept back, uncounted."""
        if self._seqs:
            self._leaser.release_seqs(batch, sorted(self._seqs))
            self._seqs.clear()


class BatchLeaser:
    """Leases batches for one receiver; the quarantine decides how large they may be."""

    def __init__(self, receiver: Receiver, handle: Callable[[LeasedBatch, ActiveClaim], None]) -> None:
        self._receiver = receiver
        self._state = receiver.state
        self._handle = handle

    def receive(self, limit: int) -> int:
        """Lease at most ``limit`` messages and handle them; return how many were leased."""
        state, receiver = self._state, self._receiver
        receiver.full = False
        level = state.batch_limit.level
        if level == 2:
            # What is leased is in flight, so that a crash of everything counts against this message and no other.
            with state.quarantine.leasing_alone(state.stopping) as lock:
                if lock is None:
                    return 0
                # While this receiver waited it may have become known that there is no reason to.
                if (level := state.batch_limit.level) == 2:
                    return self._receive(1, level, lock)
        return self._receive(min(limit, SMALL_BATCH) if level else limit, level)

    def _receive(self, limit: int, level: int, lock: LeaseLock | None = None) -> int:
        state, receiver = self._state, self._receiver
        connection = connections[state.alias]
        token = new_id()
        lease_ms, limited = state.lease_ms, state.limited_claims
        with state.claim(limit) as claim:
            asked = monotonic()  # before the statement, so that a slow round trip cannot stretch the lease
            with ResponseDeadline(connection):
                if limited is None:
                    claim.rows = rows = state.sql.claims.claim_by_lease(
                        connection, claim.ranges, limit, token, state.subscriber, lease_ms
                    )
                    receiver.full = len(rows) == limit
                    if state.sql.table.claims_by_key:
                        # What stays behind, because of its key, must not be passed by a mark. Those behind the ones
                        # claimed now can be claimed next.
                        claim.rows, receiver.full = None, bool(rows)
                else:
                    rows = self._claim_limited(limited, claim, limit, token, lease_ms)
        if not rows:
            return 0
        count = len(rows)
        if state.handlers.copies:
            rows = outcomes.replace_leased_by_copies(state, rows, token)
            if not rows:
                state.claimed(rows, receiver.full)
                receiver.reserved = 0
                return count
        state.claimed(rows, receiver.full)
        receiver.size.weigh(rows)
        period = math.inf if lease_ms == FOREVER_MS else lease_ms / 1000
        receiver.batch = batch = LeasedBatch(token, asked + period, rows, period)
        receiver.reserved = 0  # the batch is what is in flight now
        if receiver.slot is not None:
            receiver.slot.lease(token, [row[SEQ] for row in rows], 0 if lease_ms == FOREVER_MS else lease_ms)
        try:
            if monotonic() > batch.expires:
                # The process stood still until it read the answer (another handler kept the interpreter lock), and no
                # slot named these messages: others may have them by now.
                self.release(batch, 0)
                receiver.full = True
                return count
            needed = state.batch_limit.needed(rows)
            if lock is not None and state.batch_limit.level < 2:
                lock.release()  # it is not suspected, nor was one before it; its handler may take long
            if needed > level and len(rows) > (keep := SMALL_BATCH if needed == 1 else 0):
                # Claimed as if they were harmless: most are released uncounted, and claimed again in smaller batches.
                self.release(batch, keep)
                receiver.full = True
            self._handle(batch, claim)
        finally:
            receiver.batch = None
        return count

    def _claim_limited(
        self, limited: LimitedClaims, claim: ActiveClaim, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        """A claim on a queue that counts what is leased, or shares it out."""
        state = self._state
        taken = limited.take(
            connections[state.alias], claim.ranges, limit, token, state.subscriber, lease_ms, bounded=True
        )
        # No row, perhaps because the queue is at its limit, says nothing of what is there; and unassigned rows lie
        # between those that were claimed: no mark may pass them as if they were gone.
        claim.rows = None if taken.unassigned else taken.rows or None
        if taken.unassigned:
            state.skipped.skip_unassigned(claim, taken.unassigned)
        self._receiver.full = taken.full
        state.at_limit = taken.at_limit
        return taken.rows

    def next(self, batch: LeasedBatch) -> Claimed | None:
        """Move the next message from ``waiting`` to ``in_flight``; None: there is none, or the worker stops."""
        if self._state.stopping.is_set():
            return None
        try:
            # In both for a moment: a renewal in between must not miss it.
            batch.in_flight.append(batch.waiting[0][SEQ])
        except IndexError:
            return None
        try:
            return batch.waiting.popleft()
        except IndexError:  # what waited was released meanwhile
            batch.in_flight.pop()
            return None

    def release(self, batch: LeasedBatch, keep: int) -> None:
        """Release what was not started, from the right, all but ``keep``; it is not counted as a delivery."""
        self.release_seqs(batch, batch.take_waiting(keep))

    def release_seqs(self, batch: LeasedBatch, surplus: list[int]) -> None:
        """Release these messages, which no handler has got, uncounted."""
        if surplus:
            state = self._state
            with ResponseDeadline(connections[state.alias]):
                ended = state.sql.acks.release(connections[state.alias], surplus, batch.token, cancelled=False)
            if not state.queue.delivery.others_may_end:
                state.stats.lost += len(surplus) - ended
            state.messages_returned(surplus)


def lease_sizer(alias: str) -> BatchSizer:
    """The sizes of leased batches."""
    limit = min(settings.MAX_BATCH, backend_of(connections[alias]).max_batch)
    return BatchSizer(limit, settings.BATCH_TARGET.total_seconds(), settings.MAX_BATCH_BYTES)


class AtLeastOnceReceiver(Receiver):
    """AT_LEAST_ONCE."""

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        super().__init__(state, slot)
        #: Seconds of handlers that a batch has at most.
        self.target = settings.BATCH_TARGET.total_seconds()
        self.size = lease_sizer(self.alias)
        self._leaser = BatchLeaser(self, self._handle)
        if self.handlers.largest_batch:
            self.batches = BatchCaller(self)
            self.size = Multiples(self.batches.largest, self.size.limit, self.target)
            #: Messages of the last calls whose checkpoints were written.
            self._checkpointed: set[int] = set()
            #: The message before was handled by itself, because it is suspected.
            self._was_quarantined = False
            # One message by itself, to find out what it is, would be a call that the consumer did not ask for.
            state.batch_limit.is_known = True

    def receive(self, limit: int) -> int:
        if self.batches is not None and not (limit := self.batches.gather(limit)):
            return 0
        return self._leaser.receive(limit)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _handle(self, batch: LeasedBatch, claim: ActiveClaim) -> None:
        in_flight, done = batch.in_flight, batch.done
        failures: list[Failed] = []
        skipped: list[int] = []
        # The handlers' time alone: a batch that shrank when a claim was slow would make claims of one while they are.
        started = monotonic()
        flush_at = self.flush_at(batch, started)
        spent, handled = 0.0, 0
        self.guard.mark_used()
        has_batches, next_row = self.batches is not None, self._leaser.next
        held = HeldKeys(self._leaser) if self.sql.table.is_ordered else None
        while (row := next_row(batch)) is not None:
            if held is not None and held.keeps_back(row):
                continue
            if has_batches and self._handle_with_others(batch, row, failures, skipped):
                outcome: BaseException | bool | None = True
            else:
                outcome = self.call(row, leased=True)
            if outcome is None:
                done.append(row[SEQ])
            elif outcome is False:
                skipped.append(row[SEQ])
            elif outcome is not True:
                failures.append((row, outcome, self.items))
            if held is not None and outcome is not None:
                held.add(row)
            if (now := monotonic()) > flush_at:
                handled += len(in_flight)
                spent += now - started
                self.flush(batch, failures, skipped, claim, spent / handled)
                self.guard.mark_used()
                started = monotonic()
                flush_at = self.flush_at(batch, started)
        handled += len(in_flight)
        if handled:
            # A claim by key names no rows to the marks.
            full = self.full if self.sql.table.claims_by_key else len(claim.rows or ()) >= claim.limit
            self.size.observe(handled, spent + monotonic() - started, full=full)
        self._end(batch, failures, skipped, claim)
        if held is not None:
            held.release(batch)
        if batch.waiting:
            self._leaser.release(batch, 0)  # stopping; last, so that an error here does not cost the acks

    def flush_at(self, batch: LeasedBatch, started: float) -> float:
        """When handlers are slower than expected, or the lease may have expired because it was not renewed."""
        return min(started + 2 * self.target, batch.expires)

    def flush(
        self, batch: LeasedBatch, failures: list[Failed], skipped: list[int], claim: ActiveClaim, average: float
    ) -> None:
        """Handlers are slower than expected, so many seconds on average: end what is done, and keep only what fits into
        the target."""
        self._end(batch, failures, skipped, claim)
        keep = int(self.target / average)
        if self.batches is not None:
            # Whole batches: half of one would be a call that the consumer did not ask for.
            keep = 0 if monotonic() > batch.expires else keep // self.batches.largest * self.batches.largest
        elif monotonic() > batch.expires and batch.waiting:
            # It was not renewed: what was not started may be leased to others by now. The token decides.
            log.warning(
                "%s: the lease of %d waiting messages expired.", self.queue._meta.label, len(batch.waiting),
                extra={"queue": self.queue._meta.label, "messages": len(batch.waiting)},
            )  # fmt: skip
            keep = 0
        else:
            keep = max(1, keep)
        self._leaser.release(batch, keep)

    def _end(self, batch: LeasedBatch, failures: list[Failed], skipped: list[int], claim: ActiveClaim) -> None:
        if batch.done:
            self._ack(batch)
        if failures or skipped:
            # What takes long to end is renewed meanwhile, what is acked is not.
            batch.in_flight[:] = [*(row[SEQ] for row, _, _ in failures), *skipped]
        for row, error, items in failures:
            outcomes.recover(self, row, error, batch.token, items)
        if skipped:
            with ResponseDeadline(connections[self.alias]):
                self.sql.acks.release(connections[self.alias], sorted(skipped), batch.token, cancelled=False)
            self.state.skipped.skip(claim, claim.rows or (), skipped)
        failures.clear()
        skipped.clear()
        batch.in_flight.clear()

    # -- acks ---------------------------------------------------------------------------------------------------------

    def _ack(self, batch: LeasedBatch) -> None:
        connection = connections[self.alias]
        while batch.done:
            try:
                self.ack_done(batch)
            except Error as error:
                # These messages are handled: an ack that did not arrive is tried again as long as the lease holds.
                if monotonic() > batch.expires or not self.state.health.retry_after(
                    error, self.state.health.breaker, connection
                ):
                    lost = len(batch.take_done())
                    log.error(
                        "%s: %d handled messages could not be acked and will be delivered again: %s",
                        self.queue._meta.label, lost, error,
                        extra={"queue": self.queue._meta.label, "messages": lost},
                    )  # fmt: skip
                    self.state.stats.lost += lost

    def ack_done(self, batch: LeasedBatch) -> None:
        """Ack what is done; after an error it is still done and not acked."""
        seqs = batch.take_done()
        if not seqs:
            return
        connection = connections[self.alias]
        try:
            with ResponseDeadline(connection):
                if self.handlers.resolver is None:
                    ended = self.delete_acked(seqs, batch.token)
                else:
                    ended = self.handlers.resolver.ack(self.sql, connection, seqs, batch.token)
        except Error:
            batch.done.extend(seqs)
            raise
        self.state.health.breaker.success()  # or it would stay open until the next claim, behind handlers of an hour
        self.state.health.succeeded(ended)
        if self.state.at_limit:
            self.state.capacity_freed()
        if ended != len(seqs) and not self.queue.delivery.others_may_end:
            self.state.stats.lost += len(seqs) - ended
            log.warning(
                "%s: %d of %d leases were lost before the ack (seq %d to %d); those messages are handled again.",
                self.queue._meta.label, len(seqs) - ended, len(seqs), seqs[0], seqs[-1],
                extra={"queue": self.queue._meta.label, "messages": len(seqs) - ended},
            )  # fmt: skip

    def delete_acked(self, seqs: list[int], token: uuid.UUID) -> int:
        """Delete what its holder may end: by the lease token, or by what else the queue's ``leasing`` allows."""
        leasing, connection = self.queue.delivery.leasing, connections[self.alias]
        if leasing is Leasing.FENCED:
            return self.sql.acks.ack(connection, seqs, token)
        return self.sql.ack_by_seq.ack(connection, seqs, LeaseHolder(leasing.value, self.state.subscriber))

    # -- for contexts of handlers -------------------------------------------------------------------------------------

    def write_headers(self, seq: int, headers: str) -> None:
        batch = self.batch
        if batch is None or not self.sql.acks.write_headers(connections[self.alias], seq, batch.token, headers):
            raise LeaseLost(self.queue._meta.label, seq)
        if self.batches is not None:
            self._checkpointed.add(seq)

    def extend(self, seq: int, period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seq)
        if batch.period == math.inf:
            return  # it has more than it asks for
        seconds = batch.period if period is None else period.total_seconds()
        if not connections[self.alias].get_autocommit() and self._extend_separately(seq, batch, seconds):
            return
        if not self.sql.acks.extend(connections[self.alias], [seq], batch.token, int(seconds * 1000)):
            raise LeaseLost(self.queue._meta.label, seq)
        if seconds < batch.period:
            batch.renew_again.add(seq)  # it expires before the others of its batch are due

    def _extend_separately(self, seq: int, batch: LeasedBatch, seconds: float) -> bool:
        """On another connection, outside of the handler's transaction. There the row would stay locked, so that no
        renewal reached it until the end, and in the moment after that others would see it expired (observed: handled
        twice). False: not possible, since the handler has locked the row already, say, or asks for less, or all of this
        is a test's transaction, or a pool may have no other connection."""
        if seconds < batch.period or connections[self.alias].settings_dict["OPTIONS"].get("pool"):
            return False
        try:
            with isolated_connection(self.alias) as connection, atomic_on(connection):
                return bool(self.sql.acks.renew(connection, [seq], batch.token, int(seconds * 1000), EXTEND_WAIT_MS))
        except Error:
            return False  # of the spare connection; the handler's own says whether the lease is lost

    def extend_batch(self, seqs: Sequence[int], period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seqs[0])
        if batch.period == math.inf:
            return  # they have more than they ask for
        seconds = batch.period if period is None else period.total_seconds()
        reached = self.sql.acks.extend(connections[self.alias], sorted(seqs), batch.token, int(seconds * 1000))
        if lost := {*seqs}.difference(reached):
            raise LeaseLost(self.queue._meta.label, min(lost))
        if seconds < batch.period:
            batch.renew_again.update(seqs)  # they expire before the others of their batch are due

    # -- consumers that take batches ----------------------------------------------------------------------------------
    # A call that fails is halved at once: its messages are still leased.

    def _handle_with_others(self, batch: LeasedBatch, row: Claimed, failures: list[Failed], skipped: list[int]) -> bool:
        """Handle a message together with others of its batch in one call; return whether it did."""
        if self._was_quarantined:
            self._ack_early(batch)  # the next one may end the process
        route = self.batches.route_of(row)
        self._was_quarantined = route is not None and self.batches.is_quarantined(row, leased=True)
        others_of_batch = [] if route is None or self._was_quarantined else self._take_along(batch, route, row)
        if route is None or not others_of_batch:
            return False
        self._handle_call(batch, route, [row, *others_of_batch], failures, skipped)
        return True

    def _take_along(self, batch: LeasedBatch, route: HandlerRoute, first: Claimed) -> list[Claimed]:
        """Take the other messages of the same call out of those that wait. A message of another call is out of
        ``waiting`` for a moment, and in ``in_flight``, so that a renewal in between does not miss it."""
        following: list[Claimed] = []
        rest: list[Claimed] = []
        while len(following) < route.consumer.batch - 1 and (row := self._leaser.next(batch)) is not None:
            (following if self.batches.goes_with(row, route, first, leased=True) else rest).append(row)
        batch.waiting.extendleft(reversed(rest))
        if rest:
            passed = {row[SEQ] for row in rest}
            batch.in_flight[:] = [seq for seq in batch.in_flight if seq not in passed]
        return following

    def _handle_call(
        self,
        batch: LeasedBatch,
        route: HandlerRoute,
        rows: Sequence[Claimed],
        failures: list[Failed],
        skipped: list[int],
    ) -> None:
        """Call the handler, and where that fails as a whole with halves of the messages, until those that fail are
        single."""
        calls = self.batches
        ready: list[ReadyMessage] = []
        for row in rows:
            prepared = calls.prepare(route, row, leased=True)
            if isinstance(prepared, ReadyMessage):
                ready.append(prepared)
            elif prepared is None:
                skipped.append(row[SEQ])
            else:
                failures.append((row, prepared, None))
        parts = deque([ready] if ready else [])
        self._checkpointed.clear()
        while parts:
            part = parts.popleft()
            if self.state.stopping.is_set() and len(part) < len(ready):
                stopped = WorkerStopped(f"{route.consumer.registration.name} was not called: the worker stops.")
                failures += [(item.row, stopped, None) for item in part]
                continue
            outcome = calls.call_batch(route, part, leased=True)
            if outcome is None:
                batch.done.extend([item.row[SEQ] for item in part])
            elif isinstance(outcome, dict):
                batch.done.extend([item.row[SEQ] for index, item in enumerate(part) if index not in outcome])
                failures += [(part[index].row, error, calls.items_of(index)) for index, error in outcome.items()]
            elif len(part) == 1 or isinstance(outcome, WorkerStopped):
                failures += [(item.row, outcome, calls.items_of(index)) for index, item in enumerate(part)]
            else:
                part, half = self._with_checkpoints(part), len(part) // 2
                parts.extendleft([part[half:], part[:half]])
            if parts and monotonic() > batch.expires - batch.period / 2:
                self._ack_early(batch)

    def _with_checkpoints(self, part: list[ReadyMessage]) -> list[ReadyMessage]:
        """The messages as their rows are now: a call that failed may have committed checkpoints before that, or not."""
        seqs = self._checkpointed.intersection(item.row[SEQ] for item in part)
        if not seqs:
            return part
        connection = connections[self.alias]
        rows = self.queue._base_manager.using(self.alias).filter(seq__in=sorted(seqs))
        while True:
            try:
                with ResponseDeadline(connection):
                    headers = dict(rows.values_list("seq", "headers"))
                break
            except Error as error:
                if not self.state.health.retry_after(error, self.state.health.breaker, connection):
                    raise
        return [
            ReadyMessage(
                (*item.row[:HEADERS], headers.get(item.row[SEQ], item.row[HEADERS]), *item.row[HEADERS + 1 :]),
                item.message,
                item.attempt,
            )
            for item in part
        ]

    def _ack_early(self, batch: LeasedBatch) -> None:
        """Ack what is done: a crash must not double it."""
        seqs = set(batch.done)
        if seqs:
            self._ack(batch)
            batch.acked |= seqs
            self.guard.mark_used()
