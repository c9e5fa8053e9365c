"""What is wrong with consumers: the types that they take, the copies that they get, and what runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from types import CodeType
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import Error, connections, router

from .. import registry
from ..conf import settings
from ..consuming.registry import registered, unwrap
from ..delayed import stores_of
from ..errors import InvalidOption, UnsupportedServer
from ..messages import missing_steps, type_name
from ..messages.escaping import in_one_line
from ..models import MessageKey, Subscription
from ..models.delivery import Semantics
from ..models.delivery.topics import expressions_of
from ..operations import migrating
from ..operations.statistics import Database
from ..sql import backend_of
from ..topics.backfill import is_over_journal

#: The label of the app with the worker commands, in a checkout and in an installed project.
WORKERS_APP = "queueapp_workers"


@register(Tags.models)
def check_subscriptions(**_: Any) -> list[Any]:
    """E100: nowhere to keep who subscribes. W101: what is copied on receipt comes behind the barriers that wait by
    then."""
    found: list[Any] = []
    for queue in registry.queues:
        delivery, label, alias = queue.delivery, queue._meta.label, router.db_for_write(queue)
        if not delivery.recipients:
            continue
        if not router.allow_migrate_model(alias, Subscription):
            found.append(
                checks.Error(
                    f"{label}.Delivery: recipients needs the table of subscriptions in {alias!r}, where the router "
                    "allows no tables of queueapp.",
                    hint="Let the router put them there.",
                    obj=queue,
                    id="queueapp.E100",
                )
            )
        if delivery.has_barriers:
            found.append(
                Warning(
                    f"{label}.Delivery: a message that names no recipient (a foreign producer's, a delayed one) is "
                    "copied for its consumers when it is received, and the copies come behind the barriers that wait "
                    "by then.",
                    hint="Have such messages name their recipient, or leave recipients or barriers away.",
                    obj=queue,
                    id="queueapp.W101",
                )
            )
    return found


@register(Tags.models)
def check_workers_installed(**_: Any) -> list[Any]:
    """W013: there are consumers, and no command that runs them."""
    installed = any(config.label == WORKERS_APP for config in apps.get_app_configs())
    if installed or not (received := sorted(queue._meta.label for queue in registered.queues())):
        return []
    text = f"{', '.join(received[:5])}{', …' if len(received) > 5 else ''}: consumers are declared"
    return [
        Warning(
            f"{text}, and 'queueapp.workers' is not in INSTALLED_APPS: there is no command runqueueworker.",
            hint="Add it, or silence this check in a process that only sends.",
            id="queueapp.W013",
        )
    ]


@register(Tags.models)
def check_types(**_: Any) -> list[Any]:
    """W014: a consumer takes a type that cannot be sent to its queue."""
    return [
        Warning(
            f"{registration.name} takes {registration.type_name or 'messages without a type'}, which "
            f"{queue._meta.label} does not accept: it gets no message.",
            hint="Add the type to the queue's Delivery.types, or remove the consumer.",
            obj=queue,
            id="queueapp.W014",
        )
        for queue in registered.queues()
        if (accepted := queue.delivery.accepted_types) is not None
        for registration in registered.of(queue)
        if registration.finder is None
        and accepted.isdisjoint(registration.type_names)
        and not any(registration.knows(name) for name in accepted)
    ]


@register(Tags.database)
def check_served(databases: Any = None, **_: Any) -> list[Any]:
    """W100: copies are made for a consumer that no live worker has."""
    found: list[Any] = []
    if migrating.migrate_options() is not None or not settings.are_accepted():  # E001 reports them
        return found
    by_alias: dict[str, list[Any]] = {}
    for queue in registry.queues:
        if queue.delivery.recipients:
            by_alias.setdefault(router.db_for_write(queue), []).append(queue)
    for alias, queues in by_alias.items():
        if alias not in (databases or ()) or not _can_be_read(alias):
            continue
        database = Database(alias)
        heads = database.heads_of(queues)
        for queue, stats in zip(queues, database.consumers_of(queues), strict=True):
            if database.live is not None and (queue not in heads or heads[queue].waiting):
                stats.unroutable = database.unroutable_of(queue, database.live[stats.queue])[0] or []
            lost = [found.name for found in stats.unroutable if found.what == "recipient"]
            for name in [*lost, *(lone.consumer for lone in stats.consumers_without_worker)]:
                found.append(
                    Warning(
                        f"{stats.queue}: no live worker has the consumer '{in_one_line(name, 200)}', and copies are "
                        "made for it.",
                        hint="Start a worker that has it (check --consumer and the deployed version). If it is gone: "
                        "manage.py "
                        f"removeconsumer {stats.queue} '{in_one_line(name, 200)}' --purge, or --move-to another.",
                        obj=queue,
                        id="queueapp.W100",
                    )
                )
    return found


def _can_be_read(alias: str) -> bool:
    """Whether the tables of queueapp are there; what else is wrong is said by ``check_tables``."""
    try:
        backend_of(connections[alias])
        return Subscription._meta.db_table in connections[alias].introspection.table_names()
    except (UnsupportedServer, Error):
        return False


@register(Tags.models)
def check_dedupe(**_: Any) -> list[Any]:
    """E084 to E087, W081: see docs/checks.md."""
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
        text = (
            f"{label} has dedupe_key and target_queue_depth: what waits may lie in the journal, where no key is "
            f"looked for."
        )
        yield checks.Error(text, hint="Leave one of them out.", obj=queue, id="queueapp.E085")
    if not queue._meta.managed or not router.allow_migrate_model(router.db_for_write(queue), MessageKey):
        text = f"{label} has dedupe_key, and its table is foreign, or where the router allows no tables of queueapp."
        hint = "A message is found by its id there, and the keys are in the queue's database."
        yield checks.Error(text, hint=hint, obj=queue, id="queueapp.E086")
    if stores := stores_of(queue):
        text = f"{label} has dedupe_key and delayed_in: what waits in {', '.join(stores)} is not known where it lies."
        yield checks.Error(text, hint="Leave one of them out.", obj=queue, id="queueapp.E087")


_NAMES = {"checkpoint", "acheckpoint"}


@register(Tags.models)
def check_checkpoints(**_: Any) -> list[Any]:
    """queueapp.W095: a consumer calls ``checkpoint`` where its message is not leased."""
    return [
        Warning(
            f"{registration.name} calls checkpoint(), and {queue._meta.label} is {queue.delivery.semantics.name}: "
            "it will raise.",
            hint="Make the queue AT_LEAST_ONCE.",
            obj=queue,
            id="queueapp.W095",
        )
        for queue in registered.queues()
        if queue.delivery.semantics is not Semantics.AT_LEAST_ONCE
        for registration in registered.of(queue)
        if registration.wants_context and any(_calls(layer) for layer in unwrap(registration.handler))
    ]


def _calls(function: Any) -> bool:
    """Whether the code of a function, or of one within it, has such a name; what it calls elsewhere is not looked
    at."""
    pending = [getattr(function, "__code__", None)]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            if _NAMES.intersection(code.co_names):
                return True
            pending += code.co_consts
    return False


@register(Tags.models)
def check_batches(**_: Any) -> list[Any]:
    """E090: a ``transaction_size`` where the handler's transaction receives nothing. E091: a consumer of several
    messages on a table that counts no deliveries. E092: a consumer with a limit where messages are shared out. W090,
    W091: a size that a limit keeps from being reached."""
    found: list[Any] = []
    for queue in registry.queues:
        found += [checks.Error(text, hint=hint, obj=queue, id=key) for key, text, hint in _errors(queue)]
        found += [Warning(text, hint=hint, obj=queue, id=key) for key, text, hint in _warnings(queue)]
    return found


def _errors(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    if delivery.transaction_size > 1 and delivery.semantics is not Semantics.TRANSACTIONAL:
        text = (
            f"{label}.Delivery.transaction_size is {delivery.transaction_size}, but its messages "
            f"({delivery.semantics.value}) are not received in the transaction of their handlers."
        )
        yield "queueapp.E090", text, "Leave it out, or let the queue be transactional."
    columns = {field.name for field in queue._meta.local_concrete_fields}
    for consumer in registered.of(queue):
        if consumer.options["batch"] and not {"deliveries", "failures"} <= columns:
            text = (
                f"{consumer.name} takes several messages at once, and the table of {label} has no columns for their "
                "counts."
            )
            yield "queueapp.E091", text, "Leave `batch` out: after a crash it is unknown which message was the cause."
        if consumer.options["concurrency"] is not None and delivery.dispatches:
            text = (
                f"{consumer.name} has a limit (concurrency), and {label}.Delivery.fairness_model shares messages out "
                "to workers whatever their consumers can take."
            )
            yield "queueapp.E092", text, "Leave one of the two out."


def _warnings(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    for name in ("max_backlog", "max_per_subscription_backlog"):
        limit = getattr(delivery, name)
        if limit is not None and delivery.transaction_size > limit > 0:
            text = f"{label}.Delivery.transaction_size ({delivery.transaction_size}) is more than its {name} ({limit})."
            yield "queueapp.W090", text, "No transaction will ever have so many: lower the one or raise the other."
        for consumer in registered.of(queue):
            batch = consumer.options["batch"] or 0
            if limit is not None and batch > limit > 0:
                text = f"The batch of {consumer.name} ({batch}) is more than {label}.Delivery.{name} ({limit})."
                yield "queueapp.W091", text, "No call will ever have so many: lower the one or raise the other."


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
        if name in delivery.encoding and not any(find_spec(module) for module in _NEEDED[name]):
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
            text = (
                f"{label} encrypts its bodies, and collects a topic that is journaled, where they would be kept in "
                f"the clear."
            )
            yield text, "Take the topic out of QUEUEAPP['JOURNAL'], or the encryption away.", "queueapp.E082"


#: What a wrapping needs, one of them.
_NEEDED = {"zstd": ("zstandard", "compression"), "encrypted": ("cryptography",)}


@register(Tags.models)
def check_versions(**_: Any) -> list[Any]:
    """W080: a version of a consumed type from which no upcast leads to the next."""
    classes = {
        registration.message_type: None
        for queue in registry.queues
        for registration in registered.of(queue)
        if registration.type_name
    }
    found = []
    for cls in classes:
        if missing := missing_steps(cls):
            names = ", ".join(map(str, missing[:10]))
            found.append(
                Warning(
                    f"{type_name(cls)} has no upcast from version {names}: such a message becomes poison as "
                    "undecodable.",
                    hint=f"Write @upcast({cls.__qualname__}, {missing[0]}), or silence this where none is left.",
                    id="queueapp.W080",
                )
            )
    return found
