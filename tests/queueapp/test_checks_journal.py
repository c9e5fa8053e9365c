"""Checks of the journal and of queues over journaled topics."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import Error, Warning

from queueapp import checks
from queueapp.models.delivery import Delivery
from queueapp.topics import publisher
from tests.testapp.models import Deep, ForeignPostgres, Recovered, Wide


@pytest.fixture
def delivery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def change(queue: Any, **options: Any) -> None:
        monkeypatch.setattr(queue, "delivery", Delivery(queue.delivery.given | options, "a test's "))
        publisher.forget()

    yield change
    monkeypatch.undo()
    publisher.forget()


def found(queue: Any) -> list[Any]:
    return [item for item in checks.check_journal() if item.obj is queue]


def test_queues_over_journaled_topics_are_fine(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": timedelta(days=1)}}

    assert checks.check_journal() == []


def test_target_queue_depth_without_a_journaled_topic_is_an_error(settings: Any) -> None:
    settings.QUEUEAPP = {}

    (error,) = found(Deep)
    assert isinstance(error, Error)
    assert error.id == "queueapp.E060"
    assert error.msg == (
        "testapp.Deep.Delivery.target_queue_depth = 1000 needs a journaled topic, and 'journaled.deep' is none."
    )


def test_target_queue_depth_of_a_regular_expression_needs_all_its_topics(settings: Any, delivery: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"journaled.orders": None, "journaled.deep": None}}
    delivery(Wide, target_queue_depth=5000)

    assert [row.id for row in found(Wide)] == ["queueapp.E060"]
    assert "'journaled.wide' is none" in found(Wide)[0].msg


@pytest.mark.parametrize(
    "options",
    [
        {"priorities": 3},
        {"priority": "/p"},
        {"barriers": True},
        {"barrier_expression": "/b"},
        {"priority": "/p", "barrier_expression": "/b"},
    ],
)
def test_target_queue_depth_excludes_priority_and_barrier(
    settings: Any, delivery: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}}
    known = {option.name for option in __import__("queueapp.models.delivery", fromlist=["OPTIONS"]).OPTIONS}
    delivery(Deep, **{name: value for name, value in options.items() if name in known})
    for name, value in options.items():
        monkeypatch.setattr(Deep.delivery, name, value, raising=False)

    assert [(record.id, name in record.msg) for record, name in zip(found(Deep), options, strict=True)] == [
        ("queueapp.E061", True)
    ] * len(options)


class Nowhere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "queueapp" else None


def test_queue_in_a_database_without_a_journal_is_an_error(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}}
    settings.DATABASE_ROUTERS = [Nowhere()]

    (error,) = found(Recovered)
    assert error.id == "queueapp.E062"
    assert "publishing to it fails" in error.msg


def test_target_queue_depth_of_a_foreign_table_is_an_error(settings: Any, delivery: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"ForeignPostgres": None, "^journaled": None}}
    delivery(ForeignPostgres, target_queue_depth=1000)

    assert [row.id for row in found(ForeignPostgres)] == ["queueapp.E063"]


def test_recovery_point_that_reports_nothing_is_warned_of(settings: Any, delivery: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled.deep": None}}
    delivery(Recovered, recovery_point="now")

    (warning,) = found(Recovered)
    assert isinstance(warning, Warning)
    assert warning.id == "queueapp.W060"


def test_target_queue_depth_beside_file_backed_metadata_is_warned_of(settings: Any, delivery: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}}
    delivery(Deep, file_backed_metadata=True)

    assert [row.id for row in found(Deep)] == ["queueapp.W061"]


def test_setting_that_is_not_accepted_is_reported_once(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"(": None}}

    assert checks.check_journal() == []
    assert [finding.id for finding in checks.check_settings()] == ["queueapp.E001"]
