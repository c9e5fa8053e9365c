"""Checks of the copies that consumers get: who serves them, and where it is kept who gets them."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest

from queueapp import checks
from queueapp.checks import check_served, check_subscriptions, check_types, check_workers_installed
from queueapp.consuming.registry import registered
from queueapp.models import Now, Subscriber, Subscription
from queueapp.operations import subscriptions
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, AddressedUrgent, Leased
from tests.testapp.ordering import FencedAddressed

KIND = "tests.testapp.messages.Nop"


def live(*names: str) -> None:
    """A live worker that has these consumers."""
    Subscriber.objects.create(
        queue=Addressed._meta.label,
        host="h",
        process=1,
        supervisor=uuid.uuid4(),
        alive_until=Now() + timedelta(hours=1),
        consumers=json.dumps([[name, KIND] for name in names]),
    )


@pytest.mark.django_db
def test_check_warns_of_a_consumer_that_no_live_worker_serves() -> None:
    """queueapp.W100"""
    subscriptions.subscribe(Addressed, "lone", KIND)
    assert check_served(databases=["default"]) == []
    live("another")

    (found,) = check_served(databases=["default"])

    assert found.id == "queueapp.W100"
    assert "'lone'" in found.msg
    assert "removeconsumer testapp.Addressed 'lone'" in found.hint
    Addressed.send(Nop(1, ""))
    assert [row.id for row in check_served(databases=["default"])] == ["queueapp.W100"], "once, also where copies wait"
    assert check_served(databases=None) == []


class NoTables:
    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **_: Any) -> bool | None:
        return False if model_name == Subscription._meta.model_name else None


def test_check_refuses_recipients_where_nothing_can_be_kept_of_them(settings: Any) -> None:
    """queueapp.E100"""
    settings.DATABASE_ROUTERS = [f"{__name__}.NoTables"]
    assert {found.obj for found in check_subscriptions() if found.id == "queueapp.E100"} >= {Addressed, AddressedUrgent}


def test_check_warns_of_copies_behind_barriers() -> None:
    """queueapp.W101"""
    assert [found.obj for found in check_subscriptions() if found.id == "queueapp.W101"] == [FencedAddressed]


@pytest.mark.django_db
def test_a_name_from_a_message_reaches_the_terminal_escaped() -> None:
    Addressed.send({}, recipient="lone\x1b[2J\u202e", unknown_recipient=True)
    live("here")
    (found,) = check_served(databases=["default"])
    for text in (found.msg, found.hint):
        assert text.isprintable(), text
        assert "⟨U+001B⟩" in text


def test_check_warns_of_consumers_that_no_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """queueapp.W013"""
    assert check_workers_installed() == []
    monkeypatch.setattr(checks.consumers, "WORKERS_APP", "not_installed")

    (found,) = check_workers_installed()

    assert found.id == "queueapp.W013"
    assert "'queueapp.workers' is not in INSTALLED_APPS" in found.msg


def test_check_warns_of_a_consumer_of_a_type_that_its_queue_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """queueapp.W014"""
    assert check_types() == []
    names = {name for registration in registered.of(Leased) for name in registration.type_names}
    monkeypatch.setattr(Leased.delivery, "accepted_types", frozenset({*names, "another"}))
    assert check_types() == []
    monkeypatch.setattr(Leased.delivery, "accepted_types", frozenset({"another"}))

    found = check_types()

    assert {row.id for row in found} == {"queueapp.W014"}
    assert len(found) == len(registered.of(Leased))
    assert "which testapp.Leased does not accept" in found[0].msg
