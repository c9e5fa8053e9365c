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
        return next((item for item in sorted(self.connection, key=lambda item: item.due) if item.due <= at), None)

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
        return min((item.due for item in self.connection), default=None)

    def _fail(self, verb: str) -> None:
        if (fault := type(self).faults.get(verb)) is not None:
            raise fault


class WholeStore(SampleStore):
    """With all that operators ask for."""

    def cancel(self, message_id: uuid.UUID) -> int:
        before = len(self.connection)
        self.connection[:] = [message for message in self.connection if message.message_id != message_id]
        return before - len(self.connection)

    def reschedule(self, message_id: uuid.UUID, due: datetime) -> int:
        found = [message for message in self.connection if message.message_id == message_id]
        for item in found:
            item.due = due
        return len(found)

    def count(self, destination: str, limit: int) -> int:
        self._fail("count")
        return min(limit, sum(1 for item in self.connection if item.destination == destination))

    def readdress(self, destination: str, to: str, limit: int) -> int:
        found = sorted(
            (candidate for candidate in self.connection if candidate.destination == destination),
            key=lambda candidate: candidate.due,
        )[:limit]
        for item in found:
            item.destination, item.retries = to, 0
        return len(found)


def order(request: HttpRequest) -> HttpResponse:
    """A view that sends a delayed message."""
    return HttpResponse(str(Leased.send({"from": "a view"}, delay=timedelta(hours=1))))


urlpatterns = [path("order", order)]
