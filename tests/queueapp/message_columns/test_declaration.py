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
def test_the_models_have_the_column_as_it_is_declared(column: MessageColumn, model: Any) -> None:
    field = model._meta.get_field(column.name)

    # Outside of its queue a priority may be one of 64 bits.
    wide = column.kind is Kind.INT16 and model is StoredMessage
    assert isinstance(field, models.BigIntegerField if wide else FIELDS[column.kind])
    assert field.null == (column.default is None and column.sent)
    assert field.has_db_default() == (not field.null), "a foreign producer inserts only the columns that it knows"
    if column.default is not None:
        assert field.db_default == column.default
    if column.kind is Kind.TEXT:
        assert field.max_length == column.max_length


def test_what_is_sent_has_the_order_it_always_had() -> None:
    reported = (timedelta(1), "r", 2, "c", "a", True)
    assert (OPTIONS[:6], NO_OPTIONS[:6]) == (
        ("expires", "recipient", "priority", "correlation_id", "reply_to_address", "is_barrier"),
        (None, "", 0, None, None, False),
    )
    assert Outgoing(uuid.UUID(int=1), "{}", b"", *reported)[3:9] == reported


@real_commits
def test_what_no_message_carries_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        Leased.send({}, colour="red")
    with pytest.raises(InvalidMessage, match="is_barrier = 1 is not accepted: True or False"):
        Leased.send({}, is_barrier=1)
    assert not Leased.objects.exists()
    assert "is_barrier" in BY_NAME
