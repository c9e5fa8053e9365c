"""Recording a failed attempt of a message in a foreign table: its headers, and its times without a
zone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, connections

from queueapp.delayed import dispatch_due
from queueapp.failures.recoverability import Poison, RetryLater, RetryNow
from queueapp.models import DelayedMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import ForeignPostgres

from .failing import Message, deciding

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="what the tables refuse is written for PostgreSQL"),
]


# -- foreign tables -------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign() -> Iterator[Message]:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (Id uuid NOT NULL, Expires timestamp, Headers text NOT NULL, Body bytea, "
            "Seq serial NOT NULL)"
        )
    yield Message(ForeignPostgres)
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


def test_a_nul_in_a_foreign_header_is_written_back_as_it_came(foreign: Message) -> None:
    foreign.put(r'{"a":"x\u0000y"}')
    for attempt in (1, 2):
        assert foreign.fail(deciding(RetryNow())) == RetryNow()
        row = ForeignPostgres.objects.get()
        assert rf'"a":"x\u0000y","queueapp.Attempts":"{attempt}"' in row.headers

    foreign.fail(deciding(Poison("tests")))

    row = foreign.kept()
    assert row.attempts == 3
    assert row.headers == r'{"a":"x\u0000y"}'


def test_foreign_headers_in_which_nothing_can_be_counted_are_not_retried_for_ever(foreign: Message) -> None:
    foreign.put("no JSON")

    foreign.fail(deciding(RetryNow()))

    row = foreign.kept()
    assert row.headers == "no JSON"
    assert "attempts cannot be counted" in row.reason


@pytest.mark.parametrize("session", [None, "America/New_York"])
def test_times_of_a_foreign_table_are_those_of_utc_whatever_this_process_thinks(
    foreign: Message, settings: Any, session: str | None
) -> None:
    when = datetime(2090, 1, 1, 12, 0, 0, 5, tzinfo=UTC)
    settings.TIME_ZONE = "Asia/Tokyo"
    in_zone(session)
    steps: list[Callable[[], Any]] = [
        lambda: foreign.put(expires=when),
        lambda: foreign.fail(deciding(RetryLater(timedelta(0)))),
        lambda: dispatch_due("default", 10),
        lambda: ForeignPostgres.objects.filter(expires=when).update(expires=when),
    ]
    try:
        for number, step in enumerate(steps):
            step()
            if number == 1:
                assert DelayedMessage.objects.get().expires == when
                continue
            with connection.cursor() as cursor:
                cursor.execute("SELECT expires::text, current_setting('TimeZone') FROM foreign_postgres")
                assert cursor.fetchall() == [("2090-01-01 12:00:00.000005", session or "UTC")], number
    finally:
        in_zone(None)


def in_zone(name: str | None) -> None:
    """As with this TIME_ZONE in DATABASES."""
    connection.close()
    connection.settings_dict["TIME_ZONE"] = name
    for cached in ("timezone", "timezone_name"):
        connections["default"].__dict__.pop(cached, None)
