"""The statements that stand for NServiceBus' are T-SQL, and name columns that their tables and ours have."""

from __future__ import annotations

import re

import pytest
from sqlglot import exp

from tests import nservicebus
from tests.nservicebus import CREATING, KEEPING_NOCOUNT, SQLSERVER
from tests.queueapp.sql.tsql import columns, hints, parsed
from tests.testapp.models import Interop

CATALOG = {"object_id", "index_id", "key_ordinal", "column_id", "system_type_id", "name", "type"}
COLUMNS = {field.column.lower() for field in Interop._meta.local_fields} | {"rowversion"}
DELAYED = {"Due", "Headers", "Body", "RowVersion"}


def read(name: str) -> list[exp.Expression]:
    text = SQLSERVER[name].format(queue="dbo.orders", delayed="dbo.orders_delayed").replace("%s", "?")
    # What the parser does not know: a filtered index, and a list of columns behind OUTPUT INTO.
    found = re.search(r"INTO dbo\.orders \((?P<columns>[\w, ]+)\)$", text.strip()) if " OUTPUT " in text else None
    if found:
        assert {name.lower() for name in found["columns"].split(", ")} <= COLUMNS
        text = text.strip()[: found.start()]
    return parsed(re.sub(r"WHERE Expires IS NOT NULL$", "", text.strip()))


@pytest.mark.parametrize("name", SQLSERVER)
def test_statement_is_read_completely(name: str) -> None:
    named = {column.lower() for column in columns(read(name)) - CATALOG - DELAYED}
    assert named <= COLUMNS, "their statement finds each column in our table"


def test_the_frames_hold_a_whole_statement() -> None:
    for frame in (KEEPING_NOCOUNT, CREATING):
        assert frame.count("{statement}") == 1
    assert set(nservicebus._COUNTED) <= set(SQLSERVER)


def test_their_receive_skips_what_is_locked_as_ours_does() -> None:
    assert list(hints(read("receive"))) == [("orders", {"UPDLOCK", "READPAST", "ROWLOCK"})]
    assert list(hints(read("peek"))) == [("orders", {"READPAST", "READCOMMITTEDLOCK"})]
