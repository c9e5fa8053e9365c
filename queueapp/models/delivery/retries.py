"""Options of ``class Delivery``: what becomes of a message whose handler failed, for consumers that say nothing
else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ...failures.recoverability import OPTIONS as RECOVERABILITY
from ...failures.verdicts import Verdict
from ...options import Option

# The same texts speak of a consumer there; of what is left of the chain here.
OPTIONS: tuple[Option, ...] = tuple(
    replace(one, doc=one.doc.replace("the queue's, then ", "").replace("the queue's, which has none by itself", "none"))
    for one in RECOVERABILITY
)


class FailingOptions:
    """The types of these options."""

    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
