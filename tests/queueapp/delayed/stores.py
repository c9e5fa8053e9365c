"""Stores of third parties, as the tests need them: in memory, with the faults that a test gives them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path

from queueapp.delayed import Delayed, DelayedStoreWithInfrastructure
from queueapp.models.delivery import Semantics
from tests.testapp.models import Leased


class SampleStore(DelayedStoreWithInfrastructure):
    """As the sample of NServiceBus' documentation: what it needs it makes in ``setup_infrastructure`` and
    ``initialize``, and nothing works before that. Tests give it faults: what a method of that name raises."""

    #: (what, arguments) of every call of these two, in the order of all instances.
    opened: list[tuple[Any, ...]] = []
    faults: dict[str, BaseException] = {}
    #: Called in ``initialize``.
    meanwhile: Callable[[], None] | None = None
    refused: tuple[Semantics, ...] = ()

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.lock = threading.Lock()

    @classmethod
    def reset(cls) -> None:
        cls.opened, cls.faults, cls.meanwhile, cls.refused = [], {}, None, ()

    def setup_infrastructure(self) -> None:
        self._fail("setup_infrastructure")
        type(self).opened.append(("setup_infrastructure",))
        self.table: list[Delayed] = getattr(self, "table", [])

    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        self._fail("initialize")
        type(self).opened.append(("initialize", endpoint, semantics))
        if type(self).meanwhile is not None:
            type(self).meanwhile()
        if semantics in self.refused:
            raise NotImplementedError(f"{semantics} is not for this store")
        self.connection = self.table

    def store(self, message: Delayed) -> None:
        self._fail("store")
        with self.lock:
            self.connection.append(message)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        self._fail("fetch_next_due")
        return next((one for one in sorted(self.connection, key=lambda one: one.due) if one.due <= at), None)

    def remove(self, message: Delayed) -> bool:
        self._fail("remove")
        with self.lock:
            if message not in self.connection:
                return False
            self.connection.remove(message)
            return True

    def increment_failure_count(self, message: Delayed) -> bool:
        self._fail("increment_failure_count")
        message.retries += 1
        return True

    def next(self) -> datetime | None:
        self._fail("next")
        return min((one.due for one in self.connection), default=None)

    def _fail(self, verb: str) -> None:
        if (fault := type(self).faults.get(verb)) is not None:
            raise fault


class WholeStore(SampleStore):
    """With all that operators ask for."""

    def cancel(self, message_id: uuid.UUID) -> int:
        before = len(self.connection)
        self.connection[:] = [one for one in self.connection if one.message_id != message_id]
        return before - len(self.connection)

    def reschedule(self, message_id: uuid.UUID, due: datetime) -> int:
        found = [one for one in self.connection if one.message_id == message_id]
        for one in found:
            one.due = due
        return len(found)

    def count(self, destination: str, limit: int) -> int:
        self._fail("count")
        return min(limit, sum(1 for one in self.connection if one.destination == destination))

    def readdress(self, destination: str, to: str, limit: int) -> int:
        found = sorted((one for one in self.connection if one.destination == destination), key=lambda one: one.due)[
            :limit
        ]
        for one in found:
            one.destination, one.retries = to, 0
        return len(found)


def order(request: HttpRequest) -> HttpResponse:
    """A view that sends a delayed message."""
    return HttpResponse(str(Leased.send({"from": "a view"}, delay=timedelta(hours=1))))


urlpatterns = [path("order", order)]
