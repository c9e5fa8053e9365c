"""The T-SQL that puts a message into every queue that is bound to an exchange: a parser reads it."""

from __future__ import annotations

import uuid

import pytest
from sqlglot import exp

from queueapp.contrib.celery.models import Binding, BrokerQueue, DeclaredQueue
from queueapp.sql.inserts import BrokerTables
from queueapp.sql.message_columns import Outgoing
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import kinds, statements_of
from tests.queueapp.sql.tsql import placeholders, tables

TABLES = BrokerTables(DeclaredQueue._meta.db_table, Binding._meta.db_table)
MESSAGE = Outgoing(uuid.uuid4(), '{"h":"SECRET"}', b"SECRET", priority=3)


@pytest.mark.parametrize("key", [None, "SECRET"])
@pytest.mark.parametrize("expires_ms", [None, 5])
@pytest.mark.parametrize("body", [None, b"SECRET"])
def test_one_statement_for_all_that_are_bound(key: str | None, expires_ms: int | None, body: bytes | None) -> None:
    message = MESSAGE._replace(expires_ms=expires_ms, body=body)

    ((sent, found),) = statements_of(
        QueueTable.of(BrokerQueue), lambda s, c, _: s.fanout.insert_routed(c, TABLES, message, "SECRET", key)
    )

    assert kinds(found) == [exp.Insert]
    assert tables(found) == {"queueapp_celery_message", *TABLES}
    assert placeholders(found) == len(sent.params)
