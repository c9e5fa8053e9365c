"""What a recoverability policy gets (``Failure``), what it may decide (``Verdict``), and the options of failed
messages: a consumer's, else its queue's, else the project's (``QUEUEAPP``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import messages
from ..conf import settings
from ..errors import UndecodableMessage
from ..options import Option

if TYPE_CHECKING:
    from ..consuming.registration import Registration
    from ..sql.message_columns import Row


def _are_errors(value: Any) -> bool:
    return all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in value)


OPTIONS: tuple[Option, ...] = (
    Option("timeout", timedelta, None, "Time limit of one attempt; None: the queue's, then QUEUEAPP.TIMEOUT.",
           timedelta(milliseconds=10), timedelta(hours=24), True, True),
    Option("attempts", int, None, "Attempts before the message is poison; None: the queue's, then QUEUEAPP.ATTEMPTS.",
           1, 1000, True),
    Option("retry_delay", timedelta, None,
           "Wait between attempts; None: the queue's, then QUEUEAPP.RETRY_DELAY; 0: at once, in place.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_delay_increase", timedelta, None,
           "Added to the wait at each further attempt; None: the queue's, then QUEUEAPP.RETRY_DELAY_INCREASE.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_backoff", float, None,
           "Factor by which each further wait is longer (2: exponential back-off); None: the queue's, then "
           "QUEUEAPP.RETRY_BACKOFF.",
           1.0, 100.0, True),
    Option("retry_backoff_max", timedelta, None,
           "Longest wait that `retry_backoff` leads to, jitter included; None: the queue's, then "
           "QUEUEAPP.RETRY_BACKOFF_MAX.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_jitter", float, None,
           "Share of the wait that is added at random; None: the queue's, then QUEUEAPP.RETRY_JITTER.", 0.0, 1.0, True),
    Option("immediate_retries", int, None,
           "Attempts repeated at once before waits begin; None: the queue's, then QUEUEAPP.IMMEDIATE_RETRIES.",
           0, 1000, True),
    Option("unrecoverable", tuple, None,
           "Exception classes that send the message to poison at once; None: the queue's, which has none by itself.",
           optional=True, accept=_are_errors),
    Option("policy", object, None,
           "Callable (failure) -> RetryNow | RetryLater | Poison | Discard; None: the queue's, then the default one.",
           optional=True, accept=callable),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Put the message back in its place; it is received again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Move the message to the delayed store; it comes back to its queue after ``delay``."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Poison:
    """Move the message to the poison table, with this reason in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the message for good; the reason is logged."""

    reason: str = ""


Verdict = RetryNow | RetryLater | Poison | Discard


@dataclass(slots=True)
class Failure:
    """One failed attempt as a policy sees it: ``policy(failure) -> verdict``. The row is as it is stored, so header
    changes of the failed handler are not here; its deliveries count this hand-out. ``attempt``: how many have failed by
    now, this one included. Where no handler was involved (a delayed message that could not be forwarded, one that was
    moved by hand) there is no consumer, and where the queue is unknown, no queue."""

    queue: Any
    consumer: Registration | None
    row: Row
    exception: BaseException
    attempt: int
    items: dict[str, Any] = field(default_factory=dict)
    #: The limits of its queue that it has reached with this attempt, if that is why it ends.
    reasons: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """The stored headers; empty when they do not parse."""
        return messages.readable_headers(self.row.headers)

    @property
    def message_type(self) -> str:
        """The type that the headers name; '' where they name none, or do not parse."""
        try:
            return messages.read_head(self.row.headers)[0]
        except UndecodableMessage:
            return ""

    def option(self, name: str) -> Any:
        """An option of the consumer, or else of its queue, or else of the project (``attempts`` ->
        ``QUEUEAPP.ATTEMPTS``)."""
        value = self.consumer.option(name) if self.consumer is not None else getattr(self.queue.delivery, name)
        return value if value is not None else getattr(settings, name.upper())
