"""What is wrong with the topics and expressions of queues. Connects to no database."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register

from .. import registry
from ..errors import InvalidOption
from ..messages import codec_of
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
            "published to it "
            f"goes to the target of {queues[0]._meta.label}.",
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
                "held until it "
                "is evaluated.",
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
