"""What keys and encryption cost a sender who has them; a queue without either is measured by ``send`` and
``send-many``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import monotonic

from django.conf import settings
from django.db import connection, transaction

from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, make
from tests.benchmarks.models import Encrypted, Keyed, Leased

_BLOCK = 250
_KEY = b"0123456789abcdefghijklmnopqrstuv"


@measures(
    Figure("keyed-send", ">= 0.15", "ratio", "in a transaction: send(dedupe_key) of new keys / send() without (msg/s)"),
    Figure("keyed-send-many", ">= 0.1", "ratio", "send_many(20,000) with new keys / without (msg/s)"),
)
def keyed(scale: Scale) -> Samples:
    numbers = count()
    bodies = [make(Nop, number) for number in range(_BLOCK)]
    many = [make(Nop, number) for number in range(scale.count(20_000))]

    def by_key() -> None:
        for body in bodies:
            Keyed.send(body, dedupe_key=f"k{next(numbers)}")

    def without() -> None:
        for body in bodies:
            Leased.send(body)

    def key_of(_: object) -> str:
        return f"k{next(numbers)}"

    for _ in range(scale.runs):
        _truncate()
        single = _alternate(by_key, without, scale.count(10))
        _truncate()
        with_keys = _timed(lambda: Keyed.send_many(many, dedupe_key=key_of))
        plain = _timed(lambda: Leased.send_many(many))
        yield {"keyed-send": single, "keyed-send-many": Ratio(len(many) / with_keys, len(many) / plain)}


@measures(
    Figure("encrypted-send", ">= 0.6", "ratio", "in a transaction: send() to an encrypted queue / to another (msg/s)")
)
def encrypted(scale: Scale) -> Samples:
    settings.QUEUEAPP = getattr(settings, "QUEUEAPP", {}) | {"KEYRING": lambda: {"only": _KEY}}
    _forget_settings()
    bodies = [make(Nop, number) for number in range(_BLOCK)]

    def sealed() -> None:
        for body in bodies:
            Encrypted.send(body)

    def plain() -> None:
        for body in bodies:
            Leased.send(body)

    for _ in range(scale.runs):
        _truncate()
        yield {"encrypted-send": _alternate(sealed, plain, scale.count(20))}


def _forget_settings() -> None:
    from queueapp.conf import settings as ours

    ours.reload()


def _alternate(product: Callable[[], None], base: Callable[[], None], blocks: int) -> Ratio:
    """A block of ours, a block of the other, and so on: two numbers of messages a second."""
    seconds = [0.0, 0.0]
    product()
    base()
    for _ in range(max(2, blocks)):
        for index, block in enumerate((product, base)):
            with transaction.atomic():
                seconds[index] += _timed(block)
    number = max(2, blocks) * _BLOCK
    return Ratio(number / seconds[0], number / seconds[1])


def _timed(call: Callable[[], object]) -> float:
    started = monotonic()
    call()
    return monotonic() - started


def _truncate() -> None:
    with connection.cursor() as cursor:
        for queue in (Keyed, Encrypted, Leased):
            cursor.execute(f"TRUNCATE {queue._meta.db_table}")
        cursor.execute("TRUNCATE queueapp_messagekey")
        cursor.execute("CHECKPOINT")
