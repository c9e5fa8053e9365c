"""The page of one queue: its figures, who consumes it, what is set, and charts of an hour, a day or a week."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html

from .. import registry
from ..errors import QueueNotFound
from ..messages import readable_headers
from ..models import LedgerCheck, Now, Subscriber
from ..operations import ledger, snapshots
from ..operations.live_workers import consumers_of
from ..sql import nonblocking
from .formatting import charts, display, untrusted
from .formatting.charts import Chart
from .large_tables.lists import Start
from .operations import render_page
from .overview_rows import rate, row_and, short_seconds
from .read_only import OPERATE

#: By name: the span, and the period of its points in seconds.
SPANS = {"1h": (timedelta(hours=1), 60), "24h": (timedelta(hours=24), 300), "7d": (timedelta(days=7), 3600)}
NAMES = {"1h": "1 hour", "24h": "24 hours", "7d": "7 days"}
#: The newest messages that are compared; how many values they have in common are shown, and the least share of each.
SAMPLE, MAX_COMMON, MIN_SHARE = 1000, 10, 0.1
#: Characters of headers that are read, and of a value.
MAX_HEADERS, MAX_VALUE = 8192, 100
#: Workers that are shown.
MAX_WORKERS = 50


def queue_view(page: Any, request: HttpRequest, label: str) -> HttpResponse:
    """The page of a queue; ``?span=24h``."""
    if request.method not in ("GET", "HEAD") or not page.has_view_permission(request):
        raise PermissionDenied
    try:
        queue = registry.queues.find(label)
    except QueueNotFound:
        raise Http404(f"There is no queue {label}.") from None
    span = request.GET.get("span", "1h")
    if span not in SPANS:
        span = "1h"
    alias = router.db_for_read(queue) or "default"
    length, period = SPANS[span]
    messages = page.admin_site._registry.get(queue)
    messages_url = messages.list_url(alias) if messages is not None and messages.has_view_permission(request) else ""
    reads: dict[str, Callable[[], Any]] = {
        "points": partial(_points, alias, queue, period, length),
        "workers": partial(_workers, alias, queue),
    }
    if span != "1h":  # the state of the queue, as on the overview, is that of the last hour
        reads["last_hour"] = partial(_points, alias, queue, SPANS["1h"][1], SPANS["1h"][0])
    if queue.delivery.ledger:
        reads["ledger_line"] = partial(_ledger, alias, queue)
    if messages_url:  # headers are for users who may see the messages
        reads["waiting"] = partial(_waiting, alias, queue)
    row, values = row_and(queue, *reads.values())
    found = {name: value for name, (value, _) in zip(reads, values, strict=True)}
    unknown = untrusted.visible(next((cause for _, cause in values if cause), ""))[:300]
    row = replace(row, history=found.get("last_hour" if span != "1h" else "points") or ())
    line = page._line(request, row)
    context = {
        "line": line,
        "row": row,
        "charts": [chart for chart in charts_of(found["points"] or (), length) if not chart.is_empty],
        "spans": [(name, text, name == span) for name, text in NAMES.items()],
        "begin": display.moment(datetime.now(UTC) - length),
        "workers": found["workers"] or [],
        "waiting": found.get("waiting") or [],
        "ledger": found.get("ledger_line") or "",
        "sample": SAMPLE,
        "messages_url": messages_url,
        "unknown": unknown,
        "may_operate": line.get("operations") and request.user.has_perm(OPERATE),
    }
    return render_page(page, request, "admin/queueapp/queue.html", f"Queue {queue._meta.label}", context)


def _ledger(alias: str, queue: Any) -> str:
    """The last check of the queue's ledger."""
    row = LedgerCheck.objects.using(alias).filter(queue=queue._meta.label, checked_at__isnull=False).first()
    if row is None:
        return "not checked yet"
    if row.error:
        return f"not checked: {row.error}"
    if row.difference:
        return ledger.describe(row).partition(": ")[2]
    return format_html("closed at {}", display.moment(row.checked_at))


def charts_of(points: Sequence[snapshots.Point], span: timedelta) -> list[Chart]:
    """The charts of a queue's history."""
    now = datetime.now(UTC)

    def line(name: str) -> charts.Series:
        return [(point.at, getattr(point, name)) for point in points]

    def count(value: float) -> str:
        return f"{value:,.0f}"

    rates = [("in", line("arrived_rate")), ("out", line("handled_rate"))]
    return [
        Chart("Depth", [("ready", line("ready")), ("in flight", line("in_flight"))], now, span, count),
        Chart("Messages a second", rates, now, span, rate),
        Chart("Failed attempts a second", [("failed", line("failed_rate"))], now, span, rate),
        Chart("Handling time", [("median", line("handling_p50")), ("95th percentile", line("handling_p95"))], now, span,
              short_seconds),
        Chart("Age of the oldest message", [("oldest", line("oldest_seconds"))], now, span, display.of_seconds),
        Chart("Delayed and poison", [("delayed", line("delayed")), ("poison", line("poison"))], now, span, count),
    ]  # fmt: skip


def _points(alias: str, queue: Any, period: int, length: timedelta) -> Sequence[snapshots.Point]:
    label = queue._meta.label
    return snapshots.points(alias, period, length, label).get(label, ())


def common_headers(alias: str, queue: Any) -> tuple[list[tuple[tuple[str, str], int]], int]:
    """What the newest messages have in common: their recipient ("to") and their headers, as ((name, value), count) with
    the largest counts first, and how many messages were read. Who floods a queue is among them."""
    names = {field.name for field in queue._meta.local_concrete_fields}
    columns = [name for name in ("recipient",) if name in names]
    newest = nonblocking(queue._base_manager.using(alias)).order_by("-pk").annotate(head=Start("headers", MAX_HEADERS))
    rows = list(newest.values("head", *columns)[:SAMPLE])
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts.update(("to", row[name]) for name in columns if row[name])
        counts.update(item for item in readable_headers(row["head"] or "").items() if len(item[1]) <= MAX_VALUE)
    return counts.most_common(MAX_COMMON), len(rows)


def _waiting(alias: str, queue: Any) -> list[dict[str, Any]]:
    counts, read = common_headers(alias, queue)
    return [
        {
            "name": untrusted.inline(name, 60),
            "value": untrusted.inline(value, MAX_VALUE),
            "count": count,
            "share": f"{100 * count / read:.0f} %",
            "query": f'to:"{value}"' if name == "to" else f'header:"{name}={value}"',
        }
        for (name, value), count in counts
        if count >= MIN_SHARE * read and count > 1
    ]


def _workers(alias: str, queue: Any) -> list[dict[str, Any]]:
    """The live workers of a queue with their consumers."""
    rows = Subscriber.objects.using(alias).filter(queue=queue._meta.label, alive_until__gt=Now())
    return [
        {
            "process": untrusted.inline(f"{row.host}:{row.process}", 60),
            "version": untrusted.inline(row.version or "\u2013", 40),
            "in_flight": row.outstanding,
            "handled": row.handled,
            "failed": row.failed,
            "consumers": untrusted.inline(", ".join(name for name, _ in consumers_of(row.consumers)) or "\u2013", 200),
        }
        for row in rows.order_by("host", "process")[:MAX_WORKERS]
    ]
