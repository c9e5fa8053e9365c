"""The overview outside of the admin: read-only, with a permission of its own, refreshed by rows."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from queueapp.urls import PART
from tests.testapp.models import Leased

pytestmark = pytest.mark.django_db
PAGE = "/queues/"


def client_of(*permissions: str) -> Client:
    user = User.objects.create_user("reader", password="x")
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def test_a_user_with_the_permission_sees_the_queues_and_no_operation() -> None:
    Leased.send_many({"n": n} for n in range(3))
    client = client_of("view_queuecontrol")
    text = client.get(PAGE).content.decode()
    assert '<tbody data-queue="testapp.Leased">' in text
    assert "<form" not in text
    assert client.post(PAGE).status_code == 405
    rows = client.get(PAGE, headers={PART: "rows"})
    assert "<html" not in rows.content.decode()
    assert '<tbody data-queue="testapp.Leased">' in rows.content.decode()
    assert "Vary" in rows.headers


@pytest.mark.parametrize("permissions", [(), ("view_leased", "view_poisonmessage")])
def test_others_are_refused(permissions: tuple[str, ...]) -> None:
    assert client_of(*permissions).get(PAGE).status_code == 403


def test_anonymous_users_are_sent_to_the_login(settings: Any) -> None:
    settings.LOGIN_URL = "/admin/login/"
    response = Client().get(PAGE)
    assert (response.status_code, response.headers["Location"]) == (302, "/admin/login/?next=/queues/")
