"""A clock for tests. Times are the database's, which no test can set; so what is stored grows older instead.

All times of queues, delayed messages, poison messages and subscribers that are in a test database go back by so much, which
is what they would be seen as so much later: what is delayed becomes due, leases expire, messages expire. The journal's do
not: its tables are cut by the day.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.db import connections, models
from django.db.models import F

from ..models import DeferredAck, DelayedMessage, ForwardedMessage, PoisonMessage, Subscriber
from ..registry import queues
from ..sending.validation import alias_of
from ..sql.claims import LAST_END

_OURS = (ForwardedMessage, DeferredAck, DelayedMessage, PoisonMessage, Subscriber)


def let_pass(period: timedelta, aliases: Sequence[str]) -> None:
    """Make everything in these databases so much older."""
    if not isinstance(period, timedelta) or period <= timedelta(0):
        raise ValueError(
            f"period = {period!r} is not accepted: it must be a timedelta above 0; time does not run backwards."
        )
    for alias in aliases:
        there = set(connections[alias].introspection.table_names())
        for model in _models(alias):
            if model._meta.db_table in there and model._default_manager.using(alias).exists():
                _shift(model, alias, period)


def _models(alias: str) -> Iterator[Any]:
    yield from _OURS
    for queue in queues:
        if queue._meta.managed and alias_of(queue) == alias:
            yield queue


def _shift(model: Any, alias: str, period: timedelta) -> None:
    rows = model._default_manager.using(alias).order_by()
    for field in model._meta.concrete_fields:
        if isinstance(field, models.DateTimeField):
            # Unlimited times stay: a lease without an end, a message that waits for evaluation.
            rows.filter(**{f"{field.name}__lt": LAST_END}).update(**{field.name: F(field.name) - period})
