"""Users of the admin, and short ways to ask for its pages."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db.models import Model
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse


@pytest.fixture
def operator(db: None) -> Client:
    """A client of a superuser."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("operator", password="x"))
    return client


@pytest.fixture
def staff(db: None) -> Callable[..., Client]:
    """Makes a client of a staff user with just these permissions (``app.codename``)."""

    def make(*permissions: str) -> Client:
        user = get_user_model().objects.create_user(f"staff{make.count}", password="x", is_staff=True)
        make.count += 1
        for name in permissions:
            app, codename = name.split(".")
            user.user_permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
        client = Client()
        client.force_login(user)
        return client

    make.count = 0
    return make


def url(model: type[Model], page: str = "changelist", *args: Any) -> str:
    """The address of a page of a model's admin."""
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def operate(
    client: Client, model: type[Model], operation: str, *keys: Any, query: str = "", **more: Any
) -> HttpResponse:
    """Do an operation on selected messages: ask, answer the confirm page with yes, and return the list that follows."""
    data = {"action": operation, "_selected_action": keys, **more}
    address = url(model) + query
    asked = client.post(address, data)
    assert asked.status_code == 200, asked
    hidden = {"up_to": asked.context["hidden"][-1][1]} if more.get("select_across") else {}
    return client.post(address, {**data, **hidden, "confirmed": "yes"}, follow=True)


def notes(response: HttpResponse) -> list[str]:
    """The messages that a page shows to its user."""
    return [str(message) for message in response.context["messages"]]
