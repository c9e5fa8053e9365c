"""The metrics of all queues as a view of the project.

>>> path("metrics", queueapp.metrics.views.metrics)
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from .collector import StatsCollector
from .permissions import cached_stats, requires_metrics_access

_registry = CollectorRegistry()
_registry.register(StatsCollector(cached_stats))


@requires_metrics_access
def metrics(request: HttpRequest) -> HttpResponse:
    """The statistics of all queues, in the format that the ``Accept`` header asks for."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(_registry), content_type=content_type)
