"""Limits of a queue set from the overview."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from queueapp.models import QueueControl
from tests.testapp.leases import Aging
from tests.testapp.models import Capped, Leased

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client: Client) -> Client:
    user = User.objects.create_user("op", password="op", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="operate_queue"))
    client.force_login(user)
    return client


def test_max_backlog_is_set_logged_and_taken_back(operator: Client) -> None:
    address = reverse("admin:queueapp_queuecontrol_limits", args=[Capped._meta.label])
    assert b"Max backlog" in operator.post(address).content

    operator.post(address, {"confirmed": "1", "max_backlog": "3", "lease_period": "0:01:30"})
    row = QueueControl.objects.get()
    assert (row.max_backlog, str(row.lease_period)) == (3, "0:01:30")
    page = operator.get(reverse("admin:queueapp_queuecontrol_changelist")).content.decode()
    assert "max backlog 3" in page
    assert "lease period 1 min 30 s" in page
    history = operator.get(reverse("admin:queueapp_queuecontrol_history", args=[Capped._meta.label])).content.decode()
    assert "max_backlog set to 3." in history

    operator.post(address, {"confirmed": "1"})
    assert QueueControl.objects.get().max_backlog is None


def test_limits_are_those_of_the_declaration(operator: Client, client: Client) -> None:
    address = reverse("admin:queueapp_queuecontrol_limits", args=[Leased._meta.label])
    asked = operator.post(address).content.decode()
    assert "Lease period" in asked
    assert "from 100 ms to 7 d. Empty: as declared, 5 s." in asked
    for name in ("Max backlog", "Target queue depth", "Expiration"):
        assert name not in asked, "the queue declares none, and would refuse it"
    of_aging = operator.post(reverse("admin:queueapp_queuecontrol_limits", args=[Aging._meta.label])).content.decode()
    assert "Expiration" in of_aging
    refused = operator.post(address, {"confirmed": "1", "lease_period": "0:00:00.01"}).content.decode()
    assert "is not accepted" in refused
    assert not QueueControl.objects.exists()


def test_limits_need_the_permission(client: Client) -> None:
    client.force_login(User.objects.create_user("reader", password="reader", is_staff=True))
    address = reverse("admin:queueapp_queuecontrol_limits", args=[Capped._meta.label])
    assert client.post(address, {"confirmed": "1", "max_backlog": "3"}).status_code == 403
