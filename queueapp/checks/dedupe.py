"""Keys of messages, where a queue cannot have them or says something without them. Connects to no database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import router

from .. import registry
from ..models import MessageKey


@register(Tags.models)
def check_dedupe(**_: Any) -> list[Any]:
    """E084 to E086, W081: see docs/checks.md."""
    return [found for queue in registry.queues for found in _check(queue)]


def _check(queue: Any) -> Iterator[Any]:
    label, delivery = queue._meta.label, queue.delivery
    if delivery.dedupe_key is None:
        if "on_conflict" in delivery.given:
            text = f"{label}.Delivery.on_conflict says nothing: its messages have no keys."
            yield Warning(text, hint="Set dedupe_key, or leave it out.", obj=queue, id="queueapp.W081")
        return
    if delivery.recipients:
        text = f"{label} has dedupe_key and recipients: one copy of a message may wait while another is handled."
        hint = "Give each consumer a queue of its own that collects the topic: there each has a key of its own."
        yield checks.Error(text, hint=hint, obj=queue, id="queueapp.E084")
    if delivery.target_queue_depth is not None:
        text = f"{label} has dedupe_key and target_queue_depth: what waits may lie in the journal, where no key is looked for."
        yield checks.Error(text, hint="Leave one of them out.", obj=queue, id="queueapp.E085")
    if not queue._meta.managed or not router.allow_migrate_model(router.db_for_write(queue), MessageKey):
        text = f"{label} has dedupe_key, and its table is foreign, or where the router allows no tables of queueapp."
        hint = "A message is found by its id there, and the keys are in the queue's database."
        yield checks.Error(text, hint=hint, obj=queue, id="queueapp.E086")
