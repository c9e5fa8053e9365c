"""The default of a field that ``MessageSet.insert_into`` does not name: a value for each row, or refused."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import isolate_apps
from django.utils import timezone

from queueapp.consuming.consumers import MessageSet
from queueapp.errors import InvalidOption
from tests.testapp.models import InSets

pytestmark = pytest.mark.django_db


class NumberedField(models.CharField):
    """A field whose value is made when an object is saved."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return secrets.token_hex(4)


with isolate_apps("tests.testapp"):  # no model of the project: migrations do not know it

    class Ticket(models.Model):
        id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
        slug = models.CharField(max_length=36, default=uuid.uuid4)
        number = models.TextField()
        at = models.DateTimeField(default=timezone.now)
        options = models.JSONField(default=dict)
        remark = models.TextField(null=True)
        label = models.CharField(max_length=9)
        secret = models.CharField(max_length=64, default=secrets.token_hex)

        class Meta:
            app_label = "testapp"
            managed = False

    class Numbered(models.Model):
        number = NumberedField(max_length=20)

        class Meta:
            app_label = "testapp"
            managed = False


@pytest.fixture
def messages() -> Iterator[MessageSet]:
    with connection.schema_editor() as editor:
        editor.create_model(Ticket)
    InSets.send_many({"number": number} for number in range(3))
    yield MessageSet(InSets, "default", list(InSets.objects.values_list("seq", flat=True)))
    with connection.schema_editor() as editor:
        editor.delete_model(Ticket)


def test_uuid4_gives_each_row_a_value_of_its_own(messages: MessageSet) -> None:
    assert messages.insert_into(Ticket, number=messages.body("number"), secret="given") == 3

    rows: list[Any] = list(Ticket.objects.order_by("number"))
    assert [row.number for row in rows] == ["0", "1", "2"]
    assert len({row.pk for row in rows}) == len({row.slug for row in rows}) == 3
    assert all(uuid.UUID(row.slug).version == row.pk.version == 4 for row in rows)
    assert [row.options for row in rows] == [{}, {}, {}]
    # As ``save()`` stores a field without a default.
    assert {(row.remark, row.label) for row in rows} == {(None, "")}


def test_default_that_only_python_can_compute_is_refused_by_the_name_of_its_field(messages: MessageSet) -> None:
    with pytest.raises(InvalidOption, match=r"insert_into\(Ticket\): secret = .*must be given in the call"):
        messages.insert_into(Ticket, number=messages.body("number"))

    assert not Ticket.objects.exists()


@pytest.mark.parametrize("function", [secrets.token_hex, lambda: "x", timezone.now])
def test_function_in_place_of_a_value_is_refused(messages: MessageSet, function: Any) -> None:
    with pytest.raises(InvalidOption, match=r"insert_into\(Ticket\): secret = .*a value or an expression"):
        messages.insert_into(Ticket, number=messages.body("number"), secret=function)

    assert not Ticket.objects.exists()


def test_uuid4_in_place_of_a_value_gives_each_row_one_of_its_own(messages: MessageSet) -> None:
    assert messages.insert_into(Ticket, number=messages.body("number"), secret=uuid.uuid4) == 3

    assert Ticket.objects.values("secret").distinct().count() == 3


def test_field_that_is_computed_when_an_object_is_saved_is_refused_by_its_name(messages: MessageSet) -> None:
    with pytest.raises(InvalidOption, match=r"insert_into\(Numbered\): number = .*pre_save"):
        messages.insert_into(Numbered)
