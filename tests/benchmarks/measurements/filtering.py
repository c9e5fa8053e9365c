"""What an expression costs beside what one would write by hand in Python."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from time import perf_counter
from typing import Any

import msgspec

from queueapp.expressions import ParsedMessage, compile_expression
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures

#: About 1 KB of JSON; the filter is true of it, so that all of its three terms are evaluated.
ORDER: dict[str, Any] = {
    "symbol": "MSFT",
    "price": 12.5,
    "qty": 100,
    "customer": {"tier": "gold", "name": "Example Trading Limited", "address": {"city": "Cambridge", "zip": "02139"}},
    "lines": [
        {"sku": f"SKU-{n:06}", "count": n, "price": n * 1.25, "note": "as agreed by telephone"} for n in range(9)
    ],
    "note": "x" * 200,
}

FILTER = "/symbol IN ('AAPL', 'MSFT', 'IBM') AND /price * /qty > 1000 AND /customer/tier = 'gold'"

SYMBOLS = ("AAPL", "MSFT", "IBM")


def by_hand(order: dict[str, Any]) -> bool:
    """The same for this one message, without a thought for NULL, types or arrays."""
    return order["symbol"] in SYMBOLS and order["price"] * order["qty"] > 1000 and order["customer"]["tier"] == "gold"


@measures(
    Figure(
        "expression",
        ">= 0.1",
        "ratio",
        "evaluations of a three-term filter on a parsed 1 KB message / a Python function",
    ),
    Figure("expression-rate", ">= 500000", "per s", "the same, evaluations per second of one thread"),
)
def expression(scale: Scale) -> Samples:
    body = msgspec.json.encode(ORDER)
    order = msgspec.json.decode(body)
    matches, message = compile_expression(FILTER).matches, ParsedMessage(order)
    if not (900 <= len(body) <= 1200 and matches(message) and by_hand(order)):
        raise RuntimeError(f"{len(body)} bytes: not the message that the figure is about")
    count = scale.count(500_000)
    for _ in range(scale.runs):
        rate = _rate(matches, message, count)
        yield {"expression": Ratio(rate, _rate(by_hand, order, count)), "expression-rate": rate}


def _rate(function: Callable[[Any], bool], argument: Any, count: int) -> float:
    """Calls per second. ``map`` and ``sum`` add as little as a loop can."""
    started = perf_counter()
    matched = sum(map(function, repeat(argument, count)))
    took = perf_counter() - started
    if matched != count:
        raise RuntimeError(f"{matched} of {count} matched")
    return count / took
