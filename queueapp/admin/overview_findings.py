"""What the overview says below a queue: the handler that hangs, what fails, and who floods the queue, each with a link
to where an operator deals with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..messages import headers
from ..models import PoisonMessage
from ..operations.safe_reads import Reader
from .formatting import display, untrusted
from .overview_rows import OverviewRow
from .queue_page import SAMPLE, common_headers

#: The newest poison messages that are read, of all queues of a database together.
NEWEST_POISON = 200
#: Queues whose newest messages are compared, the deepest first; how many messages such a queue has at least, and the
#: share of them that has to have a header in common.
MAX_FLOODED, FLOODED_FROM, FLOOD_SHARE = 2, SAMPLE, 0.5


class Finding(NamedTuple):
    """A line below a queue; ``page``: poison or charts."""

    text: SafeString
    page: str
    link: str


def findings(rows: Iterable[OverviewRow], of_poison: bool, readable: frozenset[str]) -> dict[str, list[Finding]]:
    """The lines by queue: of its newest poison messages if the user may see them, and of what most of its newest
    messages have in common where the user may see these (``readable``). Takes at most three statements and a
    transaction for each database."""
    by_alias: dict[str, list[OverviewRow]] = {}
    for row in rows:
        if row.queue is not None and row.stats.waiting is not None:
            by_alias.setdefault(row.alias, []).append(row)
    found: dict[str, list[Finding]] = {}
    for alias, of_database in by_alias.items():
        failing = [row.label for row in of_database if row.new_poison] if of_poison else []
        deep = [row for row in of_database if (row.stats.waiting or 0) >= FLOODED_FROM and row.label in readable]
        deep.sort(key=lambda row: -(row.stats.waiting or 0))
        reads = list(_reads(alias, failing, deep[:MAX_FLOODED]))
        if reads:
            for label, line in _lines(Reader(alias), reads):
                found.setdefault(label, []).append(line)
    return found


def _lines(reader: Reader, reads: list[Any]) -> list[tuple[str, Finding]]:
    """What these functions read in one transaction. What cannot be read is left out: the row of the queue says why."""

    def read() -> list[tuple[str, Finding]]:
        return [line for function in reads for line in (reader.read(function)[0] or {}).items()]

    return reader.read_together(read)


def _reads(alias: str, failing: list[str], deep: list[OverviewRow]) -> Iterable[Any]:
    if failing:
        yield partial(_of_poison, alias, failing)
    for row in deep:
        yield partial(_of_flood, alias, row)


def _of_poison(alias: str, labels: list[str]) -> Mapping[str, Finding]:
    """Of each queue the newest poison message, among the newest ones of all queues."""
    # Index: queueapp_poison_status.
    unresolved = PoisonMessage.objects.using(alias).filter(status=PoisonMessage.Status.UNRESOLVED)
    columns = ("queue", "consumer", "reason", "group_key", "worker_version", "failed_at")
    found: dict[str, list[Any]] = {}
    newest = list(unresolved.order_by("-failed_at").values(*columns)[:NEWEST_POISON])
    for row in newest:
        if row["queue"] in labels:
            found.setdefault(row["queue"], []).append(row)
    return {label: _failure(rows, len(newest) < NEWEST_POISON) for label, rows in found.items()}


def _failure(rows: list[dict[str, Any]], is_complete: bool) -> Finding:
    newest = rows[0]
    same = [row for row in rows if row["group_key"] == newest["group_key"]]  # other errors may be of other versions
    consumer = f"{newest['consumer']}: " if newest["consumer"] else ""
    versions = {row["worker_version"] for row in same}
    version = f", all on version {newest['worker_version']}" if len(versions) == 1 and newest["worker_version"] else ""
    shown = untrusted.inline(f"{consumer}{newest['reason']}", 300)
    if is_complete:
        count = format_html("{} since {}", len(same), display.moment(same[-1]["failed_at"]))
    else:
        count = format_html("{} of the newest {} poison messages", len(same), NEWEST_POISON)
    text = format_html("{} ({}{})", shown, count, untrusted.inline(version, 80))
    return Finding(text, "poison", "Poison messages")


def _of_flood(alias: str, row: OverviewRow) -> Mapping[str, Finding]:
    """The header that most of a deep queue's newest messages have in common: the declared key first, then what not all
    of them have, since that tells more of who sends them."""
    counts, read = common_headers(alias, row.queue)
    often = {
        name: (value, count)
        for (name, value), count in counts
        if count >= FLOOD_SHARE * read and name not in _OF_ALL and not name.startswith("NServiceBus.")
    }
    if not often:
        return {}
    key = row.queue.delivery.fair_by
    name = key if key in often else min(often, key=lambda name: often[name][1] == read)
    value, count = often[name]
    text = f"{100 * count / read:.0f} % of the newest {read:,} messages have {name} = {value}"
    return {row.label: Finding(untrusted.inline(text, 300), "charts", "Queue")}


#: Headers that nearly all messages of a queue have in common, as those of NServiceBus.
_OF_ALL = frozenset(
    {
        headers.TYPE, headers.TYPE_VERSION, headers.BASE_TYPES, headers.CONTENT_TYPE, headers.TOPIC, headers.WORKFLOW,
        headers.ENCRYPTION_KEY, headers.REPLY_TO,
    }
)  # fmt: skip
