"""What the benchmarks' workers do with a message."""

import time

from queueapp import consumer
from tests.benchmarks.messages import SLOW_SECONDS, Count, Nap, Nop, Row, Slow, SlowCount, Stamp
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
from tests.benchmarks.rig.tally import shared_tally


def nop(message: Nop) -> None:
    pass


def nap(message: Nap) -> None:
    time.sleep(0.001)


def insert_row(message: Row) -> None:
    Entry.objects.create(number=message.number, text=message.text)


def stamp(message: Stamp) -> None:
    shared_stopwatch().stamp(message.number)


def sleep_long(message: Slow) -> None:
    shared_stopwatch().stamp(message.number)
    time.sleep(SLOW_SECONDS)


def count(message: Count) -> None:
    shared_tally().mark(message.number)


def count_slowly(message: SlowCount) -> None:
    shared_tally().mark(message.number)
    time.sleep(0.005)


for _queue in (Leased, AtMostOnce, Transactional, Addressed, *IDLE):
    consumer(_queue, name=f"{_queue.__name__}.nop")(nop)
for _queue in (Leased, Transactional):
    consumer(_queue, name=f"{_queue.__name__}.nap")(nap)
    consumer(_queue, name=f"{_queue.__name__}.count")(count)
consumer(Transactional, name="Transactional.insert_row")(insert_row)
for _queue in (Prompt, SteadyLeased, SteadyTransactional, SteadyAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__}.stamp")(stamp)
consumer(Prompt, name="Prompt.sleep_long")(sleep_long)
for _queue in (SteadyLeased, SteadyTransactional, SteadyAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__}.count")(count)
    consumer(_queue, name=f"{_queue.__name__}.count_slowly")(count_slowly)
