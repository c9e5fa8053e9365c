"""The metrics as a view of the project: for a collector with a token, and for people who may look at the queues.

>>> path("metrics", queueapp.metrics.views.metrics)
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from .figures import FiguresCollector
from .permissions import for_readers, remembered

_registry = CollectorRegistry()
_registry.register(FiguresCollector(remembered))


@for_readers
def metrics(request: HttpRequest) -> HttpResponse:
    """The figures of all queues."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(_registry), content_type=content_type)
