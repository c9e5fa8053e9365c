"""The page of message groups: what it shows, closing a group and completing one by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from queueapp import Group
from queueapp.models import MessageGroup
from queueapp.operations import control
from tests.testapp.models import Grouped, Leased

from .conftest import notes, url

pytestmark = pytest.mark.django_db


def act(client: Client, action: str, group: Group) -> Any:
    return client.post(url(MessageGroup), {"action": action, "_selected_action": [str(group.id)]}, follow=True)


def test_a_group_is_shown_closed_and_completed(operator: Client) -> None:
    group = Group(on_complete=Leased.prepare("whole"), name="<b>night</b>").open()
    group.send(Grouped, {"n": 1})
    group.send(Grouped, {"n": 2})
    control.move_to_poison(Grouped, [Grouped.objects.order_by("seq")[0].seq], reason="by hand")

    listed = operator.get(url(MessageGroup)).content.decode()
    assert "&lt;b&gt;night&lt;/b&gt;" in listed
    assert ">not complete<" in listed
    page = operator.get(url(MessageGroup, "change", str(group.id))).content.decode()
    assert ">open<" in page
    assert ": poison" in page

    assert "1 group closed." in notes(act(operator, "close", group))
    assert ">waiting<" in operator.get(url(MessageGroup, "change", str(group.id))).content.decode()
    assert "1 group completed." in notes(act(operator, "complete", group))
    assert group.counts() == (0, 0, 2)
    assert Leased.objects.count() == 1
    assert "0 groups completed." in notes(act(operator, "complete", group))


def test_the_name_of_a_group_deceives_no_reader_of_its_page(operator: Client) -> None:
    group = Group(name="evil\u202eexe.gpj").open()
    page = operator.get(url(MessageGroup, "change", str(group.id))).content.decode()
    assert "\u202e" not in page
    assert "evil⟨U+202E⟩exe.gpj" in page


def test_who_may_not_operate_completes_nothing(staff: Callable[..., Client]) -> None:
    group = Group().open()
    act(staff("queueapp.view_messagegroup"), "complete", group)
    assert not group.is_complete
