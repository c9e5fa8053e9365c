"""What is wrong with the topics and expressions of queues, and with the journal. Connects to no database."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import router

from .. import registry
from ..conf import settings
from ..errors import InvalidOption
from ..journal.append import is_fed, is_journaled
from ..messages import codec_of
from ..models import JournalEntry
from ..models.delivery.topics import (
    expressions_of,
    is_pattern,
    publish_target,
    topic_name,
    topic_pattern,
    underlying_topic,
)
from ..models.queue import holds
from ..sending.preparation import rules_of
from ..topics.backfill import is_over_journal
from ..topics.publisher import known_topics


@register(Tags.models)
def check_topics(**_: Any) -> list[Any]:
    """E020: a regular expression without a target. E021: the target is none of the queue's topics. E022: no regular
    expression. E023: queues of one topic have several message types. W020: a name means several queues."""
    found: list[Any] = []
    by_target: dict[str, list[Any]] = defaultdict(list)
    for queue in registry.queues:
        problem = _problem_of_topic(queue)
        if problem is not None:
            found.append(problem)
            continue
        by_target[publish_target(queue)].append(queue)
    found += _check_names()
    for topic in sorted(by_target):
        collecting = [queue for queue in registry.queues if _collects(queue, topic)]
        kinds = {queue.delivery.message_type for queue in collecting}
        if len(kinds) > 1:
            listed = ", ".join(f"{queue._meta.label} ({queue.delivery.message_type})" for queue in collecting)
            found.append(
                checks.Error(
                    f"The topic {topic!r} is collected by queues of several message types: {listed}.",
                    hint="Give them one message_type, or another underlying_topic.",
                    obj=collecting[-1],
                    id="queueapp.E023",
                )
            )
    return found


def _problem_of_topic(queue: Any) -> Any:
    where, text = f"{queue._meta.label}.Delivery", underlying_topic(queue)
    try:
        pattern = topic_pattern(queue)
    except InvalidOption as error:
        return checks.Error(str(error), obj=queue, id="queueapp.E022")
    target = queue.delivery.default_publish_target
    if target is None:
        if pattern is None:
            return None
        return checks.Error(
            f"{where}.underlying_topic = {text!r} is a regular expression, and there is no default_publish_target.",
            hint="Name the one of its topics that gets what is published to the queue's name.",
            obj=queue,
            id="queueapp.E020",
        )
    if target == text if pattern is None else pattern.search(target):
        return None
    return checks.Error(
        f"{where}.default_publish_target = {target!r} is none of the queue's topics: its underlying_topic is {text!r}.",
        obj=queue,
        id="queueapp.E021",
    )


def _collects(queue: Any, topic: str) -> bool:
    try:
        pattern = topic_pattern(queue)
    except InvalidOption:
        return False
    return bool(underlying_topic(queue) == topic if pattern is None else pattern.search(topic))


def _check_names() -> list[Any]:
    by_name: dict[str, list[Any]] = defaultdict(list)
    for queue in registry.queues:
        by_name[topic_name(queue)].append(queue)
    return [
        Warning(
            f"Several queues have the name {name!r}: {', '.join(queue._meta.label for queue in queues)}. What is "
            f"published to it goes to the target of {queues[0]._meta.label}.",
            hint="Give each a name of its own: Delivery.name.",
            obj=queues[1],
            id="queueapp.W020",
        )
        for name, queues in sorted(by_name.items())
        if len(queues) > 1
    ]


@register(Tags.models)
def check_entering(**_: Any) -> list[Any]:
    """E024: a message type without a codec. E025: an expression is none, or its extra is missing. E026: expressions on
    a table that cannot hold what others insert."""
    found: list[Any] = []
    for queue in registry.queues:
        where = f"{queue._meta.label}.Delivery."
        try:
            codec_of(queue.delivery.message_type, f"{where}message_type")
        except InvalidOption as error:
            hint = "Call register_codec before, in AppConfig.ready or beside the queues."
            found.append(checks.Error(str(error), hint=hint, obj=queue, id="queueapp.E024"))
            continue
        if queue.delivery.has_expressions:
            found += _check_expressions(queue)
    return found


def _check_expressions(queue: Any) -> list[Any]:
    found: list[Any] = []
    names = ", ".join(expressions_of(queue.delivery))
    if not holds(queue):
        found.append(
            checks.Error(
                f"{queue._meta.label} has {names}, and its table has no lease columns: what others insert could not be "
                "held until it is evaluated.",
                hint="Filter where it is received, or use a table of our own.",
                obj=queue,
                id="queueapp.E026",
            )
        )
    try:
        if not is_pattern(underlying_topic(queue)) or queue.delivery.default_publish_target:
            rules_of(queue)
    except InvalidOption as error:
        found.append(checks.Error(str(error), obj=queue, id="queueapp.E025"))
    return found


# -- the journal, and queues over journaled topics ---------------------------------------------------------------------


@register(Tags.models)
def check_journal(**_: Any) -> list[Any]:
    """E060: target_queue_depth without a journaled topic. E061: with priority or barrier. E062: a queue over a
    journaled topic in a database without queueapp's tables. E063: target_queue_depth of a table that is not ours. W060:
    recovery_point of a queue over no journaled topic. W061: target_queue_depth beside file_backed_metadata."""
    found: list[Any] = []
    if not settings.are_accepted():
        return []  # which is E001
    for queue in registry.queues:
        try:
            found += _check_queue(queue)
        except InvalidOption:
            continue  # the checks of topics say what is wrong with its topic
    return found


def _check_queue(queue: Any) -> list[Any]:
    found: list[Any] = []
    delivery, where = queue.delivery, f"{queue._meta.label}.Delivery"
    if is_fed(queue):
        for topic in _topics_of(queue):
            if not is_journaled(topic):
                text = (
                    f"{where}.target_queue_depth = {delivery.target_queue_depth} needs a journaled topic, and "
                    f"{topic!r} is none."
                )
                hint = "Add it to QUEUEAPP['JOURNAL'], or leave target_queue_depth out."
                found.append(checks.Error(text, hint=hint, obj=queue, id="queueapp.E060"))
        if delivery.priority:
            found.append(_excluded(queue, "priority"))
        if delivery.has_barriers:
            found.append(_excluded(queue, "barrier_expression" if delivery.barrier_expression else "barriers"))
        if delivery.priorities > 1:
            found.append(_excluded(queue, "priorities"))
        if not queue._meta.managed:
            text = (
                f"{where}.target_queue_depth: its table is foreign (managed = False), so others may insert into it "
                f"at any time."
            )
            found.append(checks.Error(text, obj=queue, id="queueapp.E063"))
        if delivery.file_backed_metadata is not None:
            text = f"{where} has target_queue_depth and file_backed_metadata: with either the other is not needed."
            found.append(Warning(text, obj=queue, id="queueapp.W061"))
    if is_over_journal(queue):
        alias = router.db_for_write(queue)
        if not is_pattern(underlying_topic(queue)) and not router.allow_migrate_model(alias, JournalEntry):
            text = (
                f"{queue._meta.label} collects the journaled topic {underlying_topic(queue)!r}, and lies in {alias!r}, "
                "where the router allows no tables of queueapp: publishing to it fails."
            )
            hint = "Let the router put them there: the journal is written in the transaction of the queue's database."
            found.append(checks.Error(text, hint=hint, obj=queue, id="queueapp.E062"))
    elif "recovery_point" in delivery.given:
        text = f"{where}.recovery_point says nothing: {underlying_topic(queue)!r} is not journaled."
        hint = "Add the topic to QUEUEAPP['JOURNAL'], or leave recovery_point out."
        found.append(Warning(text, hint=hint, obj=queue, id="queueapp.W060"))
    return found


def _topics_of(queue: Any) -> list[str]:
    """The topics of a queue, as far as they are declared: of a regular expression those that it finds."""
    pattern = topic_pattern(queue)
    if pattern is None:
        return [underlying_topic(queue)]
    return sorted({publish_target(queue), *filter(pattern.search, known_topics())})


def _excluded(queue: Any, name: str) -> Any:
    return checks.Error(
        f"{queue._meta.label}.Delivery.{name} and target_queue_depth exclude each other: what is received next may lie "
        "in the journal.",
        hint="Leave one of them out.",
        obj=queue,
        id="queueapp.E061",
    )
