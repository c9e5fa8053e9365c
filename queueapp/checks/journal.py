"""What is wrong with the journal and with queues over journaled topics, as they are declared. Connects to no
database."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import router

from .. import registry
from ..conf import settings
from ..errors import InvalidOption
from ..journal.append import is_fed, is_journaled
from ..models import JournalEntry
from ..models.delivery.topics import is_pattern, publish_target, topic_pattern, underlying_topic
from ..topics.backfill import is_over_journal
from ..topics.routing import known_topics


@register(Tags.models)
def check_journal(**_: Any) -> list[Any]:
    """E060: target_queue_depth without a journaled topic. E061: with priority or barrier. E062: a queue over a
    journaled topic in a database without queueapp's tables. E063: target_queue_depth of a table that is not ours. W060:
    recovery_point of a queue over no journaled topic. W061: target_queue_depth beside file_backed_metadata."""
    found: list[Any] = []
    try:
        _ = settings.JOURNAL
    except InvalidOption:
        return []  # E001 says it
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
                "where the "
                "router allows no tables of queueapp: publishing to it fails."
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
        "in the "
        "journal.",
        hint="Leave one of them out.",
        obj=queue,
        id="queueapp.E061",
    )
