"""The figures of ``operating.statistics`` as metrics. What is not known is left out: it is not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..operations.statistics import QueueFigures

#: Name, what it means, and how it is read; None: not known, or there is none.
GAUGES: tuple[tuple[str, str, Callable[[QueueFigures], float | None]], ...] = (
    ("messages_waiting", "Messages that a receiver may be given.", lambda one: one.waiting),
    ("messages_leased", "Messages under a lease that is not over.", lambda one: one.leased),
    ("messages_held", "Messages inserted by others that nobody has evaluated yet.", lambda one: one.held),
    ("messages_lapsed", "Waiting messages whose lease lapsed.", lambda one: one.lapsed),
    ("messages_expired", "Messages that the next purge deletes.", lambda one: one.expired),
    ("messages_delayed", "Messages in the delayed store, counted up to 10,000.", lambda one: one.delayed),
    ("messages_poison", "Unresolved poison messages, counted up to 10,000.", lambda one: one.poison),
    ("messages_exact", "1 if waiting, leased, lapsed and expired are counts, 0 if they are estimates.",
     lambda one: None if one.exact is None else int(one.exact)),
    ("oldest_message_age_seconds", "Age of the oldest waiting message; 0 when none waits.", lambda one: _age(one)),
    ("workers", "Live workers; of (dispatcher) and (maintenance), who lives of them.", lambda one: one.subscribers),
    ("heartbeat_age_seconds", "Age of the oldest heartbeat of a live worker.", lambda one: one.heartbeat_seconds),
    ("paused", "1 if an operator paused it.", lambda one: None if one.paused is None else int(one.paused)),
    ("figures_unknown", "1 if some figure of the queue could not be read, which is left out.", lambda one: int(bool(one.error))),
)  # fmt: skip


def _age(one: QueueFigures) -> float | None:
    # That nothing waits is known; a look that found no age otherwise knows nothing.
    return 0.0 if one.oldest_seconds is None and one.waiting == 0 and one.exact else one.oldest_seconds


class FiguresCollector(Collector):
    """A registry's source of the figures that ``read`` gives."""

    def __init__(self, read: Callable[[], Iterable[QueueFigures]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry would ask the database to know the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        found = list(self._read())
        for name, text, read in GAUGES:
            family = GaugeMetricFamily(f"queueapp_{name}", text, labels=["queue"])
            for one in found:
                if (value := read(one)) is not None:
                    family.add_metric([one.queue], value)
            yield family
        trouble = GaugeMetricFamily(
            "queueapp_trouble", "Circuit breakers that are not disarmed.", labels=["queue", "breaker", "state"]
        )
        stranded = GaugeMetricFamily(
            "queueapp_messages_stranded", "Messages that nobody takes.", labels=["queue", "what", "name"]
        )
        for one in found:
            # A dict: one breaker may have failed with several errors, in several workers.
            for breaker, state in dict.fromkeys((each["name"], each["state"]) for each in one.breakers):
                trouble.add_metric([one.queue, breaker, state], 1)
            for left in one.stranded:
                if left.count is not None:
                    stranded.add_metric([one.queue, left.what, left.name], left.count)
        yield from (trouble, stranded)
