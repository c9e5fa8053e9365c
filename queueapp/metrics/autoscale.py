"""How many workers are wanted, as a view of the project for autoscalers. It needs no more than Django.

>>> path("autoscale", queueapp.metrics.autoscale.autoscale)
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from django.http import HttpRequest, HttpResponse, JsonResponse

from .. import registry
from ..errors import InvalidOption, QueueNotFound
from ..operations.autoscale import LONGEST_LATE, Rule, scale_of
from .permissions import for_readers, remembered

#: What an address may ask, besides queues.
_NAMES = ("per-worker", "late", "min", "max")


@for_readers
def autoscale(request: HttpRequest) -> HttpResponse:
    """``manage.py autoscale`` of ``?queue`` (again for more; all without), by ``per-worker``, ``late``, ``min`` and ``max``; ``wanted`` is
    the sum over them. 400 for what is none of these, 404 for a queue that is not there. 503 while a figure is not known: an
    autoscaler keeps what it has then, and 0 would take all workers away."""
    try:
        rule = rule_of({name: request.GET[name] for name in request.GET if name != "queue"})
        asked = {registry.queues.find(name)._meta.label for name in request.GET.getlist("queue")}
    except InvalidOption as error:
        return _refused(str(error), 400)
    except QueueNotFound as error:
        return _refused(str(error), 404)
    # Without the lines that are of no queue: nobody knows what those want.
    asked = asked or {queue._meta.label for queue in registry.queues}
    found = [scale_of(one, rule) for one in remembered() if one.queue in asked]
    known = all(one.wanted is not None for one in found)
    told = {
        "wanted": sum(one.wanted or 0 for one in found) if known else None,
        "queues": [one.as_dict() for one in found],
    }
    return JsonResponse(told, status=200 if known else 503)


def rule_of(given: Mapping[str, str]) -> Rule:
    """The rule that an address asks for. Raises InvalidOption."""
    for name in given:
        if name not in _NAMES:
            raise InvalidOption(name, given[name], f"one of queue, {', '.join(_NAMES)}")
    late = given.get("late")
    return Rule(
        _number("per-worker", given.get("per-worker", "1000")),
        None if late is None else timedelta(seconds=_number("late", late)),
        _number("min", given.get("min", "0")),
        _number("max", given.get("max", "10")),
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > LONGEST_LATE:
        raise InvalidOption(name, text, "a whole number")
    return int(text)


def _refused(text: str, status: int) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")
