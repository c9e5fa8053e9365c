"""Evaluates the expressions of a queue, once for each message that is sent, published or inserted by other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import FilteredOut, InvalidMessage, InvalidOption, UndecodableMessage
from ..models.delivery.topics import EXPRESSIONS, expressions_of, publish_target
from ..sql.message_columns import Outgoing

if TYPE_CHECKING:
    from ..expressions.enqueue_rules import EnqueueRules

#: By the options of the queue: tests replace them.
_entering: WeakKeyDictionary[Any, EnqueueRules] = WeakKeyDictionary()


def rules_of(queue: Any) -> EnqueueRules:
    """The compiled expressions of a queue; compiles them at first use. Raises InvalidOption for an invalid expression,
    and without the extra ``queueapp[expressions]``."""
    delivery = queue.delivery
    found = _entering.get(delivery)
    if found is None:
        where, texts = f"{queue._meta.label}.Delivery.", expressions_of(delivery)
        try:
            from ..expressions.enqueue_rules import EnqueueRules
        except ImportError as error:
            name, text = next(iter(texts.items()))
            raise InvalidOption(f"{where}{name}", text, NEEDS_EXTRA) from error
        kind = delivery.message_type
        found = _entering[delivery] = EnqueueRules(where, message_type=kind, target=publish_target(queue), **texts)
    return found


NEEDS_EXTRA = "absent where the extra is not installed: pip install 'queueapp[expressions]'"


def apply_rules(queue: Any, message: Outgoing) -> Outgoing:
    """The message with the results of the queue's expressions. Raises FilteredOut when the filter does not match, and
    InvalidMessage when the body is not of its type."""
    try:
        found = rules_of(queue).evaluate(message.headers, message.body)
    except UndecodableMessage as error:
        raise InvalidMessage(
            f"The message cannot enter {queue._meta.label}, whose {_named(queue)} reads it. {error}"
        ) from error
    if not found.matches:
        raise FilteredOut(queue._meta.label, queue.delivery.filter)
    changed: dict[str, Any] = {}
    if found.priority is not None:
        changed["priority"] = found.priority
    if found.is_barrier:
        changed["is_barrier"] = True  # the sender may set it as well
    return message._replace(**changed) if changed else message


def _named(queue: Any) -> str:
    return ", ".join(name for name in EXPRESSIONS if name in expressions_of(queue.delivery))
