"""The list of a queue's messages, and the page of one."""

import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.utils.html import escape

from queueapp.admin import site
from queueapp.admin.queues import QueueAdmin
from queueapp.models import Now, QueueControl, Subscriber
from queueapp.operations.selections import LeaseState
from queueapp.sql.claims import FOREVER
from tests.databases import only_on_postgresql
from tests.testapp.models import (
    Addressed,
    AddressedUrgent,
    AtMostOnce,
    Filtered,
    ForeignPostgres,
    Leased,
    Readable,
    Short,
    Transactional,
    Urgent,
)

from .conftest import notes, operate, url


def page(client: Client, address: str) -> str:
    response = client.get(address)
    assert response.status_code == 200, response
    return response.content.decode()


def listed(client: Client, queue: Any, query: str = "") -> list[int]:
    """The seqs on the list's first page, in its order."""
    return [row.pk for row in client.get(url(queue) + query).context["cl"].result_list]


@pytest.fixture
def subscriber(db: None) -> Subscriber:
    return Subscriber.objects.create(
        queue="testapp.Leased", host="worker-1", process=4711, supervisor=uuid.uuid4(), alive_until=Now()
    )


@pytest.fixture
def four_states(subscriber: Subscriber) -> dict[str, int]:
    """A message in each state, by the state's name."""
    Leased.send_many({"n": n} for n in range(4))
    states = dict(
        zip(["ready", "leased", "lease-expired", "expired"], Leased.objects.values_list("pk", flat=True), strict=True)
    )
    leases = Leased.objects.filter(pk__in=[states["leased"], states["lease-expired"]])
    leases.update(lease_token=uuid.uuid4(), lease_owner=subscriber.pk, deliveries=1)
    Leased.objects.filter(pk=states["leased"]).update(lease_expires=Now() + timedelta(minutes=5))
    Leased.objects.filter(pk=states["lease-expired"]).update(lease_expires=Now() - timedelta(minutes=5), cancels=1)
    Leased.objects.filter(pk=states["expired"]).update(expires=Now() - timedelta(seconds=1))
    return states


# -- the list ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "queue", [Leased, Transactional, AtMostOnce, Urgent, Addressed, AddressedUrgent, Readable, Short]
)
def test_every_queue_has_a_list_and_a_page_per_message(operator: Client, queue: Any) -> None:
    queue.send(
        {"n": 1},
        headers={"type": "shop.Ordered"},
        **({"recipient": "me", "unknown_recipient": True} if queue.delivery.recipients else {}),
    )
    assert "shop.Ordered" in page(operator, url(queue))
    assert "shop.Ordered" in page(operator, url(queue, "change", queue.objects.get().pk))


@only_on_postgresql
def test_foreign_table_without_our_columns_has_both_pages(operator: Client) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (id uuid NOT NULL, expires timestamp, headers text NOT NULL, body bytea, "
            "seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)"
        )
    ForeignPostgres.send({"n": 1})
    assert "1 message" in page(operator, url(ForeignPostgres))
    assert "NServiceBus" in page(operator, url(ForeignPostgres, "change", ForeignPostgres.objects.get().pk))
    assert listed(operator, ForeignPostgres, "?state=ready") == [ForeignPostgres.objects.get().pk]


def test_columns_for_recipient_and_priority_are_there_when_the_queue_uses_them(operator: Client) -> None:
    shown = {queue: operator.get(url(queue)).context["cl"].list_display for queue in (Leased, Urgent, AddressedUrgent)}
    assert ["level" in columns for columns in shown.values()] == [False, True, True]
    AddressedUrgent.send({}, recipient="gate-<b>", unknown_recipient=True)
    assert 'for <bdi class="queueapp-untrusted" title="gate-&lt;b&gt;">' in page(operator, url(AddressedUrgent))


def test_state_names_who_holds_a_lease_in_words(operator: Client, four_states: dict[str, int]) -> None:
    text = page(operator, url(Leased))
    assert text.count("worker-1:4711") == 2
    for state in four_states:
        assert f">{state.replace('-', ' ')}</span>" in text
    assert re.search(r"(5 min|4 min( \d+ s)?) left", text)


def test_what_others_have_inserted_is_pending_evaluation_and_neither_leased_nor_expired(operator: Client) -> None:
    pending, over = (Filtered.objects.create(headers="{}", body=b"{}") for _ in range(2))
    Filtered.objects.filter(pk=over.pk).update(expires=Now() - timedelta(seconds=1))
    Filtered.send({"number": 1})
    leased = Filtered.objects.latest("seq").pk
    Filtered.objects.filter(pk=leased).update(lease_token=uuid.uuid4(), lease_expires=FOREVER)

    assert page(operator, url(Filtered)).count(">pending evaluation</span>") == 2
    for state, expected in {
        "pending-evaluation": {pending.pk, over.pk},
        "leased": {leased},
        "expired": set(),
        "ready": set(),
    }.items():
        assert set(listed(operator, Filtered, f"?state={state}")) == expected, state
    assert LeaseState.PENDING_EVALUATION.condition(Leased, "default") is None, (
        "no message can be pending there, so the table is not asked"
    )


def test_a_lease_of_no_subscriber_names_none(operator: Client, four_states: dict[str, int]) -> None:
    Subscriber.objects.all().delete()
    assert page(operator, url(Leased)).count("a script or a past worker") == 2


def test_state_filter_finds_exactly_that_state(operator: Client, four_states: dict[str, int]) -> None:
    for state, seq in four_states.items():
        assert listed(operator, Leased, f"?state={state}") == [seq]


def test_delivered_filter(operator: Client, four_states: dict[str, int]) -> None:
    ready, leased, lease_expired, expired = four_states.values()
    assert listed(operator, Leased, "?delivered=no") == [ready, expired]
    assert listed(operator, Leased, "?delivered=yes") == [leased, lease_expired]
    assert listed(operator, Leased, "?delivered=cancelled") == [lease_expired]


@pytest.mark.parametrize("query", ["?state=nonsense", "?delivered=maybe", "?state=", "?seq__gte=x"])
def test_a_filter_that_is_not_understood_is_not_ignored(operator: Client, query: str) -> None:
    assert operator.get(url(Leased) + query)["Location"] == url(Leased) + "?e=1"


@pytest.mark.parametrize("queue", [Urgent, AddressedUrgent])
def test_priority_filter(operator: Client, queue: Any) -> None:
    for priority in (0, 2, 1, 2):
        queue.send(
            {},
            priority=priority,
            **({"recipient": "me", "unknown_recipient": True} if queue is AddressedUrgent else {}),
        )
    assert [row.priority for row in operator.get(url(queue) + "?priority=2").context["cl"].result_list] == [2, 2]


def test_the_priority_of_waiting_messages_is_changed_where_the_queue_has_levels(operator: Client) -> None:
    Urgent.send({"n": 1}, priority=0)
    Leased.send({"n": 1})
    (key,) = Urgent.objects.values_list("pk", flat=True)
    assert notes(operate(operator, Urgent, "set_priority", key, priority="2")) == ["1 message given the priority."]
    assert Urgent.objects.get().priority == 2
    [refused] = notes(operate(operator, Urgent, "set_priority", key, priority="99"))
    assert "Refused: testapp.Urgent: priority = 99 is not accepted" in refused
    offered = operator.get(url(Leased)).context["action_form"].fields["action"].choices
    assert "set_priority" not in dict(offered)


def test_a_filter_by_age(operator: Client) -> None:
    Leased.send_many([{"n": 1}, {"n": 2}])
    old = Leased.objects.order_by("pk")[0]
    Leased.objects.filter(pk=old.pk).update(enqueued_at=Now() - timedelta(hours=2))
    for query, count in (("?age=hour", 1), ("?age=day", 0), ("?age=minute", 1)):
        assert operator.get(url(Leased) + query).context["cl"].result_count == count


def test_list_can_be_reversed_but_not_sorted_by_a_column_without_index(operator: Client) -> None:
    Leased.send_many({"n": n} for n in range(3))
    seqs = list(Leased.objects.values_list("pk", flat=True))
    cl = operator.get(url(Leased)).context["cl"]
    assert listed(operator, Leased, f"?o=-{cl.list_display.index('seq')}") == seqs[::-1]
    assert listed(operator, Leased, f"?o=-{cl.list_display.index('delivery_count')}") == seqs


# -- search --------------------------------------------------------------------------------------------------------


def test_search_finds_a_seq_a_whole_id_and_its_beginning(operator: Client) -> None:
    wanted = uuid.UUID("0198c0de-1234-7abc-8def-001122334455")
    Leased.send_many({"n": n} for n in range(3))
    Leased.send({}, message_id=wanted)
    seq = Leased.objects.get(id=wanted).pk
    for term in (str(seq), str(wanted), str(wanted).upper(), wanted.hex, "0198c0de-12", " 0198c0de1234 "):
        assert listed(operator, Leased, f"?q={term}") == [seq], term
    assert listed(operator, Leased, "?q=0198c0df") == []


def test_search_for_nonsense_finds_nothing(operator: Client) -> None:
    Leased.send({})
    for term in ("'; DROP TABLE x", "xyz", "zz", "1" * 400, "%25", "\u202e", "header:", "x=", "id:"):
        response = operator.get(url(Leased), {"q": term})
        assert list(response.context["cl"].result_list) == [], term


@pytest.mark.parametrize("query", ["?body__contains=x", "?headers__icontains=x", "?lease_token__isnull=1", "?id=7"])
def test_look_ups_without_an_index_are_refused(operator: Client, query: str) -> None:
    assert operator.get(url(Leased) + query).status_code == 400


# -- the page of one message ---------------------------------------------------------------------------------------


def test_page_shows_facts_lease_failures_headers_and_body(operator: Client, four_states: dict[str, int]) -> None:
    Leased.objects.filter(pk=four_states["leased"]).update(
        headers='{"trace-id":"t-1"}',
        body=b'{"flight":"UA 1"}',
        failures='[{"at":"2026-11-20T19:22:01","attempt":1,"exception":"ValueError: no '
        'gate","verdict":"RetryNow","host":"h"}]',
        correlation_id="order-7",
    )
    text = page(operator, url(Leased, "change", four_states["leased"]))
    lease = Leased.objects.get(pk=four_states["leased"])
    for expected in ("t-1", "ValueError: no gate", "order-7", "worker-1:4711", str(lease.lease_token), str(lease.id)):
        assert expected in text
    assert escape('{\n  "flight": "UA 1"\n}') in text


def test_body_is_downloaded_as_it_is_stored_and_never_opened(operator: Client, settings: Any) -> None:
    settings.SECURE_CONTENT_TYPE_NOSNIFF = False  # of the site; that of a body is not a matter of the site
    identity = Leased.send(b"<script>alert(1)</script>\x00\xff")
    response = operator.get(url(Leased, "body", Leased.objects.get().pk))
    assert response.content == b"<script>alert(1)</script>\x00\xff"
    assert response["Content-Type"] == "application/octet-stream"
    assert response["Content-Disposition"] == f'attachment; filename="{identity}.bin"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in response["Content-Security-Policy"]
    assert "no-store" in response["Cache-Control"]


def test_a_message_that_is_gone_leads_back_to_the_list(operator: Client) -> None:
    for key in ("99", "0", "-1", "x", "9" * 30):
        response = operator.get(url(Leased, "change", key), follow=True)
        assert response.redirect_chain[0][0] == url(Leased)
        assert "is gone" in notes(response)[0]
    assert operator.get(url(Leased, "body", 99)).status_code == 404


def test_nothing_can_be_added_or_changed(operator: Client) -> None:
    Leased.send({"n": 1})
    seq = Leased.objects.get().pk
    assert operator.get(url(Leased, "add")).status_code == 403
    assert operator.post(url(Leased, "add"), {"headers": "{}"}).status_code == 403
    assert operator.post(url(Leased, "change", seq), {"headers": '{"a":"b"}', "_save": "1"}).status_code == 403
    assert Leased.objects.get().headers == '{"content-type":"application/json"}'


# -- who may see it, and what else may be wrong --------------------------------------------------------------------


def test_view_permission_of_one_queue_opens_that_queue_only(staff: Callable[..., Client]) -> None:
    viewer = staff("testapp.view_leased")
    Leased.send({})
    Urgent.send({})
    assert viewer.get(url(Leased)).status_code == 200
    assert viewer.get(url(Urgent)).status_code == 403
    for name in ("change", "body", "history"):
        assert viewer.get(url(Leased, name, Leased.objects.get().pk)).status_code == 200
        assert viewer.get(url(Urgent, name, Urgent.objects.get().pk)).status_code == 403


def test_anonymous_is_sent_to_the_login(db: None, client: Client) -> None:
    for address in (url(Leased), url(Leased, "change", 1), url(Leased, "body", 1), url(QueueControl)):
        assert "/login/" in client.get(address)["Location"]


def test_missing_table_is_a_note_not_a_crash(operator: Client) -> None:
    for address in (url(ForeignPostgres), url(ForeignPostgres, "change", 7)):
        response = operator.get(address, follow=True)
        assert response.redirect_chain[0][0] == url(QueueControl)
        assert "'foreign_postgres' does not exist" in notes(response)[0]


def test_missing_table_is_a_note_for_those_who_may_not_see_the_overview(staff: Callable[..., Client]) -> None:
    response = staff("testapp.view_foreignpostgres").get(url(ForeignPostgres), follow=True)
    assert response.redirect_chain[0][0] == "/admin/"
    assert "does not exist" in notes(response)[0]


def test_a_users_own_page_for_a_queue_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnPage(QueueAdmin):
        list_per_page = 3

    own_page = OwnPage(Leased, admin.site)
    # Its entries, not the registry: ``admin.site`` is lazy, and undoing a ``setattr`` would take the attribute from the
    # site.
    monkeypatch.setitem(admin.site._registry, Leased, own_page)
    monkeypatch.delitem(admin.site._registry, Urgent)
    site.register()
    assert admin.site._registry[Leased] is own_page
    assert type(admin.site._registry[Urgent]) is QueueAdmin
