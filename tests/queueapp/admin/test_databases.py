"""Several databases: every page shows the rows of each, and what is done is done where the row was read."""

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.db import OperationalError, connection, connections
from django.test import Client

from queueapp.admin.poison import PoisonAdmin
from queueapp.models import DelayedMessage, Now, PoisonMessage, QueueControl, Subscriber
from tests.databases import known_as
from tests.testapp.models import Leased, Urgent

from .conftest import notes, operate, url
from .test_bodies import sees

WAREHOUSE = "warehouse"
QUERY = f"?database={WAREHOUSE}"

pytestmark = [
    pytest.mark.django_db(databases=["default", WAREHOUSE]),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the other database is a schema of the same one"),
]


class Routes:
    """Urgent lies in the other database, everything else in the default one."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return WAREHOUSE if model is Urgent else None

    db_for_read = db_for_write


@pytest.fixture(scope="module", autouse=True)
def alias(django_db_setup: None) -> Iterator[None]:
    with known_as(WAREHOUSE):
        yield


@pytest.fixture(autouse=True)
def second_database(alias: None, db: None, settings: Any) -> None:
    """Tables of its own in the other database: a schema, gone with the test's transaction."""
    settings.DATABASE_ROUTERS = [Routes()]
    tables = [model._meta.db_table for model in (Urgent, DelayedMessage, PoisonMessage, QueueControl, Subscriber)]
    with connections[WAREHOUSE].cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {WAREHOUSE}; SET LOCAL search_path TO {WAREHOUSE}, public")
        for table in tables:
            cursor.execute(f"CREATE TABLE {WAREHOUSE}.{table} (LIKE public.{table} INCLUDING ALL)")


def poison(alias: str, number: int, **values: Any) -> PoisonMessage:
    values = {"queue": "testapp.Urgent", "reason": f"in {alias}", "group_key": "a", "body": b"{}"} | values
    return PoisonMessage.objects.using(alias).create(number=number, message_id=uuid.uuid4(), **values)


def count(model: Any, alias: str) -> int:
    return int(model.objects.using(alias).count())


def leads_back(operator: Client, model: Any, key: str) -> bool:
    """Whether the history of a row links to that row, and not to one of another database."""
    history = operator.get(url(model, "history", quote(key))).content.decode()
    return f'href="{url(model, "change", quote(key))}"' in history


# -- lists ---------------------------------------------------------------------------------------------------------


def test_a_list_shows_one_database_and_offers_the_others(operator: Client) -> None:
    poison("default", 7, queue="testapp.Leased")
    poison(WAREHOUSE, 7)
    for query, here, elsewhere in (("", "default", WAREHOUSE), (QUERY, WAREHOUSE, "default")):
        text = operator.get(url(PoisonMessage) + query).content.decode()
        assert f"in {here}" in text
        assert f"in {elsewhere}" not in text
        assert f"Database: {here}" in text


def test_delayed_messages_and_subscribers_of_the_other_database(operator: Client) -> None:
    Urgent.send({}, delay=timedelta(hours=1))
    Subscriber.objects.using(WAREHOUSE).create(
        queue="testapp.Urgent", host="over-there", process=1, supervisor=uuid.uuid4(), alive_until=Now()
    )
    for model, shown in ((DelayedMessage, "59 min"), (Subscriber, "over-there:1")):
        assert shown not in operator.get(url(model)).content.decode()
        assert shown in operator.get(url(model) + QUERY).content.decode()


def test_with_one_database_there_is_nothing_to_choose(operator: Client, settings: Any) -> None:
    settings.DATABASE_ROUTERS = []
    poison("default", 7)
    assert "By database" not in operator.get(url(PoisonMessage)).content.decode()


def test_a_database_that_is_none_is_refused(operator: Client) -> None:
    poison("default", 7)
    assert operator.get(url(PoisonMessage) + "?database=nope")["Location"].endswith("?e=1")
    for page in ("change", "history", "delete"):
        assert operator.get(url(PoisonMessage, page, "nope:7")).status_code == 302, "not the row 7 of the first one"
    assert operator.get(url(PoisonMessage, "body", "nope:7")).status_code == 404


def test_the_overview_leads_to_the_database_of_each_queue(operator: Client) -> None:
    text = operator.get(url(QueueControl)).content.decode()
    for model in (PoisonMessage, DelayedMessage, Subscriber):
        field = "destination" if model is DelayedMessage else "queue"
        assert f'href="{url(model)}?{field}=testapp.Urgent&amp;database={WAREHOUSE}"' in text
        assert f'href="{url(model)}?{field}=testapp.Leased"' in text


def test_every_link_of_a_list_leads_to_the_row_that_it_shows(operator: Client) -> None:
    poison("default", 7, reason="the wrong one")
    poison(WAREHOUSE, 7)
    text = operator.get(url(PoisonMessage) + QUERY).content.decode()
    key = f"{WAREHOUSE}_3A7"
    assert f"{url(PoisonMessage)}{key}/change/" in text
    assert f"{url(PoisonMessage)}?group=a&amp;database={WAREHOUSE}" in text
    page = operator.get(f"{url(PoisonMessage)}{key}/change/").content.decode()
    assert f"in {WAREHOUSE}" in page
    assert f'href="{url(PoisonMessage)}{key}/history/"' in page
    assert f'formaction="{url(PoisonMessage)}{QUERY}"' in page


# -- one row -------------------------------------------------------------------------------------------------------


def test_body_history_and_edit_of_a_message_of_the_other_database(operator: Client) -> None:
    poison("default", 7, body=b'{"at": "default"}')
    message = poison(WAREHOUSE, 7, body=b'{"iban": "NO93 8601 1117 947"}')
    message.pk = f"{WAREHOUSE}:7"
    assert sees(operator, message)
    response = operator.post(url(PoisonMessage, "edit", f"{WAREHOUSE}:7"), {"headers": "{}", "body": "{}"}, follow=True)
    assert "was requeued as" in notes(response)[0]
    assert response.redirect_chain[-1][0].endswith(QUERY)
    assert (Urgent.objects.count(), PoisonMessage.objects.using(WAREHOUSE).get().status) == (1, "edited")
    assert PoisonMessage.objects.get().status == "unresolved"
    assert LogEntry.objects.get().object_id == f"{WAREHOUSE}:7"
    assert "Edited and requeued" in operator.get(url(PoisonMessage, "history", f"{WAREHOUSE}:7")).content.decode()
    assert "Edited and requeued" not in operator.get(url(PoisonMessage, "history", 7)).content.decode()
    assert leads_back(operator, PoisonMessage, f"{WAREHOUSE}:7")


def test_a_delayed_message_and_a_subscriber_have_their_pages(operator: Client) -> None:
    Urgent.send({}, delay=timedelta(hours=1))
    number = DelayedMessage.objects.using(WAREHOUSE).get().pk
    assert "testapp.Urgent" in operator.get(url(DelayedMessage, "change", f"{WAREHOUSE}:{number}")).content.decode()
    row = Subscriber.objects.using(WAREHOUSE).create(
        queue="testapp.Urgent", host="over-there", process=1, supervisor=uuid.uuid4(), alive_until=Now()
    )
    assert "over-there" in operator.get(url(Subscriber, "change", f"{WAREHOUSE}:{row.pk}")).content.decode()
    assert leads_back(operator, Subscriber, f"{WAREHOUSE}:{row.pk}")
    for key in (row.pk, "nonsense", f"{WAREHOUSE}:nonsense"):
        assert operator.get(url(Subscriber, "change", key)).status_code == 302


# -- operations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["requeue", "archive", "delete_selected"])
@pytest.mark.parametrize("across", [False, True])
def test_an_operation_touches_the_database_that_was_shown(operator: Client, operation: str, across: bool) -> None:
    poison("default", 7, queue="testapp.Leased")
    poison(WAREHOUSE, 7)
    more = {"select_across": "1"} if across else {}
    asked = operator.post(url(PoisonMessage) + QUERY, {"action": operation, "_selected_action": 7, **more})
    assert f'href="{url(PoisonMessage)}{QUERY}"' in asked.content.decode(), "no leads back to the same list"
    operate(operator, PoisonMessage, operation, 7, query=QUERY, counts="reset", **more)
    assert PoisonMessage.objects.get().status == "unresolved"
    assert PoisonMessage.objects.using(WAREHOUSE).filter(status="unresolved").count() == 0
    assert count(Urgent, WAREHOUSE) == (1 if operation == "requeue" else 0)
    assert not Leased.objects.exists()
    if not across:
        assert LogEntry.objects.get().object_id == f"{WAREHOUSE}:7"


def test_delete_from_its_own_page(operator: Client) -> None:
    poison("default", 7)
    poison(WAREHOUSE, 7)
    page = operator.get(url(PoisonMessage, "delete", f"{WAREHOUSE}:7")).content.decode()
    assert f'action="{url(PoisonMessage)}{QUERY}"' in page


def test_delayed_messages_are_made_due_and_cancelled_where_they_lie(operator: Client) -> None:
    Leased.send({}, delay=timedelta(hours=1))
    Urgent.send({}, delay=timedelta(hours=1))
    DelayedMessage.objects.using(WAREHOUSE).update(number=DelayedMessage.objects.get().pk)
    (key,) = DelayedMessage.objects.values_list("pk", flat=True)
    operate(operator, DelayedMessage, "dispatch_now", key, query=QUERY)
    assert not DelayedMessage.objects.filter(due__lte=Now()).exists()
    operate(operator, DelayedMessage, "delete_selected", key, query=QUERY)
    assert (count(DelayedMessage, "default"), count(DelayedMessage, WAREHOUSE)) == (1, 0)


def test_the_form_of_a_queues_concurrency_has_what_is_set_where_the_queue_is(operator: Client) -> None:
    for alias, queue, tasks in (
        ("default", "testapp.Urgent", 3),
        (WAREHOUSE, "testapp.Leased", 4),
        (WAREHOUSE, "testapp.Urgent", 5),
    ):
        QueueControl.objects.using(alias).create(queue=queue, concurrency=tasks)
    asked = operator.post(url(QueueControl, "concurrency", "testapp.Urgent")).content.decode()
    assert 'name="receivers" value="5"' in asked


# -- a database that does not answer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        url(PoisonMessage) + QUERY,
        *(url(PoisonMessage, view, f"{WAREHOUSE}:7") for view in ("change", "body", "edit", "delete")),
    ],
)
def test_a_database_without_our_tables_is_a_note(operator: Client, page: str) -> None:
    with connections[WAREHOUSE].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {WAREHOUSE}.queueapp_poisonmessage RENAME COLUMN reason TO why")
    response = operator.get(page, follow=True)
    assert response.redirect_chain[-1][0] == url(QueueControl)
    assert notes(response)[0].startswith("Poison messages of database 'warehouse': the table 'queueapp_poisonmessage'")


def test_after_such_a_note_the_transaction_of_the_request_goes_on(operator: Client) -> None:
    """With ATOMIC_REQUESTS what comes after it, the session for one, is in the same transaction."""
    with connections[WAREHOUSE].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {WAREHOUSE}.queueapp_poisonmessage RENAME COLUMN reason TO why")
    operator.get(url(PoisonMessage) + QUERY)
    assert count(DelayedMessage, WAREHOUSE) == 0, "readable"
    assert not connections[WAREHOUSE].needs_rollback


@pytest.mark.parametrize("verb", ["pause", "resume", "concurrency", "purge"])
@pytest.mark.parametrize("answer", [{}, {"confirmed": "yes", "tasks": "3"}], ids=["asked", "answered"])
@pytest.mark.parametrize("table", ["queueapp_queuecontrol", "testapp_urgent"])
def test_what_is_done_to_a_queue_without_tables_is_a_note(
    operator: Client, verb: str, answer: dict[str, str], table: str
) -> None:
    with connections[WAREHOUSE].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {WAREHOUSE}.{table} RENAME TO away; SET LOCAL search_path TO {WAREHOUSE}")
    response = operator.post(url(QueueControl, verb, "testapp.Urgent"), answer)
    assert response.status_code in (200, 302)
    if not answer:
        assert count(DelayedMessage, WAREHOUSE) == 0, "what only asks does not break the transaction of the request"
    if response.status_code == 302 and "confirmed" not in answer:
        assert "does not exist, or lacks a column" in notes(operator.get(response["Location"]))[0]


def test_a_database_that_is_away_is_a_note(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> None:
        # As psycopg's error of a refused connection arrives here.
        raise OperationalError("connection refused") from connections[WAREHOUSE].Database.OperationalError("refused")

    monkeypatch.setattr(PoisonAdmin, "get_search_results", away)
    assert notes(operator.get(url(PoisonMessage) + QUERY, follow=True)) == [
        "Poison messages of database 'warehouse': the database 'warehouse' cannot be reached."
    ]
    with pytest.raises(OperationalError):
        operator.get(url(PoisonMessage))
