"""What the two ways of publishing the flights, with Spark and without, have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Called now and then with the rows read so far and the messages published so far.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication came to. ``start_seconds``: until reading could begin (Spark); ``seconds``: from there on."""

    read: int
    published: int
    start_seconds: float
    seconds: float
