"""Maintenance of one database: expired messages are deleted, and the leases of dead subscribers are released.

Also: operations on many messages, which operators have started, go on batch by batch; messages with a priority that no
claim finds get the nearest one; poison messages that were archived or edited are deleted after their retention; delayed
messages for unknown queues, and messages that no consumer takes, are named in the log; canaries are started after a
deploy; ledgers are checked. ``AlertEvaluator`` evaluates the alerts, where this process leads the maintenance.

One process per database and set of queues does all of it, elected for this alone: it need not be the one that
dispatches delayed messages. Every task is idempotent and works in small batches that skip locked rows, so no task waits
for a lock, and two leaders at once only share the work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import Error, connections

from .. import callbacks, delayed, notifier
from ..alerts import conditions, store
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..consuming.registry import registered
from ..failures import poison_operations
from ..failures.poison_store import PASSING
from ..flow import limited_claims
from ..messages.escaping import in_one_line
from ..operations import bulk_operations, expiration, ledger, requeue_after_deploy, snapshots, statistics
from ..operations.expiration import delete_expired
from ..receiving import barriers
from ..sending import early_acks
from ..sql import ErrorKind, backend_of, queue_sql, short_lock_waits
from . import maintenance_hooks
from .connection_timeouts import (
    ResponseDeadline,
    deadline_per_statement,
    pause_deadline,
    restart_deadline,
    resume_deadline,
    without_deadline,
)
from .leader_election import Elector
from .orphaned_leases import Unreleasable, release_orphaned_leases
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two rounds.
ROUND_INTERVAL = 1.0
#: Seconds between two attempts of a follower to be elected.
ELECTION_INTERVAL = 5.0
#: Seconds between two deletions of rows whose retention is over.
RETENTION_INTERVAL = 600.0
#: Seconds between two searches for messages that are not delivered, and until the log names the same again.
REPORT_INTERVAL, REPORT_AGAIN = 60.0, 3600.0
#: Seconds between two checks of the ledgers.
LEDGER_INTERVAL = 60.0
#: Seconds between two looks at the versions of the workers.
DEPLOY_INTERVAL = 10.0
#: Seconds between two searches for messages whose priority no claim finds, and how many are moved at a time.
LEVELS_INTERVAL, LEVELS_BATCH = 2.0, 1000

#: Errors of one queue: its table does not exist yet, or this process may not write to it.
_OF_ONE_QUEUE = (ErrorKind.DENIED, ErrorKind.MISSING)


class _Periodic:
    """A task and when it is due. ``interval`` returns seconds until the next run; None: it does not run again."""

    def __init__(self, run: Callable[[], None], interval: Callable[[], float | None], due: float | None = 0.0) -> None:
        self._run, self._interval, self._due = run, interval, due

    def run_if_due(self) -> None:
        if self._due is None or monotonic() < self._due:
            return
        self._run()
        seconds = self._interval()
        self._due = None if seconds is None else monotonic() + seconds


class Maintenance(Service):
    """The maintenance of one database."""

    def __init__(
        self, alias: str, queues: Sequence[Any], elector: Elector, round_interval: float = ROUND_INTERVAL
    ) -> None:
        """``round_interval``: seconds between two rounds."""
        super().__init__(f"maintenance-{alias}")
        self._round_interval = round_interval
        self.alias = alias
        self.queues = queues
        self._with_barriers = [queue for queue in queues if queue.delivery.has_barriers]
        self.elector = elector
        self.breaker = CircuitBreaker(f"Maintenance in {alias}", kind="maintenance", subject=alias)
        #: Dead subscribers whose leases this process cannot release.
        self.unreleasable: Unreleasable = {}
        #: Destinations of overdue delayed messages that are no queue of this project, and how many there are.
        self.undeliverable: dict[str, int] = {}
        #: When the log may name a subject again.
        self._report_again: dict[Hashable, float] = {}
        #: Messages that were moved to another priority since the log said so: by queue, then by the priority they had.
        self._moved: dict[Any, Counter[int]] = {}
        #: Queues of which the log says that they cannot be purged.
        self._unpurged: set[str] = set()
        #: Where the search for messages that arrived after their acks continues.
        self._early_acks: dict[Any, int] = {}
        self._snapshots = snapshots.SnapshotRecorder(alias, queues)
        #: The version of the workers on which a queue has no canary to start any more.
        self._examined: dict[str, str] = {}
        #: Whether an operation on many messages has another batch that is due.
        self._has_more = False
        #: The first error of this round that did not end it.
        self._failure: Error | None = None

    def serve(self) -> None:
        tasks = self._tasks()
        callbacks.guard(without_deadline)
        while not self.stopping:
            wait = min(self._round_interval, settings.HEARTBEAT_INTERVAL.total_seconds())
            self._failure, self._has_more = None, False
            try:
                with ResponseDeadline(connections[self.alias]):
                    if self.elector.try_lead():
                        self._attempt(release_orphaned_leases, self.alias, self.unreleasable)
                        for task in tasks:
                            task.run_if_due()
                    else:
                        wait = ELECTION_INTERVAL
                    if self._failure is not None:
                        raise self._failure
                self.breaker.success()
                wait = 0.0 if self._has_more else wait
            except Error as error:
                connections[self.alias].close()
                wait = self.breaker.failure(error)
            self.pause(wait)
        try:
            with ResponseDeadline(connections[self.alias]):
                self.elector.resign()
        except Error as error:
            log.info(
                "The maintenance of %r could not resign; others wait until its lease expires: %s", self.alias, error
            )

    @property
    def is_leader(self) -> bool:
        """Whether this process runs the maintenance at present. Safe from any thread."""
        return self.elector.is_leader

    def may_continue(self) -> bool:
        """Whether work in batches may go on: the service was not asked to end, and renews its lease, which a long purge
        needs."""
        return not self.stopping and self.elector.try_lead()

    def _tasks(self) -> list[_Periodic]:
        purge_interval = settings.PURGE_INTERVAL.total_seconds() if settings.PURGE_INTERVAL else None
        first_purge: float | None = 0.0
        if not settings.PURGE_EXPIRED_ON_STARTUP:
            first_purge = monotonic() + purge_interval if purge_interval else None
        return [
            _Periodic(lambda: self._attempt(limited_claims.forget_uncounted, self.alias), lambda: None),
            _Periodic(self._clamp_and_settle, lambda: LEVELS_INTERVAL),
            _Periodic(self._release_barriers, lambda: 0.0),
            _Periodic(self._purge_all, lambda: purge_interval, first_purge),
            _Periodic(self._drop_old, lambda: RETENTION_INTERVAL),
            _Periodic(self._report, lambda: REPORT_INTERVAL),
            _Periodic(self._check_ledgers, lambda: LEDGER_INTERVAL),
            _Periodic(lambda: self._attempt(self._requeue_after_deploy), lambda: DEPLOY_INTERVAL),
            _Periodic(lambda: self._attempt(self._carry_out_operations), lambda: 0.0),
            _Periodic(lambda: self._attempt(self._record_statistics), lambda: self._snapshots.wait),
        ]

    def _attempt(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task. The failure of one must not end the round, or the first queue with a trigger that raises would
        prevent the purge of all others, nor that of one whose table is locked. The round counts as failed all the
        same."""
        try:
            task(*args)
        except Error as error:
            kind = backend_of(connections[self.alias]).error_kind(error)
            if kind in PASSING and kind is not ErrorKind.LOCKED:
                raise
            self._failure = self._failure or error

    def _tolerate(self, error: Error, subject: Hashable = None, text: str = "", name: str = "", **facts: Any) -> None:
        """Raise an error, unless it is one of a single queue or table (``_OF_ONE_QUEUE``), which the log names by this
        text, if there is one, with places for the name and the error."""
        if backend_of(connections[self.alias]).error_kind(error) not in _OF_ONE_QUEUE:
            raise error
        if text and self._may_report(subject):
            log.warning(text, name, error, extra=facts)

    # -- the tasks ------------------------------------------------------------------------------------------------

    def _clamp_and_settle(self) -> None:
        for queue in self.queues:
            self._attempt(self._clamp_priorities, queue)
        # Messages that arrived after their ack, and acks whose messages have not arrived.
        queues = [queue for queue in self.queues if early_acks.defers(queue)]
        for queue in queues:
            self._attempt(self._settle_early_acks, queue)
        if queues:
            self._attempt(expiration.forget_old, self.alias)

    def _clamp_priorities(self, queue: Any) -> None:
        moved = self._moved.setdefault(queue, Counter())
        try:
            moved.update(clamp_priorities(queue, self.alias, self))
        except Error as error:
            self._tolerate(error)
        if moved and self._may_report((queue, "priorities")):
            _log_moved(queue, moved)
            moved.clear()

    def _settle_early_acks(self, queue: Any) -> None:
        start = self._early_acks.get(queue, 0)
        removed, self._early_acks[queue] = expiration.settle(queue, self.alias, start)
        if removed:
            label = queue._meta.label
            log.info("%s: removed %s that arrived after their acks.", label, _messages(removed), extra={"queue": label})

    def _release_barriers(self) -> None:
        """A worker releases barriers when it peeks. This is for a barrier whose last worker before it has died."""
        for queue in self._with_barriers:
            self._attempt(self._release_barriers_of, queue)

    def _release_barriers_of(self, queue: Any) -> None:
        try:
            barriers.release(queue, self.alias)
        except Error as error:
            self._tolerate(error)

    def _purge_all(self) -> None:
        for queue in self.queues:
            self._attempt(self._purge, queue)

    def _purge(self, queue: Any) -> None:
        try:
            purge_expired(queue, self.alias, self)
        except Error as error:
            self._tolerate(error)
            label = queue._meta.label
            if label not in self._unpurged:
                self._unpurged.add(label)
                log.warning(
                    "%s: expired messages cannot be purged: %s",
                    label,
                    str(error).split("\n", 1)[0],
                    extra={"queue": label},
                )

    def _drop_old(self) -> None:
        if settings.POISON_RETENTION:
            self._attempt(drop_old_poison, self.alias, self)
        self._attempt(snapshots.drop_old, self.alias, self.may_continue)
        self._attempt(bulk_operations.drop_old, self.alias, self.may_continue)
        self._attempt(requeue_after_deploy.drop_old_notes, self.alias)
        for resolver in filter(None, map(registered.resolver_of, self.queues)):
            self._attempt(resolver.run_maintenance, self.alias, self.may_continue)
        for hook in maintenance_hooks.values():
            self._attempt(hook, self.alias, self.may_continue)

    def _check_ledgers(self) -> None:
        queues = ledger.with_ledger(self.queues)
        if queues:
            self._attempt(ledger.add_up, self.alias, self._may_continue_anew)
        for queue in queues:
            restart_deadline()
            self._attempt(self._check_ledger, queue)

    def _check_ledger(self, queue: Any) -> None:
        try:
            ledger.check(queue, self.alias)
        except Error as error:
            label = queue._meta.label
            self._tolerate(error, (queue, "ledger"), "%s: the ledger cannot be checked: %s", label, queue=label)

    def _requeue_after_deploy(self) -> None:
        queues = [queue for queue in self.queues if queue.delivery.requeue_after_deploy is not None]
        if not queues:
            return
        try:
            requeue_after_deploy.start_due(self.alias, queues, self._examined)
        except Error as error:
            text = "Poison in %r cannot be requeued after a deploy: %s"
            self._tolerate(error, "requeue_after_deploy", text, self.alias, database=self.alias)

    def _may_continue_anew(self) -> bool:
        restart_deadline()
        return self.may_continue()

    def _carry_out_operations(self) -> None:
        try:
            self._has_more = bulk_operations.carry_out(self.alias, self._may_continue_anew)
        except Error as error:
            text = "Operations on many messages in %r cannot be carried out: %s"
            self._tolerate(error, "operations", text, self.alias, database=self.alias)

    def _record_statistics(self) -> None:
        def may_continue() -> bool:
            restart_deadline()
            return not self.stopping

        try:
            self._snapshots.record(may_continue)
        except Error as error:
            text = "The statistics of the queues in %r cannot be stored: %s"
            self._tolerate(error, "statistics", text, self.alias, database=self.alias)
            self._snapshots.wait = REPORT_AGAIN

    def _report(self) -> None:
        if self._with_barriers:
            self._attempt(barriers.forget_dead, self.alias)
        self._attempt(self.report_undeliverable)
        self._attempt(self.report_unroutable)

    def report_undeliverable(self) -> None:
        self.undeliverable = delayed.undeliverable(self.alias)
        for destination in filter(self._may_report, self.undeliverable):
            count = self.undeliverable[destination]
            log.warning(
                "%d delayed message%s in %r for %r %s overdue, and no queue of this project has that name. Another "
                "project's dispatcher may deliver them; if the queue was removed, movedelayed sends them to another "
                "one.",
                count, "s" if count != 1 else "", self.alias, destination, "are" if count != 1 else "is",
                extra={"database": self.alias, "destination": destination, "count": count},
            )  # fmt: skip

    def report_unroutable(self) -> None:
        """One line per recipient or queue. Of an unknown type each worker that meets it logs a line, and of a priority
        the task that moves its messages."""
        for queue, unroutable in statistics.unroutable_in(self.alias):
            if unroutable.what not in ("type", "priority") and self._may_report(
                (queue, unroutable.what, unroutable.name)
            ):
                log.warning("%s: %s.", in_one_line(queue, 200), unroutable)

    def _may_report(self, subject: Hashable) -> bool:
        """Whether the log may name this now: once, and after ``REPORT_AGAIN`` seconds once more."""
        if monotonic() < self._report_again.get(subject, 0.0):
            return False
        self._report_again[subject] = monotonic() + REPORT_AGAIN
        return True


def clamp_priorities(queue: Any, alias: str, service: Maintenance | None = None) -> Counter[int]:
    """Move messages whose priority no claim finds to the nearest level, in batches; returns how many had which
    priority.

    Messages for recipients that are no consumers of this project stay as they are: their queue may have other levels
    elsewhere.
    """
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    moved: Counter[int] = Counter()
    if not sql.table.levels:
        return moved
    # Copies under a former name arrive for as long as that name subscribes.
    recipients = ["", *(name for consumer in registered.of(queue) for name in (consumer.name, *consumer.aliases))]

    def step() -> int:
        with short_lock_waits(alias):
            batch = sql.maintenance.clamp_priorities(connection, recipients, LEVELS_BATCH)
        moved.update(batch)
        return sum(batch.values())

    if _in_batches(step, LEVELS_BATCH, service):
        notifier.sent(queue, connection)
    return moved


def _log_moved(queue: Any, moved: Counter[int]) -> None:
    frequent = moved.most_common(5)
    shown = [f"{count} from priority {priority}" for priority, count in frequent]
    if remaining := moved.total() - sum(count for _, count in frequent):
        shown.append(f"{remaining} from others")
    log.warning(
        "%s: moved %s with a priority outside of the queue's levels, 0 to %d, to the nearest level: %s.",
        queue._meta.label, _messages(moved.total()), queue.delivery.priorities - 1, ", ".join(shown),
        extra={"queue": queue._meta.label, "count": moved.total()},
    )  # fmt: skip


def purge_expired(queue: Any, alias: str, service: Maintenance | None = None) -> int:
    """Delete the expired messages of a queue in batches, each of which is sent as the signal ``expired``; returns how
    many."""
    batch = settings.PURGE_BATCH
    total = _in_batches(lambda: delete_expired(queue, alias, batch), batch, service)
    if total:
        label = queue._meta.label
        log.info("%s: purged %d expired %s.", label, total, "message" if total == 1 else "messages",
                 extra={"queue": label, "count": total})  # fmt: skip
    return total


def drop_old_poison(alias: str, service: Maintenance | None = None) -> int:
    """Delete archived and edited poison messages whose retention is over, in batches; returns how many."""
    total = _in_batches(
        lambda: poison_operations.drop_old(settings.POISON_RETENTION, using=alias), poison_operations.BATCH, service
    )
    if total:
        log.info(
            "Deleted %d archived or edited poison %s in %r: the retention is over.",
            total,
            "message" if total == 1 else "messages",
            alias,
            extra={"database": alias, "count": total},
        )
    return total


def _messages(count: int) -> str:
    return f"{count} message{'s' if count != 1 else ''}"


def _in_batches(step: Callable[[], int], batch: int, service: Maintenance | None) -> int:
    """Repeat the step, which deletes or changes at most ``batch`` rows, until it does fewer or the service may not
    continue; returns how many rows there were."""
    total = 0
    while service is None or service.may_continue():
        restart_deadline()
        count = step()
        total += count
        if count < batch:
            break
    return total


#: Interval between two evaluations where ``QUEUEAPP["ALERTS"]`` does not set ``every``.
DEFAULT_INTERVAL = timedelta(seconds=30)


class AlertEvaluator(Service):
    """The alerts of one database."""

    def __init__(self, alias: str, queues: Sequence[Any], maintenance: Maintenance) -> None:
        super().__init__(f"alerts-{alias}")
        self.alias = alias
        self.queues = queues
        self._maintenance = maintenance
        self.breaker = CircuitBreaker(f"Alerts in {alias}", kind="alerts", subject=alias)

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while not self.stopping:
            wait = settings.ALERTS.get("every", DEFAULT_INTERVAL).total_seconds()
            try:
                if self._maintenance.is_leader:
                    self.evaluate()
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = max(wait, self.breaker.failure(error))
            except Exception:
                # A project's setting or signal receiver failed; that must not end the process.
                log.exception("Alerts in %r could not be evaluated.", self.alias)
            self.pause(wait)

    def evaluate(self) -> None:
        """Evaluate the conditions once and send what is due."""
        with deadline_per_statement(connections[self.alias]):
            labels = {queue._meta.label for queue in self.queues}
            store.reconcile(self.alias, conditions.evaluate(self.alias, self.queues), labels)
            paused = pause_deadline()  # mail servers and webhooks are not the database
            try:
                store.send_notifications(self.alias, labels | conditions.bounded_parts())
            finally:
                resume_deadline(paused)
