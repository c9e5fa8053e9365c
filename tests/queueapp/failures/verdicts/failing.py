"""What the tests of recording share: one message whose attempt fails, received in one of three ways, and rude things to
fail with."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection

from queueapp.consuming.registry import Registration
from queueapp.failures.apply_verdict import fail, fail_taken
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import Row
from tests.testapp.models import AtMostOnce, Leased, Transactional

BODY = b"\0\xff intact"


class Failed(ValueError):
    """What the handler of a test raised."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Untouchable(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("do not ask")


class Fussy(Exception, metaclass=Untouchable):
    """``isinstance`` raises."""


def consumer(policy: Any = None, **options: Any) -> Registration:
    return Registration(Leased, "tests", Any, lambda message: None, {"policy": policy, "attempts": 3} | options)


def deciding(verdict: Any) -> Registration:
    return consumer(lambda failure: verdict)


@dataclass
class Message:
    """One message whose attempt fails, received in one of three ways."""

    queue: Any

    def put(self, headers: str = '{"k":"v"}', **columns: Any) -> None:
        row = Row(0, uuid.uuid4(), headers, BODY, **columns)
        queue_sql(self.queue, connection).inserts.insert_row(connection, row)

    def fail(self, who: Registration | None, error: BaseException | None = None, **options: Any) -> Any:
        sql, token = queue_sql(self.queue, connection), uuid.uuid4()
        error = error or Failed("bad")
        levels = [SeqRange()]
        if self.queue is AtMostOnce:
            (claimed,) = sql.claims.claim_by_delete(connection, levels, 1, whole=True)
            return fail_taken(self.queue, "default", sql.table.row_of(claimed), error, consumer=who, **options)
        if self.queue is Leased:
            (claimed,) = sql.claims.claim_by_lease(connection, levels, 1, token, token, 60_000)
            return fail(self.queue, "default", claimed[0], error, consumer=who, token=token, **options)
        seq = self.queue.objects.values_list("seq", flat=True).get()
        return fail(self.queue, "default", seq, error, consumer=who, token=None, **options)

    def kept(self) -> PoisonMessage:
        """It is poison and nowhere else, whole."""
        assert not self.queue.objects.exists()
        assert not DelayedMessage.objects.exists()
        row = PoisonMessage.objects.get()
        assert row.body == BODY
        assert row.queue == self.queue._meta.label
        return row


EVERY = pytest.mark.parametrize("message", [Message(Leased), Message(Transactional), Message(AtMostOnce)],
                                ids=lambda item: item.queue.__name__)  # fmt: skip
IN_ITS_TABLE = pytest.mark.parametrize("message", [Message(Leased), Message(Transactional)],
                                       ids=lambda item: item.queue.__name__)  # fmt: skip
