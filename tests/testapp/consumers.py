"""Consumers for tests: each effect is a row, so that an oracle can count."""

import os
import signal
import time

from queueapp import Context, consumer
from tests.testapp.messages import Nop, Ping, Pong
from tests.testapp.models import (
    Addressed,
    AddressedUrgent,
    AtMostOnce,
    Effect,
    ForeignPostgres,
    Leased,
    Transactional,
    Urgent,
)


class Broken(Exception):
    """What misbehaving handlers raise."""


def act(message: Ping, context: Context) -> None:
    """Do what the message says, then leave an effect."""
    if message.die:
        os.kill(os.getpid(), signal.SIGKILL)
    if message.sleep_ms:
        time.sleep(message.sleep_ms / 1000)
    if context.attempt <= message.fail:
        raise Broken(f"attempt {context.attempt} of {message.name}")
    Effect.objects.create(name=message.name, detail=f"{context.consumer.name}#{context.attempt}")


def pong(message: Pong, context: Context) -> None:
    Effect.objects.create(name=message.name, detail=context.consumer.name)


def nop(message: Nop) -> None:
    """Nothing."""


for _queue in (Leased, Transactional, AtMostOnce, Urgent, ForeignPostgres):
    _name = _queue.__name__.lower()
    consumer(_queue, name=f"{_name}.act", attempts=3, retry_delay=0)(act)
    consumer(_queue, name=f"{_name}.pong")(pong)
    consumer(_queue, name=f"{_name}.nop")(nop)

for _queue in (Addressed, AddressedUrgent):
    _name = _queue.__name__.lower()
    consumer(_queue, name=f"{_name}.first", attempts=3, retry_delay=0)(act)
    consumer(_queue, name=f"{_name}.second", attempts=3, retry_delay=0)(act)
