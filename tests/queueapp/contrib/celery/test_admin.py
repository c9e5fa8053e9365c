"""The admin's pages of declared queues and of pending migrations."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.test import Client
from django.utils import timezone

from queueapp.contrib.celery.models import Binding, BrokerQueue, DeclaredQueue, PendingMove
from queueapp.models import DelayedMessage, Now, Subscriber
from tests.queueapp.admin.conftest import notes, operate, url
from tests.queueapp.admin.conftest import operator as operator
from tests.queueapp.admin.conftest import staff as staff

pytestmark = pytest.mark.django_db
HOSTILE = '<script>alert("x")</script>\u202e:/?&a=b'
LABEL = BrokerQueue._meta.label


@pytest.fixture
def queues(db: None) -> dict[str, DeclaredQueue]:
    """Two queues: one with a hostile name, bound twice and with messages of all kinds, and an unused one."""
    ends = timezone.now() + timedelta(minutes=1)
    rows = [
        DeclaredQueue(name=HOSTILE, durable=True, arguments=json.dumps({"x-max": HOSTILE}), message_ttl_ms=1500),
        DeclaredQueue(name="gone soon", auto_delete=True, expires_ms=60_000, expires_at=ends),
    ]
    DeclaredQueue.objects.bulk_create(rows)
    Binding.objects.create(exchange=HOSTILE, routing_key=HOSTILE, queue=HOSTILE)
    Binding.objects.create(exchange="amq.fanout", queue=HOSTILE)
    for _ in range(3):
        BrokerQueue.send(b"{}", recipient=HOSTILE)
    leased = BrokerQueue.objects.first()
    BrokerQueue.objects.filter(pk=leased.pk).update(
        lease_token=uuid.uuid4(), lease_owner=uuid.uuid4(), lease_expires=ends
    )
    BrokerQueue.send(b"{}", recipient=HOSTILE, delay=timedelta(hours=1))
    return {row.name: row for row in rows}


def key(name: str) -> str:
    from django.contrib.admin.utils import quote

    return quote(f"default:{name}")


def test_queues_are_listed_with_their_figures(operator: Client, queues: Any) -> None:
    page = operator.get(url(DeclaredQueue))

    text = page.content.decode()
    assert page.status_code == 200
    for expected in (
        "Celery queues",
        "1 in flight",
        "1 delayed",
        "amq.fanout",
        "durable",
        "auto-delete",
        "none",
    ):
        assert expected in text
    of = {row.name: row.figures for row in page.context["cl"].result_list}
    assert (of[HOSTILE].waiting, of[HOSTILE].leased, of["gone soon"].waiting) == (2, 1, 0)
    assert "<script>alert(" not in text
    assert "\u202e" not in re.sub(r'value="[^"]*"', "", text), "but as what a checkbox sends"


def test_a_queue_has_a_page_whatever_its_name(operator: Client, queues: Any) -> None:
    found = operator.get(url(DeclaredQueue, "change", key(HOSTILE)))

    text = found.content.decode()
    assert found.status_code == 200
    assert "1.500 s" in text
    assert "x-max" in text
    assert "<script>alert(" not in text
    assert "\u202e" not in text
    for name in ("nothing", "a\0b", ":", "default:"):
        assert operator.get(url(DeclaredQueue, "change", key(name))).status_code == 302


def test_a_queue_leads_to_its_history_and_back(operator: Client, queues: Any) -> None:
    page, history = (url(DeclaredQueue, name, key(HOSTILE)) for name in ("change", "history"))
    assert f'href="{history}"' in operator.get(page).content.decode()
    assert "No entries." in operator.get(history).content.decode()
    operate(operator, DeclaredQueue, "purge", HOSTILE)
    text = operator.get(history).content.decode()
    assert "Purge: 3 messages." in text
    assert f'href="{page}"' in text


def test_a_queue_is_found_by_the_beginning_of_its_name(operator: Client, queues: Any) -> None:
    def listed(query: str) -> list[str]:
        return [row.name for row in operator.get(url(DeclaredQueue), {"q": query}).context["cl"].result_list]

    assert listed("gone") == ["gone soon"]
    assert listed("soon") == []
    assert operator.get(url(DeclaredQueue), {"q": "\0"}).status_code in (200, 302)
    assert operator.get(url(DeclaredQueue), {"arguments__contains": "x"}).status_code in (302, 400)


def test_purge_leaves_messages_in_flight(operator: Client, queues: Any) -> None:
    page = operate(operator, DeclaredQueue, "purge", HOSTILE)

    assert notes(page) == ["3 messages deleted from 1 queue."]
    assert BrokerQueue.objects.filter(recipient=HOSTILE).count() == 1
    assert not DelayedMessage.objects.exists()
    assert DeclaredQueue.objects.count() == 2
    assert "Purge: 3 messages." in LogEntry.objects.get().change_message


def test_delete_takes_the_queue_its_bindings_and_its_messages(operator: Client, queues: Any) -> None:
    page = operate(operator, DeclaredQueue, "delete_queues", HOSTILE)

    assert notes(page) == ["4 messages deleted from 1 queue."]
    assert list(DeclaredQueue.objects.values_list("name", flat=True)) == ["gone soon"]
    assert not Binding.objects.exists()
    assert not BrokerQueue.objects.exists()
    assert not DelayedMessage.objects.exists()
    assert LogEntry.objects.get().action_flag == DELETION

    for answer in ({}, {"confirmed": "yes"}):  # a colleague, who still has it on the screen
        data = {"action": "delete_queues", "_selected_action": [HOSTILE], **answer}
        (note,) = notes(operator.post(url(DeclaredQueue), data, follow=True))
        assert "Another operator has handled them" in note


def test_a_queue_that_a_live_worker_takes_from_is_not_deleted(operator: Client, queues: Any) -> None:
    Subscriber.objects.create(
        supervisor=uuid.uuid4(), id=uuid.uuid4(), queue=LABEL, process=1, consumers=json.dumps([(HOSTILE, "")]),
        heartbeat_at=Now(), alive_until=timezone.now() + timedelta(minutes=1),
    )  # fmt: skip
    assert "active consumer" in operator.get(url(DeclaredQueue)).content.decode()

    page = operate(operator, DeclaredQueue, "delete_queues", HOSTILE, "gone soon")

    assert "1 skipped: a live worker consumes it" in notes(page)[0]
    assert list(DeclaredQueue.objects.values_list("name", flat=True)) == [HOSTILE]
    assert BrokerQueue.objects.count() == 3


def test_each_operation_on_a_queue_has_its_permission(staff: Callable[..., Client], queues: Any) -> None:
    assert staff().get(url(DeclaredQueue)).status_code == 403
    seer = staff("queueapp_celery.view_declaredqueue")
    assert seer.get(url(DeclaredQueue)).status_code == 200
    for client, done in (
        (seer, set()),
        (staff("queueapp.operate_queue"), {"purge"}),
        (staff("queueapp_celery.view_declaredqueue", "queueapp_celery.delete_declaredqueue"), {"delete_queues"}),
    ):
        offered = {
            name
            for name in ("purge", "delete_queues")
            if f'value="{name}"' in client.get(url(DeclaredQueue)).content.decode()
        }
        assert offered == done
    for operation in ("purge", "delete_queues"):
        seer.post(url(DeclaredQueue), {"action": operation, "_selected_action": [HOSTILE], "confirmed": "yes"})
    assert (DeclaredQueue.objects.count(), BrokerQueue.objects.count()) == (2, 3)
    assert seer.post(url(DeclaredQueue, "delete", key(HOSTILE)), {"post": "yes"}).status_code == 403


@pytest.fixture
def aside(db: None) -> PendingMove:
    headers = json.dumps({"type": HOSTILE, "kombu": HOSTILE})
    return PendingMove.objects.create(message_id=uuid.uuid4(), queue=HOSTILE, headers=headers, body=b'["secret"]')


def test_pending_migrations_are_shown(operator: Client, aside: PendingMove) -> None:
    PendingMove.objects.create(message_id=uuid.uuid4(), queue="q", headers="{no json", body=None)
    listed = operator.get(url(PendingMove)).content.decode()
    page = operator.get(url(PendingMove, "change", aside.pk)).content.decode()

    assert "Pending migrations" in listed
    assert str(aside.message_id) in listed
    assert "secret" in page
    for text in (listed, page):
        assert "<script>alert(" not in text
        assert "\u202e" not in text
    assert [row.pk for row in operator.get(url(PendingMove), {"q": HOSTILE}).context["cl"].result_list] == [aside.pk]
    for wrong in ("nonsense", 10**30):
        assert operator.get(url(PendingMove, "change", wrong)).status_code == 302


def test_pending_migrations_are_read_only_and_bodies_need_permission(
    staff: Callable[..., Client], aside: PendingMove
) -> None:
    assert staff().get(url(PendingMove)).status_code == 403
    seer = staff("queueapp_celery.view_pendingmove")
    assert seer.get(url(PendingMove)).status_code == 200
    assert "secret" not in seer.get(url(PendingMove, "change", aside.pk)).content.decode()
    both = staff("queueapp_celery.view_pendingmove", "queueapp_celery.view_brokerqueue")
    assert "secret" in both.get(url(PendingMove, "change", aside.pk)).content.decode()
    assert both.post(url(PendingMove, "delete", aside.pk), {"post": "yes"}).status_code == 403
