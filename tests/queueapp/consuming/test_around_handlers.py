"""A context manager around every handler: the tenant that a header names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from django.db import connections

from queueapp import BatchContext, Context, Queue, consumer
from queueapp.consuming.registry import registered
from queueapp.testing import Kit
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually
from tests.testapp.models import Addressed, AtMostOnce, Leased, Transactional

tenant: ContextVar[str] = ContextVar("tenant", default="public")
seen: list[str] = []


@contextmanager
def in_tenant(context: Any) -> Iterator[None]:
    if isinstance(context, BatchContext):
        names = {message.headers["tenant"] for message in context}
        assert len(names) == 1, "a batch of several tenants"
        name = names.pop()
    else:
        name = context.headers["tenant"]
    before = tenant.set(name)
    seen.append(f"{name} begins")
    try:
        yield
    finally:
        seen.append(f"{name} ends")
        tenant.reset(before)


@pytest.fixture(autouse=True)
def within(no_consumers: None, settings: Any) -> None:
    settings.QUEUEAPP = {"HANDLER_CONTEXT_MANAGER": f"{__name__}.in_tenant", "ATTEMPTS": 1, "PEEK_DELAY": 0.1}
    seen.clear()


@pytest.mark.django_db
@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_a_handler_runs_within_it_sync_and_async(queue_kit: Kit, queue: type[Queue]) -> None:
    @consumer(queue)
    def note(message: dict) -> None:
        seen.append(tenant.get())

    queue.send({}, headers={"tenant": "a"})
    queue_kit.drain()
    registered.remove(registered.of(queue)[0].name)

    @consumer(queue)
    async def anote(message: dict, context: Context) -> None:
        await asyncio.sleep(0)
        seen.append(tenant.get())

    queue.send({}, headers={"tenant": "b"})
    queue_kit.drain()
    assert seen == ["a begins", "a", "a ends", "b begins", "b", "b ends"]
    assert tenant.get() == "public"


@pytest.mark.django_db
def test_what_it_raises_fails_the_attempt_and_what_a_handler_raises_leaves_it(queue_kit: Kit) -> None:
    @consumer(Leased)
    def fail(message: dict) -> None:
        raise ValueError("no")

    Leased.send({})
    Leased.send({}, headers={"tenant": "a"})
    first, second = queue_kit.drain()
    assert (type(first.error), type(second.error)) == (KeyError, ValueError)
    assert seen == ["a begins", "a ends"]


@pytest.mark.django_db
def test_a_batch_is_within_one(queue_kit: Kit) -> None:
    @consumer(Leased, batch=5)
    def both(messages: list[dict]) -> None:
        seen.append(tenant.get())

    Leased.send({}, headers={"tenant": "a"})
    queue_kit.drain()
    assert seen == ["a begins", "a", "a ends"]


@pytest.mark.django_db
def test_what_the_engine_does_itself_is_outside(queue_kit: Kit) -> None:
    Addressed.send({}, headers={"tenant": "a"})
    for name in ("one", "two"):
        consumer(Addressed, name=name)(lambda message: seen.append(tenant.get()))
    queue_kit.drain()
    assert seen == ["a begins", "a", "a ends"] * 2


@pytest.mark.parametrize(
    "alias", [pytest.param(alias, marks=marks_of(alias), id=kind) for kind, alias in DATABASES.items()]
)
def test_a_worker_gives_each_message_its_own(alias: str) -> None:
    found: list[tuple[str, str]] = []
    consumer(Leased)(lambda message: found.append((message["of"], tenant.get())))
    for n in range(10):
        Leased.send({"of": f"t{n}"}, headers={"tenant": f"t{n}"}, using=alias)
    worker = Worker(Leased, alias, concurrency=2).start()
    try:
        eventually(lambda: worker.pump.stats.handled == 10)
    finally:
        worker.stop()
        connections[alias].close()
    assert sorted(found) == [(f"t{n}", f"t{n}") for n in range(10)]
