"""Declaring schedules in code, and what becomes of their rows."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from queueapp import Consumer, InvalidMessage, InvalidOption, consumer, scheduled
from queueapp.consuming.registry import registered
from queueapp.models import Schedule
from queueapp.schedules import declarations, stored
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, Keyed, Leased, Urgent

from .conftest import MovedClock


class Nightly(msgspec.Struct):
    """A message that can be made without arguments."""

    pages: int = 3


class Needy(msgspec.Struct):
    """One that cannot."""

    number: int


def rows(alias: str) -> dict[str, Schedule]:
    stored.declare(alias)
    return {row.name: row for row in Schedule.objects.using(alias)}


def test_a_declaration_becomes_a_row_with_its_next_run(placed: str, clock: MovedClock) -> None:
    Urgent.schedule(
        Ping("close"), name="close the day", cron="0 22 * * mon-fri", timezone="Europe/Oslo", tags=["books", "daily"],
        misfire="all", misfire_limit=5, jitter=60, priority=2, expires_in=timedelta(hours=1), headers={"h": "1"},
    )  # fmt: skip

    row = rows(placed)["close the day"]

    assert (row.queue, row.cron, row.timezone, row.tags) == (
        "testapp.Urgent", "0 22 * * mon-fri", "Europe/Oslo", "books,daily",
    )  # fmt: skip
    assert row.next_at == datetime(2026, 1, 1, 21, tzinfo=UTC)
    assert row.next_at <= row.due_at < row.next_at + timedelta(minutes=1)
    assert (row.misfire, row.misfire_limit, row.jitter) == ("all", 5, timedelta(minutes=1))
    assert row.declared


def test_declaring_again_changes_nothing_and_a_changed_declaration_changes_its_row(
    placed: str, clock: MovedClock, declared: dict[str, Any]
) -> None:
    Leased.schedule({"n": 1}, name="hourly", every=3600)
    before = rows(placed)["hourly"]
    stored.pause(placed, ["hourly"])
    clock.move(minutes=30)

    assert rows(placed)["hourly"].next_at == before.next_at

    declared.clear()
    Leased.schedule({"n": 2}, name="hourly", every=3600)
    changed = rows(placed)["hourly"]
    assert (changed.body, changed.next_at, changed.paused) == ('{"n":2}', before.next_at, True)

    declared.clear()
    Leased.schedule({"n": 2}, name="hourly", every=7200)
    assert rows(placed)["hourly"].next_at == datetime(2026, 1, 1, 2, tzinfo=UTC)


def test_a_row_goes_with_its_declaration_and_one_made_in_the_admin_stays(
    placed: str, clock: MovedClock, declared: dict[str, Any]
) -> None:
    Schedule.objects.using(placed).create(name="by hand", queue="testapp.Leased", every=timedelta(hours=1))
    Schedule.objects.using(placed).create(
        name="of another project", queue="shop.Orders", every=timedelta(hours=1), declared="x"
    )
    Leased.schedule({}, name="gone soon", every=60)
    assert set(rows(placed)) == {"by hand", "of another project", "gone soon"}

    declared.clear()

    assert set(rows(placed)) == {"by hand", "of another project"}


def test_a_name_that_is_taken_in_the_admin_is_reported(
    placed: str, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    Schedule.objects.using(placed).create(name="same", queue="testapp.Leased", every=timedelta(hours=1))
    Leased.schedule({}, name="same", every=60)

    with caplog.at_level(logging.ERROR):
        assert rows(placed)["same"].every == timedelta(hours=1)

    assert "was made in the admin as well" in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, InvalidOption),
        ({"name": "a:b"}, InvalidOption),
        ({"name": "x" * 201}, InvalidOption),
        ({"cron": "no cron"}, InvalidOption),
        ({"misfire": "never"}, InvalidOption),
        ({"misfire_limit": 0}, InvalidOption),
        ({"jitter": timedelta(days=2)}, InvalidOption),
        ({"delay": timedelta(1)}, InvalidOption),
        ({"tags": ["a,b"]}, InvalidOption),
        ({"start": datetime(2026, 1, 2, tzinfo=UTC), "end": datetime(2026, 1, 1, tzinfo=UTC)}, InvalidOption),
        ({"priority": 7}, InvalidMessage),
        ({"dedupe_key": "k"}, InvalidMessage),
        ({"dedupe_key": str}, InvalidOption),
        ({"headers": {"n": 1}}, InvalidMessage),
    ],
)
def test_a_bad_declaration_is_refused_where_it_is_written(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Leased.schedule({}, **{"name": "bad", "cron": "* * * * *", **options})


def test_a_dedupe_key_that_is_no_text_is_refused_where_it_is_written() -> None:
    with pytest.raises(InvalidMessage, match="dedupe_key = 7 is not accepted"):
        Keyed.schedule({}, name="bad", every=60, dedupe_key=7)  # type: ignore[arg-type]


def test_a_misspelt_option_or_word_has_a_suggestion() -> None:
    with pytest.raises(InvalidOption, match=r"did you mean 'misfire_limit'\?"):
        Leased.schedule({}, name="bad", cron="* * * * *", misfir_limit=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match=r"did you mean 'skip'\?"):
        Leased.schedule({}, name="bad", cron="* * * * *", misfire="skp")  # type: ignore[arg-type]


def test_bytes_cannot_be_scheduled() -> None:
    with pytest.raises(InvalidOption, match="stored as text"):
        Leased.schedule(b"x", name="raw", cron="* * * * *")


def test_one_name_has_one_declaration_and_reloading_a_module_is_allowed() -> None:
    Leased.schedule({}, name="twice", cron="* * * * *")
    Leased.schedule({}, name="twice", cron="* * * * *")

    with pytest.raises(InvalidOption, match="another declaration"):
        Leased.schedule({}, name="twice", cron="0 * * * *")


@pytest.fixture
def consumers() -> Any:
    names: list[str] = []
    yield names
    for name in names:
        registered.remove(name)


def test_scheduled_above_a_consumer_sends_a_message_of_its_type(
    placed: str, clock: MovedClock, consumers: list[str]
) -> None:
    consumers += ["nightly report", "weekly report"]

    @scheduled(cron="0 3 * * *", timezone="UTC")
    @consumer(Addressed, name="nightly report")
    def nightly(message: Nightly) -> None: ...

    @scheduled(every=timedelta(days=7), name="weekly")
    class Weekly(Consumer[Nightly]):
        queue = Addressed
        name = "weekly report"

        def handle(self, message: Nightly, context: Any) -> None: ...

    found = rows(placed)
    row = found["nightly report"]
    assert (row.body, declarations.read_options(row.options)) == ('{"pages":3}', {"recipient": "nightly report"})
    assert "Nightly" in row.headers
    assert declarations.read_options(found["weekly"].options) == {"recipient": "weekly report"}


def test_scheduled_needs_a_consumer_and_a_message_that_can_be_made(consumers: list[str]) -> None:
    consumers.append("needs a body")

    with pytest.raises(InvalidOption, match="above @consumer"):

        @scheduled(cron="* * * * *")
        def no_consumer(message: Nightly) -> None: ...

    with pytest.raises(InvalidOption, match="cannot be made without arguments"):

        @scheduled(cron="* * * * *")
        @consumer(Addressed, name="needs a body")
        def needs_a_body(message: Needy) -> None: ...
