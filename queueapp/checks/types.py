"""What classes of messages say of their versions, as far as consumers of this process take them. Connects to no database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register

from .. import registry
from ..consuming.registry import registered
from ..errors import InvalidOption
from ..messages import missing_steps, type_name
from ..models.delivery.topics import expressions_of
from ..topics.backfill import is_over_journal


@register(Tags.models)
def check_encoding(**_: Any) -> list[Any]:
    """E080 to E083: what cannot be had of a queue whose bodies are compressed or encrypted."""
    found: list[Any] = []
    for queue in registry.queues:
        if queue.delivery.encoding:
            found += [checks.Error(text, hint=hint, obj=queue, id=key) for text, hint, key in _problems(queue)]
    return found


def _problems(queue: Any) -> Iterator[tuple[str, str, str]]:
    label, delivery = queue._meta.label, queue.delivery
    for name, extra in (("zstd", "zstd"), ("encrypted", "encryption")):
        if name in delivery.encoding and not any(find_spec(one) for one in _NEEDED[name]):
            text = f"{label}.Delivery.encoding names {name!r}, and the extra for it is not installed."
            yield text, f"pip install 'queueapp[{extra}]'", "queueapp.E080"
    if queue.wire_format:
        text = f"{label}.Delivery.encoding = {delivery.encoding!r}, and endpoints of NServiceBus read its table."
        yield text, "They would not know what to make of it: leave it out.", "queueapp.E083"
    if not delivery.encrypts:
        return
    if delivery.has_expressions:
        names = ", ".join(expressions_of(delivery))
        text = f"{label} encrypts its bodies, and its {names} would have to read them."
        yield text, "What others insert there cannot be read without a key: leave one of them out.", "queueapp.E081"
    with suppress(InvalidOption):  # another check says it
        if is_over_journal(queue):
            text = f"{label} encrypts its bodies, and collects a topic that is journaled, where they would be kept in the clear."
            yield text, "Take the topic out of QUEUEAPP['JOURNAL'], or the encryption away.", "queueapp.E082"


#: What a wrapping needs, one of them.
_NEEDED = {"zstd": ("zstandard", "compression"), "encrypted": ("cryptography",)}


@register(Tags.models)
def check_versions(**_: Any) -> list[Any]:
    """W080: a version of a consumed type from which no upcast leads to the next."""
    classes = {one.message_type: None for queue in registry.queues for one in registered.of(queue) if one.type_name}
    found = []
    for cls in classes:
        if missing := missing_steps(cls):
            some = ", ".join(map(str, missing[:10]))
            found.append(
                Warning(
                    f"{type_name(cls)} has no upcast from version {some}: such a message becomes poison as undecodable.",
                    hint=f"Write @upcast({cls.__qualname__}, {missing[0]}), or silence this where none is left.",
                    id="queueapp.W080",
                )
            )
    return found
