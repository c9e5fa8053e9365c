"""What contradicts itself in the limits and the fairness of a queue. Connects to no database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import connections, router

from .. import registry
from ..conf import settings
from ..consuming.registry import registered
from ..errors import InvalidOption
from ..flow import limited_claims
from ..models import BarrierDelivery, ClaimRecord, KeyTokenBucket
from ..models.delivery import FairnessModel, Semantics
from ..operations import ledger, requeue_after_deploy

#: The columns without which a queue counts nothing.
_LEASES = ("lease_token", "lease_owner", "lease_expires", "deliveries")


@register(Tags.models)
def check_flow(**_: Any) -> list[Any]:
    """queueapp.E040 to E049, E051, E059, W040, W041: see the texts."""
    found: list[Any] = []
    for queue in registry.queues:
        found += [checks.Error(text, hint=hint, obj=queue, id=key) for key, text, hint in _errors(queue)]
        found += [Warning(text, hint=hint, obj=queue, id=key) for key, text, hint in _warnings(queue)]
    return found


def _errors(queue: Any) -> list[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    model: FairnessModel = delivery.fairness_model
    found = []
    if delivery.semantics is Semantics.AT_MOST_ONCE and (
        "fairness_model" in delivery.given and model is not FairnessModel.ROUND_ROBIN
    ):
        text = f"{label}.Delivery.fairness_model is {model.value!r}, and AT_MOST_ONCE has no other than 'round-robin'."
        found.append(("queueapp.E040", text, "Name that, or none."))
    if delivery.semantics is Semantics.TRANSACTIONAL and model is not FairnessModel.FAST:
        text = (
            f"{label}.Delivery.fairness_model is {model.value!r}, and messages of a TRANSACTIONAL queue are taken in "
            "the handler's own transaction: they cannot be assigned to subscribers."
        )
        found.append(("queueapp.E041", text, "Take AT_LEAST_ONCE, or FairnessModel.FAST."))
    lacking = [name for name in _LEASES if name not in {field.name for field in queue._meta.local_concrete_fields}]
    if delivery.counts_leases and lacking:
        text = f"{label} has a limit or a fairness model, and its table has no {', '.join(lacking)} to count by."
        found.append(
            (
                "queueapp.E042",
                text,
                "Make it TRANSACTIONAL, whose max_backlog counts transactions, or leave the options out.",
            )
        )
    alias = router.db_for_write(queue)
    for counted, table, is_used in (
        ("max_backlog is counted by records", ClaimRecord, limited_claims.keeps_records(queue)),
        ("rate_per_key is counted by token buckets", KeyTokenBucket, delivery.rate_per_key is not None),
    ):
        if is_used and not router.allow_migrate_model(alias, table):
            text = f"{label}.Delivery.{counted} in {alias!r}, where the router allows no tables of queueapp."
            found.append(("queueapp.E044", text, "Let the router put them there."))
    if delivery.groups and (refused := _not_with_groups(queue)):
        text = f"{label}.Delivery.groups: {refused}, so the group would not detect the end of a member."
        found.append(("queueapp.E045", text, "Give the members a queue of their own."))
    if delivery.workflow and (refused := _not_with_workflow(queue)):
        text = f"{label}.Delivery.workflow: {refused}, so a follow-up would not be sent."
        found.append(("queueapp.E049", text, "Give the messages with follow-ups a queue of their own."))
    if delivery.ordering is not None and (refused := _not_with_keys(queue, lacking)):
        text = f"{label}.Delivery.ordering: {refused}."
        found.append(("queueapp.E046", text, "Give the messages with ordering keys a queue of their own."))
    if delivery.fair_by is not None and (refused := _not_fair(queue, lacking)):
        text = f"{label}.Delivery.fair_by: {refused}."
        found.append(("queueapp.E047", text, "Give the messages whose keys take turns a queue of their own."))
    if delivery.max_concurrent_per_key is not None and (refused := _not_counted_by_key(queue)):
        text = f"{label}.Delivery.max_concurrent_per_key: {refused}."
        found.append(("queueapp.E048", text, "Set fair_by as well; on SQL Server use AT_LEAST_ONCE."))
    if delivery.requeue_after_deploy is not None and (refused := requeue_after_deploy.refused(queue)):
        text = f"{label}.Delivery.requeue_after_deploy: {refused}."
        found.append(("queueapp.E059", text, "Leave the option out, and requeue the queue's poison by hand."))
    if delivery.ledger and (refused := ledger.refused(queue)):
        text = f"{label}.Delivery.ledger: {refused}, so the ledger would not close."
        found.append(("queueapp.E051", text, "Leave the option out."))
    per_subscription, whole = delivery.max_per_subscription_backlog, delivery.max_backlog
    if per_subscription is not None and whole is not None and per_subscription > whole:
        text = (
            f"{label}.Delivery.max_per_subscription_backlog is {per_subscription}, more than the whole queue's "
            f"max_backlog, {whole}."
        )
        found.append(("queueapp.E043", text, "Lower the one or raise the other."))
    return found


def _not_with_groups(queue: Any) -> str:
    """What keeps messages of this queue from being members of groups; '' if nothing does."""
    delivery = queue.delivery
    if delivery.semantics is Semantics.AT_MOST_ONCE:
        return "an AT_MOST_ONCE message may be lost with its process"
    if queue.wire_format or not queue._meta.managed:
        return "its table is one of another system"
    if delivery.recipients or delivery.has_barriers:
        return f"copies replace a message of a queue with {'recipients' if delivery.recipients else 'barriers'}"
    if delivery.dedupe_key is not None:
        return "a message with a dedupe key may be replaced or not stored"
    if registered.resolver_of(queue) is not None:
        return "tasks and sets are acked in another way"
    level = connections[router.db_for_write(queue)].settings_dict.get("OPTIONS", {}).get("isolation_level")
    if level is not None and str(getattr(level, "name", level)).upper().replace("_", " ") != "READ COMMITTED":
        return "OPTIONS['isolation_level'] of its database is not READ COMMITTED"
    return ""


def _not_with_workflow(queue: Any) -> str:
    """What keeps messages of this queue from having follow-ups; '' if nothing does."""
    delivery = queue.delivery
    if delivery.semantics is Semantics.AT_MOST_ONCE:
        return "the ack of an AT_MOST_ONCE message comes before its handler"
    if queue.wire_format or not queue._meta.managed:
        return "its table is one of another system"
    if delivery.has_barriers:
        return "a barrier leaves the table before it is handled"
    if delivery.deferred_ack_expiration is not None:
        return "an ack may come before its message (deferred_ack_expiration)"
    if registered.resolver_of(queue) is not None:
        return "tasks and sets are acked in another way"
    return ""


def _not_with_keys(queue: Any, lacking: list[str]) -> str:
    """What keeps messages of this queue from being claimed by their keys; '' if nothing does."""
    delivery = queue.delivery
    if delivery.semantics is Semantics.AT_MOST_ONCE:
        return "an AT_MOST_ONCE message has left the table before it is handled"
    if queue.wire_format or lacking or not queue._meta.managed:
        return "its table is one of another system"
    if delivery.recipients or delivery.has_barriers or delivery.priorities > 1 or delivery.priority:
        return "recipients, barriers and priorities have an order of their own"
    if delivery.max_backlog is not None or delivery.dispatches:
        return "max_backlog and a fairness_model claim in another way"
    if delivery.transaction_size > 1 or any(registration.takes_several for registration in registered.of(queue)):
        return "messages of a batch fail together"
    if registered.resolver_of(queue) is not None:
        return "tasks and sets are claimed in another way"
    return ""


def _not_fair(queue: Any, lacking: list[str]) -> str:
    """What keeps the keys of this queue from taking turns; '' if nothing does."""
    if queue.delivery.ordering is not None:
        return "ordering has keys of its own"
    return _not_with_keys(queue, lacking)


def _not_counted_by_key(queue: Any) -> str:
    """Why the messages of one key cannot be counted; '' if they can."""
    if queue.delivery.fair_by is None:
        return "fair_by does not say which header is the key"
    vendor = connections[router.db_for_write(queue)].vendor
    if queue.delivery.semantics is Semantics.TRANSACTIONAL and vendor == "microsoft":
        return "SQL Server does not show the messages that open transactions have deleted, so they are not counted"
    return ""


def _warnings(queue: Any) -> list[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    found = []
    per_subscription, whole = delivery.max_per_subscription_backlog, delivery.max_backlog
    try:
        tasks = delivery.concurrency or settings.CONCURRENCY
    except InvalidOption:
        return []  # E001 says it
    if per_subscription is not None and per_subscription < tasks and delivery.concurrency is not None:
        text = (
            f"{label}: each process has {tasks} receivers, and max_per_subscription_backlog lets it hold "
            f"{per_subscription} messages."
        )
        found.append(("queueapp.W040", text, "At least twice as many as receivers keep them busy."))
    if whole is not None and delivery.concurrency is not None and whole < delivery.concurrency:
        text = (
            f"{label}: each process has {tasks} tasks, and max_backlog lets all processes together hold {whole} "
            f"messages."
        )
        found.append(("queueapp.W041", text, "Lower the concurrency, or raise the limit."))
    return found


@register(Tags.models)
def check_order(**_: Any) -> list[Any]:
    """E050: a priority and barriers. E052: levels and a priority of 64 bits. E053: recipients and a priority of 64
    bits. E054: a table without the columns. E055: nowhere to keep what a barrier releases."""
    found: list[Any] = []
    for queue in registry.queues:
        for identity, problem, hint in _problems(queue):
            text = f"{queue._meta.label}.Delivery: {problem}."
            found.append(checks.Error(text, hint=hint, obj=queue, id=identity))
    return found


def _problems(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery = queue.delivery
    ranked, levels, barriers = delivery.priority, delivery.priorities > 1, delivery.has_barriers
    if (ranked or levels) and barriers:
        which = "priority" if ranked else "priorities"
        problem = f"{which} and barriers exclude each other: what comes before a barrier is said by its place"
        yield "queueapp.E050", problem, "Give the urgent messages a queue of their own."
    if ranked and levels:
        problem = f"priority = {ranked!r} and priorities = {delivery.priorities} exclude each other"
        yield "queueapp.E052", problem, "An expression gives any number; leave priorities away."
    if ranked and delivery.recipients:
        problem = f"priority = {ranked!r} and recipients exclude each other: no one index holds that order"
        yield "queueapp.E053", problem, "Use priorities, of which there are at most 10, or a queue for each consumer."
    has = {field.name for field in queue._meta.local_concrete_fields}
    for option, needed in (
        ("priority", {"priority"} if ranked else set()),
        ("barriers", {"is_barrier", "lease_token", "lease_owner", "lease_expires"} if barriers else set()),
    ):
        if missing := sorted(needed - has):
            problem = f"{option} needs columns that the table has not: {', '.join(missing)}"
            yield "queueapp.E054", problem, "A foreign table has none of them: leave the option away."
    if barriers and not router.allow_migrate_model(alias := router.db_for_write(queue), BarrierDelivery):
        problem = (
            f"its barriers are kept for their subscribers in {alias!r}, where the router allows no tables of queueapp"
        )
        yield "queueapp.E055", problem, "Let the router put them there."
