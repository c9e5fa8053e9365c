"""A verdict that was carried out, and carrying one out once though it is tried until it is done."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections, transaction

from .. import notifier, signals
from ..models import ProcessedMessage
from ..sql import backend_of
from .poison_store import is_transient
from .policy import Failure
from .verdicts import Poison, RetryLater, RetryNow, Verdict


@dataclass(slots=True)
class AppliedVerdict:
    """A verdict that was carried out; ``tell`` the world once that is committed."""

    failure: Failure
    verdict: Verdict
    connection: Any

    def tell(self) -> None:
        """Send wake-ups and signals, and log. It is committed: nothing that happens here is an error of the
        failure's."""
        try:
            _tell(self.failure, self.verdict, self.connection)
        except BaseException:  # a receiver may call sys.exit()
            signals.log.exception("A failed attempt was recorded, but not everybody could be told.")


class IdempotentTransaction:
    """One record of a message that is in no table: a connection that is lost at its commit leaves open whether it is
    there.

    Each try notes the same key in its transaction (``note_processed``): the one whose note is there already has nothing
    to write, and one that meets a commit in flight waits for its end. Maintenance deletes the notes.
    """

    def __init__(self, queue: Any, alias: str) -> None:
        self._key = uuid.uuid4().hex
        self._label = queue._meta.label
        self._alias = alias
        #: What was decided by the try that has written it down, if any has.
        self.decided: AppliedVerdict | None = None

    def first(self) -> bool:
        """Whether nothing was written yet; noted in the transaction that is open, and with it. Raises what a database
        that is away says; one that cannot store the record does not prevent the write."""
        connection = connections[self._alias]
        try:
            with transaction.atomic(using=self._alias):
                return backend_of(connection).dedupe.record_processed(
                    connection, ProcessedMessage._meta.db_table, self._key, self._label
                )
        except Error as error:
            if is_transient(error, self._alias):
                raise
            return True


def _tell(failure: Failure, verdict: Verdict, connection: Any) -> None:
    if isinstance(verdict, RetryLater):
        notifier.delayed(connection)
        signals.send(signals.delayed_retry, failure, verdict)
    elif isinstance(verdict, RetryNow):
        notifier.sent(failure.queue, connection)
        signals.send(signals.retry, failure, verdict)
    elif isinstance(verdict, Poison):
        signals.send(signals.poisoned, failure, verdict)
    else:
        signals.send(signals.discarded, failure, verdict)
    if failure.reasons:
        signals.send_expired(failure.queue, [failure.row.id], "", failure.reasons)
