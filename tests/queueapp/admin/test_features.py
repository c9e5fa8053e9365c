"""The index shows the pages of the features that a project uses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from queueapp.admin import features
from queueapp.models import BulkOperation, JournalEntry, QueueControl, Schedule
from queueapp.schedules import declarations
from tests.testapp.models import Addressed, Followed, Grouped, Leased, SecretTransactional, Transactional

from .conftest import url

OF_EVERY_PROJECT = {
    "delayedmessage",
    "poisonmessage",
    "queuecontrol",
    "subscriber",
}


def shown(client: Client) -> set[str]:
    return set(re.findall(r'href="/admin/queueapp/(\w+)/"', client.get("/admin/queueapp/").content.decode()))


@pytest.fixture(autouse=True)
def no_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})


def test_a_project_with_two_plain_queues_sees_only_what_every_project_has(
    operator: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {}
    monkeypatch.setattr(features, "queues", [Leased, Transactional])

    assert shown(operator) == OF_EVERY_PROJECT
    assert operator.get(url(JournalEntry)).status_code == 200, "under its address it is there"


def test_the_overview_links_to_schedules_and_operations(operator: Client) -> None:
    page = operator.get(url(QueueControl)).content.decode()

    for model in (Schedule, BulkOperation):
        assert f'href="{url(model)}"' in page
        assert operator.get(url(model)).status_code == 200


def test_a_declared_schedule_has_the_page_of_schedules(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {"nightly": object()})

    assert "schedule" in shown(operator)


@pytest.mark.parametrize(
    ("queues", "options", "page"),
    [
        ([Leased, Addressed], {}, "subscription"),
        ([Leased, Grouped], {}, "messagegroup"),
        ([Leased, Followed], {}, "messageresult"),
        ([Leased, SecretTransactional], {}, "subjectkey"),
        ([Leased], {"JOURNAL": {"orders": None}}, "journalentry"),
        ([Leased], {"ALERTS": {"poison": True}}, "alert"),
    ],
)
def test_a_feature_that_is_used_has_its_page(
    operator: Client, settings: Any, monkeypatch: pytest.MonkeyPatch, queues: Any, options: Any, page: str
) -> None:
    settings.QUEUEAPP = options
    monkeypatch.setattr(features, "queues", queues)

    assert shown(operator) == OF_EVERY_PROJECT | {page}
