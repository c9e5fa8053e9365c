"""The page, what it polls, the import, and the health check."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError, connection
from django.test import Client

from project.flights import figures
from project.flights.messages import FlightDelayed
from project.flights.models import DelayFigure, FlightDelays, Import
from queueapp.models import DelayedMessage, PoisonMessage

from .examples import flight

ENTERED = {
    "carrier": "DL",
    "flight": "42",
    "origin": "JFK",
    "destination": "atl",
    "scheduled_departure": "2013-05-01T17:15",
    "outcome": "arrived",
    "minutes": "130",
}


def counted(**values: Any) -> None:
    DelayFigure.objects.create(**{"carrier": "UA", "origin": "EWR", "hour": 5, "late": 1, "minutes": 30} | values)


# -- the page ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_page_shows_figures_backlog_and_poison(client: Client) -> None:
    counted(late=1234, cancelled=66, minutes=1234 * 40)
    FlightDelays.send(flight())
    DelayedMessage.objects.create(message_id=FlightDelays.send(flight()), destination="flights.Rebookings",
                                  due="2030-01-01T00:00Z")  # fmt: skip
    PoisonMessage.objects.create(message_id=FlightDelays.send(flight()), queue="flights.FlightDelays", reason="broken")
    page = client.get("/").content.decode()
    numbers = dict(re.findall(r'data-number="(\w+)">([\d,+]+)<', page))
    assert numbers == {
        "waiting": "3", "handled": "1,300", "delayed": "1", "rebooked": "0", "poison": "1", "workers": "0",
    }  # fmt: skip
    assert "United Air Lines (UA)" in page
    assert "<td>1,234</td>" in page


@pytest.mark.django_db
def test_page_without_any_figure_reports_it(client: Client) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert "No flight was counted yet." in response.content.decode()


@pytest.mark.django_db
def test_page_needs_nothing_inline_and_nothing_from_elsewhere(client: Client) -> None:
    counted()
    response = client.get("/")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = response.content.decode()
    assert not re.search(r"\sstyle=|<style|\son\w+=|<script(?![^>]* src=)|https?://(?!www\.w3\.org)", page)


@pytest.mark.django_db
def test_live_answer_has_the_numbers_and_what_is_drawn_of_them(client: Client) -> None:
    counted(carrier="UA", late=3, minutes=90)
    counted(carrier="AA", hour=17, origin="JFK", late=0, cancelled=9, minutes=0)
    response = client.get("/live.json")
    answer = response.json()
    assert answer["numbers"]["handled"] == 12
    assert [(f["key"], f["late"], f["cancelled"]) for f in answer["figures"]["carriers"]] == [
        ("AA", 0, 9),
        ("UA", 3, 0),
    ]
    assert [f["late"] + f["cancelled"] for f in answer["figures"]["hours"]] == [0] * 5 + [3] + [0] * 11 + [9] + [0] * 6
    assert {f["key"]: f["minutes"] for f in answer["figures"]["airports"]} == {"EWR": 90, "JFK": 0, "LGA": 0}
    assert answer["html"]["carriers"].count("<title>") == 2
    assert "no-store" in response.headers["Cache-Control"]


@pytest.mark.django_db
def test_counts_of_the_page_stop_at_the_limit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "COUNT_LIMIT", 5)
    FlightDelays.send_many([flight()] * 7)
    assert figures.backlog().waiting == 5
    assert 'data-number="waiting">5+<' in client.get("/").content.decode()


@pytest.mark.django_db
def test_poison_of_other_queues_and_resolved_poison_are_not_counted() -> None:
    item = {"message_id": FlightDelays.send(flight()), "reason": "broken"}
    PoisonMessage.objects.create(queue="shop.Orders", **item)
    PoisonMessage.objects.create(queue="flights.FlightDelays", status=PoisonMessage.Status.ARCHIVED, **item)
    assert figures.backlog().poison == 0


# -- the import ----------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_import_commits_the_row_and_the_message_together(client: Client) -> None:
    response = client.post("/import", ENTERED, follow=True)
    assert response.redirect_chain == [("/", 302)]
    assert "was saved and its message sent" in response.content.decode()
    row = Import.objects.get()
    with FlightDelays.receive() as batch:
        (message,) = batch
        assert message.id == row.message_id
        body = message.decode(FlightDelayed)
    assert (body.key, body.destination, body.hour, body.delay) == ("DL42 JFK 2013-05-01", "ATL", 17, 130)
    assert not body.is_broken


@pytest.mark.django_db(transaction=True)
def test_import_whose_row_cannot_be_saved_sends_nothing(client: Client) -> None:
    client.raise_request_exception = False
    with mock.patch.object(Import.objects, "create", side_effect=OperationalError("disk full")):
        assert client.post("/import", ENTERED).status_code == 500
    assert (Import.objects.count(), FlightDelays.objects.count()) == (0, 0)


@pytest.mark.django_db(transaction=True)
def test_import_that_fails_at_the_commit_leaves_neither_row_nor_message(client: Client) -> None:
    client.raise_request_exception = False
    create = Import.objects.create

    def create_and_lose_the_connection(**values: Any) -> Import:
        row = create(**values)
        connection.connection.close()
        return row

    with mock.patch.object(Import.objects, "create", side_effect=create_and_lose_the_connection):
        assert client.post("/import", ENTERED).status_code == 500
    assert (Import.objects.count(), FlightDelays.objects.count()) == (0, 0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"flight": "0"}, "flight"),
        ({"carrier": "ZZ"}, "carrier"),
        ({"destination": "A1"}, "destination"),
        ({"scheduled_departure": "yesterday"}, "scheduled_departure"),
        ({"minutes": ""}, "minutes"),
        ({"minutes": "15"}, "minutes"),
    ],
)
def test_import_that_is_not_valid_stores_nothing_and_names_the_field(
    client: Client, changes: dict[str, str], field: str
) -> None:
    response = client.post("/import", ENTERED | changes)
    assert response.status_code == 422
    assert f'id="id_{field}_error"' in response.content.decode()
    assert (Import.objects.count(), FlightDelays.objects.count()) == (0, 0)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("outcome", "cancelled", "broken"), [("cancelled", True, False), ("broken", False, True), ("arrived", False, False)]
)
def test_outcome_of_the_form_decides_what_the_message_states(
    client: Client, outcome: str, cancelled: bool, broken: bool
) -> None:
    client.post("/import", ENTERED | {"outcome": outcome})
    with FlightDelays.receive() as batch:
        (message,) = batch
        body = message.decode(FlightDelayed)
    assert (body.cancelled, body.is_broken) == (cancelled, broken)


@pytest.mark.django_db
def test_import_needs_the_token_of_the_page_and_a_post() -> None:
    strict = Client(enforce_csrf_checks=True)
    assert strict.post("/import", ENTERED).status_code == 403
    assert strict.get("/import").status_code == 405
    assert FlightDelays.objects.count() == 0


# -- health --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_health_is_ok_while_the_database_answers(client: Client) -> None:
    response = client.get("/healthz")
    assert (response.status_code, response.content) == (200, b"ok\n")


@pytest.mark.django_db
def test_health_is_503_when_the_database_does_not_answer(client: Client) -> None:
    with mock.patch.object(connection, "cursor", side_effect=OperationalError("gone: secret-host")):
        response = client.get("/healthz")
    assert (response.status_code, response.content) == (503, b"database unavailable\n")
