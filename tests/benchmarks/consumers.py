"""What the benchmarks' workers do with a message."""

import time

from queueapp import consumer
from tests.benchmarks.messages import Nap, Nop, Row, Stamp
from tests.benchmarks.models import (
    IDLE,
    Addressed,
    AtMostOnce,
    Entry,
    Leased,
    Prompt,
    SteadyAtMostOnce,
    SteadyLeased,
    SteadyTransactional,
    Transactional,
)
from tests.benchmarks.rig.stopwatch import shared_stopwatch


def nop(message: Nop) -> None:
    pass


def nap(message: Nap) -> None:
    time.sleep(0.001)


def insert_row(message: Row) -> None:
    Entry.objects.create(number=message.number, text=message.text)


def stamp(message: Stamp) -> None:
    shared_stopwatch().stamp(message.number)


for _queue in (Leased, AtMostOnce, Transactional, Addressed, *IDLE):
    consumer(_queue, name=f"{_queue.__name__}.nop")(nop)
consumer(Leased, name="Leased.nap")(nap)
consumer(Transactional, name="Transactional.insert_row")(insert_row)
for _queue in (Prompt, SteadyLeased, SteadyTransactional, SteadyAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__}.stamp")(stamp)
