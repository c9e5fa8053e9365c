"""Consumers that keep checkpoints where nothing can be kept. Connects to no database."""

from __future__ import annotations

from types import CodeType
from typing import Any

from django.core.checks import Tags, Warning, register

from ..consuming.registration import unwrap
from ..consuming.registry import registered
from ..models.delivery import Semantics

_NAMES = {"checkpoint", "acheckpoint"}


@register(Tags.models)
def check_checkpoints(**_: Any) -> list[Any]:
    """queueapp.W095: a consumer calls ``checkpoint`` where its message is not leased."""
    return [
        Warning(
            f"{one.name} calls checkpoint(), and {queue._meta.label} is {queue.delivery.semantics.name}: it will raise.",
            hint="Make the queue AT_LEAST_ONCE.",
            obj=queue,
            id="queueapp.W095",
        )
        for queue in registered.queues()
        if queue.delivery.semantics is not Semantics.AT_LEAST_ONCE
        for one in registered.of(queue)
        if one.wants_context and any(_calls(layer) for layer in unwrap(one.handler))
    ]


def _calls(function: Any) -> bool:
    """Whether the code of a function, or of one within it, has such a name; what it calls elsewhere is not looked at."""
    pending = [getattr(function, "__code__", None)]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            if _NAMES.intersection(code.co_names):
                return True
            pending += code.co_consts
    return False
