"""The desired number of workers as a view of the project, for autoscalers. It needs no ``prometheus-client``.

>>> path("autoscale", queueapp.metrics.autoscale.autoscale)
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from django.http import HttpRequest, HttpResponse, JsonResponse

from .. import registry
from ..errors import InvalidOption, QueueNotFound
from ..operations.autoscale import MAX_LATE_SECONDS, ScalingRule, desired_workers_for
from ..operations.statistics import is_part
from .permissions import cached_stats, requires_metrics_access

#: The query parameters beside ``queue``.
_PARAMETERS = ("per-worker", "late", "min", "max")


@requires_metrics_access
def autoscale(request: HttpRequest) -> HttpResponse:
    """``manage.py autoscale`` over HTTP. ``?queue`` (repeatable; default: all), ``per-worker``, ``late``, ``min``,
    ``max``; ``desired`` is the sum over the queues. 400 for another parameter or value, 404 for an unknown queue.

    503 while a value is unknown: an autoscaler then keeps its workers, where 0 would remove them all.
    """
    try:
        rule = rule_of({name: request.GET[name] for name in request.GET if name != "queue"})
        labels = {
            name if is_part(name) else registry.queues.find(name)._meta.label for name in request.GET.getlist("queue")
        }
    except InvalidOption as error:
        return _refused(str(error), 400)
    except QueueNotFound as error:
        return _refused(str(error), 404)
    # The default leaves out the lines that belong to no queue, such as (dispatcher).
    labels = labels or {queue._meta.label for queue in registry.queues}
    queues = [desired_workers_for(stats, rule) for stats in cached_stats() if stats.queue in labels]
    if missing := sorted(labels - {scale.queue for scale in queues}):
        return _refused(str(QueueNotFound(missing[0])), 404)
    known = all(scale.desired is not None for scale in queues)
    answer = {
        "desired": sum(scale.desired or 0 for scale in queues) if known else None,
        "queues": [scale.as_dict() for scale in queues],
    }
    return JsonResponse(answer, status=200 if known else 503)


def rule_of(given: Mapping[str, str]) -> ScalingRule:
    """The rule that the query parameters describe. Raises InvalidOption."""
    for name in given:
        if name not in _PARAMETERS:
            raise InvalidOption(name, given[name], f"one of queue, {', '.join(_PARAMETERS)}")
    late = given.get("late")
    return ScalingRule(
        _number("per-worker", given.get("per-worker", "1000")),
        None if late is None else timedelta(seconds=_number("late", late)),
        _number("min", given.get("min", "0")),
        _number("max", given.get("max", "10")),
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > MAX_LATE_SECONDS:
        raise InvalidOption(name, text, "a whole number")
    return int(text)


def _refused(text: str, status: int) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")
