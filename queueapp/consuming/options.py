"""The options of ``@consumer``, beside the retry options, which a queue may have as well."""

from __future__ import annotations

from datetime import timedelta

from ..conf import MAX_CONCURRENCY
from ..failures.recoverability import OPTIONS as RECOVERABILITY
from ..options import Option

#: A worker process writes its messages in flight to memory that its supervisor reads; that has space for so many.
MOST_IN_A_BATCH = 500

OWN: tuple[Option, ...] = (
    Option("batch", int, None,
           "The handler takes a list of so many messages at most, instead of one; None: "
           "one.", 1, MOST_IN_A_BATCH, True),
    Option("batch_wait", timedelta, None,
           "How long more messages are waited for before a batch that is not full is taken; None: not at all.",
           timedelta(milliseconds=1), timedelta(seconds=30), True, True),
    Option("concurrency", int, None,
           "Handlers of it that run at once in a worker process, at most; None: as many as the process has receivers. "
           "For queues with `recipients`.", 1, MAX_CONCURRENCY, True),
)  # fmt: skip

OPTIONS = (*RECOVERABILITY, *OWN)
