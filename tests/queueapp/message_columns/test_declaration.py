"""The declaration, what has to be written beside it, and what is refused because it is not declared."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import models

from queueapp import InvalidMessage
from queueapp.models import StoredMessage
from queueapp.models.queue import QueueModel
from queueapp.sql.message_columns import BY_NAME, NO_OPTIONS, OPTIONS, Kind, MessageColumn, Outgoing
from tests.in_process_worker import real_commits
from tests.queueapp.message_columns.each import each_column
from tests.testapp.models import Leased

FIELDS = {
    Kind.TEXT: models.CharField,
    Kind.INT16: models.SmallIntegerField,
    Kind.BOOL: models.BooleanField,
    Kind.TIME: models.DateTimeField,
}


@each_column
@pytest.mark.parametrize("model", [QueueModel, StoredMessage])
def test_the_models_have_the_column_as_it_is_declared(one: MessageColumn, model: Any) -> None:
    field = model._meta.get_field(one.name)

    # Outside of its queue a priority may be one of 64 bits.
    wide = one.kind is Kind.INT16 and model is StoredMessage
    assert isinstance(field, models.BigIntegerField if wide else FIELDS[one.kind])
    assert field.null == (one.default is None and one.sent)
    assert field.has_db_default() == (not field.null), "a foreign producer inserts only the columns that it knows"
    if one.default is not None:
        assert field.db_default == one.default
    if one.kind is Kind.TEXT:
        assert field.max_length == one.max_length


def test_what_is_sent_has_the_order_it_always_had() -> None:
    told = (timedelta(1), "r", 2, "c", "a", True)
    assert (OPTIONS[:6], NO_OPTIONS[:6]) == (
        ("expires", "recipient", "priority", "correlation_id", "reply_to_address", "is_barrier"),
        (None, "", 0, None, None, False),
    )
    assert Outgoing(uuid.UUID(int=1), "{}", b"", *told)[3:9] == told


@real_commits
def test_what_no_message_carries_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        Leased.send({}, colour="red")
    with pytest.raises(InvalidMessage, match="is_barrier = 1 is not accepted: True or False"):
        Leased.send({}, is_barrier=1)
    assert not Leased.objects.exists()
    assert "is_barrier" in BY_NAME
