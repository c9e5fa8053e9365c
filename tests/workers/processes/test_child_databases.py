"""A worker that is started from a test run works on the database of the test, or not at all."""

from __future__ import annotations

from io import StringIO

import pytest
from django.conf import settings as django_settings
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import TestCase, TransactionTestCase

from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Leased
from workers.processes.child import database_names, use_databases


@pytest.mark.django_db(transaction=True)
def test_a_worker_called_from_a_test_handles_what_the_test_has_sent() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("child processes of tests are pointed at PostgreSQL only")
    Leased.send(Ping("from a test"))

    out, options = StringIO(), connection.settings_dict["OPTIONS"]
    call_command("runqueueworker", "testapp.Leased", "--until-empty", stdout=out)

    assert Effect.objects.count() == 1, "in the database of the test, which the settings do not name"
    assert not Leased.objects.exists()
    line = "Receiving testapp.Leased (4 threads) in 1 process, with dispatcher and maintenance. Ctrl-C stops."
    assert out.getvalue().splitlines() == [line]
    assert connection.settings_dict["OPTIONS"] == options, "this process goes on as it was"


class InATransaction(TestCase):
    def test_is_refused(self) -> None:
        for command in ("runqueueworker", "rundelayeddispatcher"):
            with pytest.raises(CommandError, match=r"open transaction on 'default'.*use TransactionTestCase"):
                call_command(command)


class WithoutOne(TransactionTestCase):
    available_apps = ["queueapp", "workers", "tests.testapp"]

    def test_is_not_refused(self) -> None:
        with pytest.raises(CommandError, match=r"testapp\.Readable has no consumer"):
            call_command("runqueueworker", "testapp.Readable")


@pytest.mark.django_db
def test_the_names_are_those_of_the_test_run() -> None:
    assert database_names()["default"] == connection.settings_dict["NAME"]


@pytest.mark.django_db
def test_a_name_is_taken_over_by_connections_of_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "NAME", "real")

    use_databases({"default": "test_real", "unknown": "other"})

    assert connections.create_connection("default").settings_dict["NAME"] == "test_real"
    assert "unknown" not in connections.settings


@pytest.mark.django_db(transaction=True)
def test_settings_of_no_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.setattr(django_settings, "SETTINGS_MODULE", None)

    with pytest.raises(CommandError, match=r"settings\.configure\(\)"):
        call_command("rundelayeddispatcher")
