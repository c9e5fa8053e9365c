"""What is done to a message before it is stored: it gets the correlation headers of the message being handled, the
expressions of its queue are evaluated, once for each message that is sent, published or inserted by other programs, and
its body is encoded."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .. import messages
from ..conf import settings
from ..consuming.context import Context, context_of
from ..errors import FilteredOut, InvalidMessage, InvalidOption, UndecodableMessage, shortened
from ..messages import ENCRYPT_FOR
from ..messages.body_filters import is_secret, opened, sealing
from ..models.delivery.topics import EXPRESSIONS, expressions_of, publish_target
from ..sql.message_columns import Outgoing, Run

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


# -- correlation and causation headers of messages that a handler sends
# -------------------------------------------------
#
# The model and, in its wire format, the names are those of NServiceBus: the *correlation id* is passed from message to
# message and begins as the id of the first; *related to* is the id of the message being handled; a *conversation id* is
# passed on if the message has one.


def with_correlation(
    headers: Mapping[str, str] | None, correlation_id: str | None, caller: Any
) -> Mapping[str, str] | None:
    """The headers with correlation headers of the handled message; a header that the sender has set is kept."""
    context = context_of(caller)
    if not settings.CORRELATE or not isinstance(context, Context):  # the message of a batch is unknown
        return headers
    given = headers or {}
    try:
        addresses = {
            messages.CORRELATION_ID: correlation_id or context.correlation_id or str(context.message_id),
            messages.RELATED_TO: str(context.message_id),
            messages.CONVERSATION_ID: context.conversation_id,
        }
        added = {name: value for name, value in addresses.items() if value and messages.well_known(given, name) is None}
    except (AttributeError, TypeError):
        return headers  # not a dict: encoding raises the error
    return added | dict(given)


# -- encoding: compression and encryption, as the last step before messages are stored
# -----------------------------------


def encode_body(queue: Any, message: Outgoing, using: str) -> Outgoing:
    """The message as the queue stores it in this database."""
    headers, seal = sealing(queue.delivery.encoding, message.headers, using)
    if headers is message.headers:
        _refuse_unreadable(headers, [(message.id, message.body)], using)
    return message._replace(headers=headers, body=seal(message.body, message.id))


def encode_runs(queue: Any, runs: Iterable[Run], using: str) -> Iterator[Run]:
    """The runs as the queue stores them: the headers are read once, and one key is used, for each run."""
    for run in chain.from_iterable(mixed.alike() for mixed in runs):
        headers, seal = sealing(queue.delivery.encoding, run.like.headers, using)
        if headers is run.like.headers:
            _refuse_unreadable(headers, zip(map(_uuid, run.ids), run.bodies, strict=True), using)
        bodies = [seal(body, uuid.UUID(bytes=identity)) for identity, body in zip(run.ids, run.bodies, strict=True)]
        yield Run(run.like._replace(headers=headers), run.ids, bodies)


def _uuid(identity: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=identity)


def _refuse_unreadable(headers: str, bodies: Iterable[tuple[uuid.UUID, bytes | None]], using: str) -> None:
    """Raise InvalidMessage for bytes that are said to be encrypted and are not, for their message: they would be stored
    in the clear, and no reader could open them."""
    content_type = messages.read_head(headers)[1]
    if not is_secret(content_type):
        return
    decoded = messages.decode_headers(headers)
    try:
        for identity, body in bodies:
            opened(body, content_type, decoded, identity, using)
    except UndecodableMessage as error:
        raise InvalidMessage(
            f"Header {messages.CONTENT_TYPE!r} = {shortened(content_type)} is not accepted: {error}"
        ) from error


def refuse_encryption_subject(queue: Any, headers: Mapping[str, str] | None) -> None:
    """Raise InvalidMessage for a message with an encryption subject on a queue that does not encrypt."""
    if headers and isinstance(headers, Mapping) and ENCRYPT_FOR in headers and not queue.delivery.encrypts:
        raise InvalidMessage(
            f"Header {ENCRYPT_FOR!r} is not accepted by {queue._meta.label}: nothing is encrypted there "
            "(Delivery.encoding)."
        )
