"""What the benchmarks' workers do with a message."""

import time

from django.db.models import BigIntegerField, F

from queueapp import MessageSet, consumer, set_consumer
from tests.benchmarks.messages import SLOW_SECONDS, Count, Doze, Nap, Nop, Row, Slow, SlowCount, Stamp
from tests.benchmarks.models import (
    IDLE,
    Addressed,
    AtMostOnce,
    Capped,
    Copied,
    Defaults,
    Entry,
    Fair,
    Fenced,
    Grouped,
    InBatches,
    InSets,
    InSetsOfFields,
    Leased,
    Ledgered,
    LedgeredTransactional,
    Levelled,
    LimitedPerKey,
    Loose,
    Ordered,
    Prompt,
    Ranked,
    RatedPerKey,
    Shared,
    SteadyAtMostOnce,
    SteadyLeased,
    SteadyTransactional,
    Tight,
    Together,
    TogetherAlone,
    Transactional,
    TransactionalAlone,
)
from tests.benchmarks.rig.stopwatch import shared_stopwatch
from tests.benchmarks.rig.tally import shared_tally


def nop(message: Nop) -> None:
    pass


def nap(message: Nap) -> None:
    time.sleep(0.001)


def doze(message: Doze) -> None:
    time.sleep(0.02)


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


_ONE_ROW_EACH = (Transactional, TransactionalAlone, Together, TogetherAlone)

for _name in ("first", "second", "third"):
    consumer(Copied, name=_name)(nop)
for _queue in (
    Leased, AtMostOnce, *_ONE_ROW_EACH, Addressed, Capped, Fair, Defaults, Ranked, Levelled, Fenced, Grouped, Ordered,
    Shared, LimitedPerKey, RatedPerKey, Ledgered, LedgeredTransactional,
    *IDLE,
):  # fmt: skip
    consumer(_queue, name=f"{_queue.__name__}.nop")(nop)
for _queue in (Tight, Loose):
    consumer(_queue, name=f"{_queue.__name__}.doze")(doze)
for _queue in (Leased, Transactional):
    consumer(_queue, name=f"{_queue.__name__}.nap")(nap)
    consumer(_queue, name=f"{_queue.__name__}.count")(count)


@consumer(InBatches, batch=100)
def nop_each(messages: list[Nop]) -> None:
    pass


@set_consumer(InSets)
def insert_rows(messages: MessageSet) -> None:
    messages.insert_into(Entry, number=F("seq"), text="x" * 175)


@set_consumer(InSetsOfFields)
def insert_fields(messages: MessageSet) -> None:
    messages.insert_into(Entry, number=messages.body("number", output_field=BigIntegerField()), text="x" * 175)


for _queue in _ONE_ROW_EACH:
    consumer(_queue, name=f"{_queue.__name__}.insert_row")(insert_row)
for _queue in (Prompt, SteadyLeased, SteadyTransactional, SteadyAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__}.stamp")(stamp)
consumer(Prompt, name="Prompt.sleep_long")(sleep_long)
for _queue in (SteadyLeased, SteadyTransactional, SteadyAtMostOnce):
    consumer(_queue, name=f"{_queue.__name__}.count")(count)
    consumer(_queue, name=f"{_queue.__name__}.count_slowly")(count_slowly)
