"""The options of a failed message: a consumer's, else its queue's, else the project's (``QUEUEAPP``)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..options import Option


def _are_errors(value: Any) -> bool:
    return all(isinstance(one, type) and issubclass(one, BaseException) for one in value)


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
