"""Deciding: one failed attempt as a policy sees it, the default policy, and asking the one of a consumer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction

from .. import messages, signals
from ..conf import settings
from ..consuming.registration import Registration
from ..errors import UndecodableMessage
from ..poison.failures import one_line
from ..sql.base import Row
from .verdicts import Discard, Poison, RetryLater, RetryNow, Verdict


@dataclass(slots=True)
class Failure:
    """One failed attempt as a policy sees it: ``policy(failure) -> verdict``. The row is as it is stored, so header
    changes of the failed handler are not here."""

    queue: Any
    consumer: Registration | None
    row: Row
    exception: BaseException
    attempt: int
    items: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The stored headers; empty when they do not parse."""
        try:
            return messages.decode_headers(self.row.headers)
        except UndecodableMessage:
            return {}

    def option(self, name: str) -> Any:
        """An option of the consumer, or else of the project (``attempts`` -> ``QUEUEAPP.ATTEMPTS``)."""
        value = self.consumer.options[name] if self.consumer is not None else None
        return value if value is not None else getattr(settings, name.upper())


def default_policy(failure: Failure) -> Verdict:
    """Immediate retries, then delayed ones with increase and jitter, then poison (NServiceBus' order of decisions)."""
    if isinstance(failure.exception, UndecodableMessage):
        return Poison("undecodable: " + one_line(failure.exception))
    unrecoverable = failure.consumer.options["unrecoverable"] if failure.consumer else ()
    if unrecoverable and isinstance(failure.exception, unrecoverable):
        return Poison("unrecoverable: " + one_line(failure.exception))
    attempts = failure.option("attempts")
    limit = failure.queue.delivery.max_deliveries
    if failure.attempt >= attempts or (limit and failure.attempt >= limit):
        return Poison(f"failed {failure.attempt} of {attempts} attempts: {one_line(failure.exception)}")
    immediate = failure.option("immediate_retries")
    if failure.attempt <= immediate:
        return RetryNow()
    wait = failure.option("retry_delay") + failure.option("retry_delay_increase") * (failure.attempt - immediate - 1)
    wait += wait * (failure.option("retry_jitter") * random.random())
    return RetryLater(wait) if wait else RetryNow()


def ask(failure: Failure, alias: str) -> Verdict:
    """The verdict of the consumer's own policy, or of the default one where it has none or it fails."""
    policy: Callable[[Failure], Verdict] | None = failure.consumer.options["policy"] if failure.consumer else None
    if policy is None:
        return default_policy(failure)
    try:
        # What a policy writes or sends is kept with its verdict, and undone alone when it raises.
        with transaction.atomic(using=alias):
            verdict = policy(failure)
    except Exception as error:
        # A policy that fails must not lose the message nor stop the queue: the default one decides.
        signals.log.exception("The recoverability policy of %r failed; the default decides.", failure.consumer)
        failure.items["policy_error"] = repr(error)
        return default_policy(failure)
    if not isinstance(verdict, RetryNow | RetryLater | Poison | Discard):
        signals.log.error(
            "The recoverability policy of %r returned %r; the default decides.", failure.consumer, verdict
        )
        return default_policy(failure)
    return verdict
