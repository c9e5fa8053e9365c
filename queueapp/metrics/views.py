"""The metrics of all queues as a view of the project: ``operations.statistics`` for Prometheus. An unknown value is
left out: it is not zero.

>>> path("metrics", queueapp.metrics.views.metrics)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..operations.statistics import QueueStats
from .permissions import cached_stats, requires_metrics_access

#: Name, help text, and how the value is read; None: unknown, or the queue has no such value.
GAUGES: tuple[tuple[str, str, Callable[[QueueStats], float | None]], ...] = (
    ("messages_waiting", "Messages ready to be received.", lambda stats: stats.waiting),
    ("messages_leased", "Messages under a current lease.", lambda stats: stats.leased),
    ("messages_in_flight", "Messages that live workers handle or are about to handle.", lambda stats: stats.in_flight),
    ("messages_pending_evaluation", "Messages inserted by other programs whose expressions are not evaluated yet.",
     lambda stats: stats.pending_evaluation),
    ("messages_lease_expired", "Waiting messages whose last lease expired.", lambda stats: stats.lease_expired),
    ("messages_expired", "Messages that the next purge deletes.", lambda stats: stats.expired),
    ("messages_delayed", "Messages in the delayed store, counted up to 10,000.", lambda stats: stats.delayed),
    ("messages_poison", "Unresolved poison messages, counted up to 10,000.", lambda stats: stats.poison),
    ("messages_exact", "1 if waiting, leased, lease_expired and expired are counts, 0 if they are estimates.",
     lambda stats: None if stats.exact is None else int(stats.exact)),
    ("oldest_message_age_seconds", "Age of the oldest waiting message; 0 when none waits.", lambda stats: _age(stats)),
    ("ledger_difference", "Messages that are there and were not counted, or were counted and are not there, as of the "
     "last check of the queue's ledger.", lambda stats: stats.ledger_difference),
    ("workers", "Live workers; for (dispatcher) and (maintenance), live processes of that kind.",
     lambda stats: stats.workers),
    ("heartbeat_age_seconds", "Age of the oldest heartbeat of a live worker.", lambda stats: stats.heartbeat_seconds),
    ("paused", "1 if an operator paused the queue.", lambda stats: None if stats.paused is None else int(stats.paused)),
    ("scrape_errors", "1 if a value of the queue could not be read and is left out.",
     lambda stats: int(bool(stats.error))),
)  # fmt: skip


def _age(stats: QueueStats) -> float | None:
    # 0 only where it is known that nothing waits; otherwise a missing age is unknown.
    return 0.0 if stats.oldest_seconds is None and stats.waiting == 0 and stats.exact else stats.oldest_seconds


class StatsCollector(Collector):
    """Collects the statistics that ``read`` returns."""

    def __init__(self, read: Callable[[], Iterable[QueueStats]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Empty: otherwise registering the collector would query the database to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one read."""
        queues = list(self._read())
        for name, text, value_of in GAUGES:
            family = GaugeMetricFamily(f"queueapp_{name}", text, labels=["queue"])
            for stats in queues:
                if (value := value_of(stats)) is not None:
                    family.add_metric([stats.queue], value)
            yield family
        breakers = GaugeMetricFamily(
            "queueapp_breaker_open", "Circuit breakers that are not closed.", labels=["queue", "breaker", "state"]
        )
        unroutable = GaugeMetricFamily(
            "queueapp_messages_unroutable", "Messages that no worker will receive.", labels=["queue", "what", "name"]
        )
        for stats in queues:
            # A dict, to drop duplicates: several workers may report one breaker, with different errors.
            for breaker, state in dict.fromkeys((breaker["breaker"], breaker["state"]) for breaker in stats.breakers):
                breakers.add_metric([stats.queue, breaker, state], 1)
            for found in stats.unroutable:
                if found.count is not None:
                    unroutable.add_metric([stats.queue, found.what, found.name], found.count)
        yield from (breakers, unroutable)


_registry = CollectorRegistry()
_registry.register(StatsCollector(cached_stats))


@requires_metrics_access
def metrics(request: HttpRequest) -> HttpResponse:
    """The statistics of all queues, in the format that the ``Accept`` header asks for."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(_registry), content_type=content_type)
