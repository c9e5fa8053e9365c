"""Consumers for tests: each effect is a row, so that an oracle can count."""

import ctypes
import os
import signal
import time

from django.db import transaction

from queueapp import BatchContext, Context, Group, consumer
from tests.testapp.messages import Many, Nop, Ping, Pong, Steps, Turn
from tests.testapp.models import (
    Addressed,
    AddressedUrgent,
    AtMostOnce,
    Capped,
    CappedOnce,
    CappedTransactional,
    Deep,
    Effect,
    Followed,
    FollowedTogether,
    FollowedTransactional,
    ForeignPostgres,
    Grouped,
    GroupedTogether,
    GroupedTransactional,
    InProportion,
    InTurns,
    LateFlights,
    Leased,
    Ledgered,
    LedgeredOnce,
    LedgeredTransactional,
    LimitedPerKey,
    LimitedPerKeyTransactional,
    Ordered,
    OrderedPassing,
    OrderedTransactional,
    Rated,
    RatedOnce,
    RatedPerKeyFast,
    RatedPerKeyTransactional,
    RatedTransactional,
    Several,
    SeveralTransactional,
    Shared,
    SharedTransactional,
    Together,
    Transactional,
    Urgent,
)
from tests.testapp.ordering import Fenced, FencedAtMostOnce, FencedTransactional


class Broken(Exception):
    """What misbehaving handlers raise."""


def act(message: Ping, context: Context) -> None:
    """Do what the message says, then leave an effect."""
    if message.tell:
        Effect.objects.create(name=f"{message.name} has begun")
    if message.die:
        os.kill(os.getpid(), signal.SIGKILL)
    if message.keep_lock_ms:
        ctypes.PyDLL(None).usleep(message.keep_lock_ms * 1000)
    if message.sleep_ms:
        time.sleep(message.sleep_ms / 1000)
    if context.attempt <= message.fail:
        raise Broken(f"attempt {context.attempt} of {message.name}")
    Effect.objects.create(name=message.name, detail=f"{context.consumer.name}#{context.attempt}")


def pong(message: Pong, context: Context) -> None:
    Effect.objects.create(name=message.name, detail=context.consumer.name)


def nop(message: Nop) -> None:
    """Nothing."""


for _queue in (Leased, Transactional, Together, AtMostOnce, Urgent, ForeignPostgres):
    _name = _queue.__name__.lower()
    consumer(_queue, name=f"{_name}.act", attempts=3, retry_delay=0)(act)
    consumer(_queue, name=f"{_name}.pong")(pong)
    consumer(_queue, name=f"{_name}.nop")(nop)


def act_on_many(messages: list[Many], context: BatchContext) -> None:
    """Leave an effect for each that tells how many came along; or die of one of them."""
    if any(message.die for message in messages):
        os.kill(os.getpid(), signal.SIGKILL)
    details = [f"{len(messages)}#{context[place].attempt}" for place in range(len(messages))]
    Effect.objects.bulk_create(
        [Effect(name=message.name, detail=detail) for message, detail in zip(messages, details, strict=True)]
    )


for _queue in (Several, SeveralTransactional):
    consumer(_queue, name=f"{_queue.__name__.lower()}.many", batch=20, attempts=3, retry_delay=0)(act_on_many)


def act_in_group(message: Ping, context: Context) -> None:
    """``act``, and add a member for each further one that the name asks for: "a+2" adds two."""
    name, _, more = message.name.partition("+")
    group = Group.of(context)
    for number in range(int(more or 0) if group is not None else 0):
        group.send(context.queue, Ping(f"{name}.{number}"))
    act(message, context)


for _queue in (Grouped, GroupedTransactional, GroupedTogether):
    consumer(_queue, name=f"{_queue.__name__.lower()}.act", attempts=2, retry_delay=0)(act_in_group)


def tell_process(message: Ping) -> None:
    """Take as long as the message says, then tell which process did it."""
    if message.sleep_ms:
        time.sleep(message.sleep_ms / 1000)
    Effect.objects.create(name=message.name, detail=str(os.getpid()))


for _queue in (
    Capped, CappedOnce, CappedTransactional, InTurns, InProportion, Rated, RatedOnce, RatedTransactional,
):  # fmt: skip
    consumer(_queue, name=f"{_queue.__name__.lower()}.process")(tell_process)

for _queue in (Followed, FollowedTransactional, FollowedTogether, Ledgered, LedgeredTransactional, LedgeredOnce):
    consumer(_queue, name=f"{_queue.__name__.lower()}.act", attempts=3, retry_delay=0)(act)

for _queue in (Ordered, OrderedPassing, OrderedTransactional):
    consumer(_queue, name=f"{_queue.__name__.lower()}.act", attempts=3, retry_delay=0)(act)

for _queue in (Addressed, AddressedUrgent):
    _name = _queue.__name__.lower()
    consumer(_queue, name=f"{_name}.first", attempts=3, retry_delay=0)(act)
    consumer(_queue, name=f"{_name}.second", attempts=3, retry_delay=0)(act)


def tell_when(message: Turn, context: Context) -> None:
    """By the clock that all processes of a machine have in common."""
    began = time.monotonic_ns()
    time.sleep(message.sleep_ms / 1000)
    detail = f"{os.getpid()} {began} {time.monotonic_ns()}"
    Effect.objects.create(name=f"{context.consumer.name} {message.number}", detail=detail)


for _queue in (
    Shared, SharedTransactional, LimitedPerKey, LimitedPerKeyTransactional, RatedPerKeyFast, RatedPerKeyTransactional,
):  # fmt: skip
    consumer(_queue, name=f"{_queue.__name__.lower()}.turn", retry_delay=0)(tell_when)
consumer(AddressedUrgent, name="limited", concurrency=2, retry_delay=0)(tell_when)
consumer(AddressedUrgent, name="unlimited", retry_delay=0)(tell_when)


@consumer(Urgent, name="urgent.steps", attempts=10, retry_delay=0)
def take_steps(message: Steps, context: Context) -> None:
    """An effect for each step, kept in one transaction with how far it is."""
    first = context.checkpointed or 0
    for step in range(first, message.count):
        with transaction.atomic():
            Effect.objects.create(name=f"step {step}", detail=f"{context.attempt}")
            context.checkpoint(step + 1)
        if step in message.die_after:
            os.kill(os.getpid(), signal.SIGKILL)


@consumer(LateFlights)
def late(message: dict) -> None:
    Effect.objects.create(name=f"late {message['minutes']}")


@consumer(Deep)
def deep(message: dict) -> None:
    Effect.objects.create(name=f"deep {message['n']}")


for _queue in (Fenced, FencedTransactional, FencedAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__.lower()}.by_process")(tell_process)
