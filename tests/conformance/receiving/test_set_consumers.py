"""``@set_consumer``: messages that are handled where they are, in the database."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.db.models import CharField, IntegerField, Value
from django.db.models.functions import Concat

from queueapp import Discard, InvalidOption, MessageSet, Poison, consumer, set_consumer
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import DEADLINE, eventually
from tests.kill_session import kill_this
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, Effect, ForeignPostgres, Leased, SecretTransactional, Transactional
from tests.testapp.ordering import FencedTransactional

pytestmark = modes("I")

Act = Callable[[MessageSet], Any]


class Sets:
    """The consumer of a test: an effect for each message, then what the test wants."""

    def __init__(self, endpoint: Endpoint, act: Act | None = None, **options: Any) -> None:
        self.sizes: list[int] = []
        self._alias = endpoint.alias

        def handle(messages: MessageSet) -> None:
            self.sizes.append(len(messages))
            assert messages.insert_into(Effect, name=messages.body("tag"), detail=messages.body("number")) == len(
                messages
            )
            if act is not None:
                act(messages)

        set_consumer(endpoint.queue, name="sets", **options)(handle)

    @property
    def numbers(self) -> list[int]:
        return sorted(int(detail) for detail in Effect.objects.using(self._alias).values_list("detail", flat=True))


@pytest.fixture
def bad(endpoint: Endpoint) -> Act:
    """Fails where message 13 is among them."""

    def act(messages: MessageSet) -> None:
        rows = messages.rows.annotate(number=messages.body("number", output_field=IntegerField()))
        if rows.filter(number=13).exists():
            raise ValueError("thirteen")

    return act


def test_a_set_is_handled_and_gone_in_one_transaction(endpoint: Endpoint) -> None:
    reported: list[str] = []
    sets = Sets(endpoint, lambda messages: transaction.on_commit(lambda: reported.append("committed"), endpoint.alias))
    endpoint.send_many(50)
    worker = endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: reported)
    eventually(lambda: worker.pump.stats.handled == 50)
    assert sets.numbers == list(range(50))
    assert sets.sizes == [50]


@pytest.mark.parametrize(
    "tag", ["x" * 5000, "]]>", "<&>'\"\\", "ü🦄", "[1]"], ids=["long", "cdata", "marked", "unicode", "list"]
)
def test_any_text_of_a_body_can_be_had(endpoint: Endpoint, tag: str) -> None:
    seen: list[str] = []

    @set_consumer(endpoint.queue)
    def look(messages: MessageSet) -> None:
        seen.extend(messages.rows.annotate(text=messages.body("text")).values_list("text", flat=True))

    endpoint.queue.send(Nop(number=1, text=tag), using=endpoint.alias)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert seen == [tag]


def test_no_set_is_larger_than_its_size(endpoint: Endpoint) -> None:
    sets = Sets(endpoint, size=20)
    endpoint.send_many(50)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert sets.numbers == list(range(50))
    assert sets.sizes == [20, 20, 10]


def test_a_set_that_fails_is_halved_until_the_bad_one_is_judged(endpoint: Endpoint, bad: Act) -> None:
    failures: list[Any] = []
    sets = Sets(endpoint, bad, policy=lambda failure: failures.append(failure) or Poison("seen"))
    endpoint.send_many(64)
    endpoint.start(concurrency=2)
    endpoint.wait_until_empty()

    assert sets.numbers == [number for number in range(64) if number != 13]
    assert [(failure.attempt, failure.row.deliveries) for failure in failures] == [(1, 1)]
    assert b'"number":13' in bytes(endpoint.poison.get().body)


def test_attempts_are_counted_for_the_bad_one_alone(endpoint: Endpoint, bad: Act) -> None:
    sets = Sets(endpoint, bad, attempts=3, retry_delay=0)
    endpoint.send_many(16)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert sets.numbers == [number for number in range(16) if number != 13]
    assert endpoint.poison.get().attempts == 3


def test_an_update_from_a_set(endpoint: Endpoint) -> None:
    groups = Group.objects.using(endpoint.alias)
    groups.bulk_create([Group(name=f"{endpoint.tag[:20]} {n}") for n in range(6)])

    @set_consumer(endpoint.queue)
    def rename(messages: MessageSet) -> None:
        named = Concat(Value(f"{endpoint.tag[:20]} "), messages.body("number", output_field=CharField(max_length=50)))
        groups.filter(name__in=messages.rows.annotate(group=named).values("group")).update(
            name=Concat("name", Value("!"))
        )

    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert groups.filter(name__endswith="!").count() == 3
    groups.filter(name__startswith=endpoint.tag[:20]).delete()


@pytest.mark.parametrize(
    ("does", "limit", "words"),
    [
        (lambda messages: messages.rows.delete(), DEADLINE, "has deleted"),
        (lambda messages: kill_this(connections[messages.alias]), DEADLINE, "."),
        (lambda messages: time.sleep(0.4), 0.2, "."),
    ],
)
def test_what_a_handler_leaves_behind_fails_its_set(endpoint: Endpoint, does: Act, limit: float, words: str) -> None:
    failures: list[Any] = []
    Sets(endpoint, does, timeout=limit, policy=lambda failure: failures.append(failure) or Discard("seen"))
    endpoint.send_many(2)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert len(failures) == 2
    assert all(words in str(failure.exception) or words == "." for failure in failures)
    assert not Effect.objects.using(endpoint.alias).exists()


def test_async_handlers_take_sets_as_well(endpoint: Endpoint) -> None:
    seen: list[int] = []

    @set_consumer(endpoint.queue)
    async def count(messages: MessageSet) -> None:
        seen.append(await messages.rows.acount())

    endpoint.send_many(7)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert seen == [7]


def test_an_unknown_column_is_refused(endpoint: Endpoint) -> None:
    errors: list[InvalidOption] = []

    @set_consumer(endpoint.queue, policy=lambda failure: errors.append(failure.exception) or Discard("seen"))
    def handle(messages: MessageSet) -> None:
        messages.insert_into(Effect, nme="x")

    endpoint.send()
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert "one of id, name, detail, at" in str(errors[0])


def test_queues_that_can_have_no_set_consumer(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(messages: MessageSet) -> None: ...

    for queue, words in (
        (Leased, "must be TRANSACTIONAL"), (Addressed, "must be"), (FencedTransactional, "without barriers"),
        (SecretTransactional, "without an encoding"),
        (ForeignPostgres, "TRANSACTIONAL|counts deliveries"), (Effect, "the class of a queue"),
    ):  # fmt: skip
        with pytest.raises(InvalidOption, match=words):
            set_consumer(queue)(handle)
    with pytest.raises(InvalidOption, match="size = 4000 is not accepted"):
        set_consumer(Transactional, size=4000)(handle)
    with pytest.raises(InvalidOption, match="absent: `size` bounds a set"):
        set_consumer(Transactional, batch=5)(handle)
    set_consumer(Transactional, name="sets")(handle)
    with pytest.raises(InvalidOption, match="the only consumer"):

        @consumer(Transactional)
        def another(message: Nop) -> None: ...
