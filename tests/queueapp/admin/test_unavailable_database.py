"""A database that does not answer: each of its pages, and each operation there, is a note on the overview."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from django.test import Client

from queueapp.models import DelayedMessage, PoisonMessage, QueueControl, Subscriber
from tests.databases import known_as
from tests.testapp.models import Leased, Urgent

from .conftest import notes, url

AWAY = "away"
QUERY = f"?database={AWAY}"
KEY = f"{AWAY}:7"
PROCESS = f"{AWAY}:{uuid.UUID(int=17)}"


class Routes:
    """Urgent lies in the database that is away."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return AWAY if model is Urgent else None

    db_for_read = db_for_write


@pytest.fixture(autouse=True)
def away(db: None, settings: Any) -> Iterator[None]:
    settings.DATABASE_ROUTERS = [Routes()]
    unreachable = {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {}}
    with known_as(AWAY, **unreachable):
        connection = connections[AWAY]

        def connect() -> None:
            with connection.wrap_database_errors:
                connection.connect()

        # Django's tests refuse undeclared databases before they get as far as to call.
        connection.ensure_connection = connect  # type: ignore[method-assign]
        yield


def messages_of(client: Client, response: Any) -> str:
    assert response.status_code == 302, response
    assert response["Location"] == url(QueueControl)
    (note,) = notes(client.get(url(QueueControl)))
    return note


@pytest.mark.parametrize(
    "page",
    [
        *(url(model) + QUERY for model in (DelayedMessage, PoisonMessage, Subscriber)),
        url(Urgent),
        *(url(PoisonMessage, view) + QUERY + "&group=a" for view in ("canary", "note")),
        *(url(DelayedMessage, view, KEY) for view in ("change", "history", "delete", "body")),
        *(url(PoisonMessage, view, KEY) for view in ("change", "history", "delete", "body", "edit")),
        *(url(Subscriber, view, PROCESS) for view in ("change", "history")),
        *(url(Urgent, view, 7) for view in ("change", "history", "delete", "body")),
    ],
)
def test_pages(operator: Client, page: str) -> None:
    for get in (operator.get, operator.head):
        assert messages_of(operator, get(page)).endswith(f"the database {AWAY!r} cannot be reached.")


@pytest.mark.parametrize("more", [{}, {"confirmed": "yes"}], ids=["asked", "answered"])
def test_operations(operator: Client, more: dict[str, str]) -> None:
    for address in (url(DelayedMessage) + QUERY, url(PoisonMessage) + QUERY, url(Urgent)):
        data = {"action": "delete_selected", "_selected_action": 7, **more}
        assert "cannot be reached" in messages_of(operator, operator.post(address, data))
    for view in ("canary", "note"):
        address = f"{url(PoisonMessage, view)}{QUERY}&group=a"
        assert "cannot be reached" in messages_of(operator, operator.post(address, more))
    for verb in ("pause", "resume", "concurrency", "purge"):
        response = operator.post(url(QueueControl, verb, "testapp.Urgent"), {"tasks": "3", **more})
        assert messages_of(operator, response) == f"Queue testapp.Urgent: the database {AWAY!r} cannot be reached."
    assert "cannot be reached" in messages_of(
        operator, operator.post(url(PoisonMessage, "edit", KEY), {"headers": "{}"})
    )


def test_a_process_is_not_even_looked_for_to_be_deleted(operator: Client) -> None:
    assert operator.get(url(Subscriber, "delete", PROCESS)).status_code == 403


def test_the_overview_and_the_other_database_are_there_all_the_same(operator: Client) -> None:
    Leased.send({})
    lines = {line["row"].label: line["row"] for line in operator.get(url(QueueControl)).context["lines"]}
    assert lines["testapp.Urgent"].waiting == "\u2013"
    assert lines["testapp.Leased"].waiting == "1"
    assert operator.get(url(QueueControl, "history", "testapp.Urgent")).status_code == 200
