"""Formatting of single facts: badges, sizes, ages, short ids, capped counts.

A badge has the meaning of its colour in words as well, for colour-blind readers and printouts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timezone import localtime

from .untrusted import breakable, inline

Tone = Literal["quiet", "good", "busy", "warn", "bad"]

NOTHING = format_html('<span class="queueapp-nothing">{}</span>', "\u2013")


def badge(tone: Tone, text: str, title: str = "") -> SafeString:
    """A coloured label with its meaning in words."""
    return format_html('<span class="queueapp-badge queueapp-{}" title="{}">{}</span>', tone, title, text)


def size(count: int | None) -> str:
    """A number of bytes; a dash for no body, which is not an empty one."""
    if count is None:
        return "\u2013"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration(span: timedelta) -> str:
    """A span of time in its two largest units: "3 d 4 h", "12 s"."""
    seconds = int(abs(span.total_seconds()))
    if seconds < 1:
        return "0 s"
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, length)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 "))


def in_full(span: timedelta) -> str:
    """A span of time in all of its units, because an option must not look rounded: "1 d 30 s", "100 ms"."""
    parts, rest = [], round(span.total_seconds() * 1000)
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts) or "0 s"


def of_seconds(seconds: float | None) -> str:
    """A duration in seconds; a dash for None."""
    return "\u2013" if seconds is None else duration(timedelta(seconds=max(0.0, seconds)))


def moment(at: datetime | None) -> Any:
    """A time to the second in the time zone of the site. Near the limits of datetime (.NET's MaxValue is a time of
    expiry) the conversion overflows, and the time is shown as stored."""
    if at is None:
        return NOTHING
    try:
        local = localtime(at)
    except OverflowError:
        return inline(at.isoformat(), 40)
    text = date_format(local, "Y-m-d H:i:s")
    return format_html('<time datetime="{}" title="{}">{}</time>', at.isoformat(), local.isoformat(), text)


def parsed_moment(text: Any) -> datetime | None:
    """A time in the history of a message; None: it is another text, or no text."""
    try:
        at = parse_datetime(text) if isinstance(text, str) else None
    except ValueError:  # 30 February
        return None
    # Times without a zone are written in UTC.
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


def moment_of_text(text: Any) -> Any:
    """A time in the history of a message; any other text is shown as it is."""
    at = parsed_moment(text)
    return inline(text or "", 40) if at is None else moment(at)


def ago(at: datetime | None, now: datetime) -> Any:
    """The age of a time by the database's clock, and the time itself, because a phone shows no title."""
    if at is None:
        return NOTHING
    span = now - at
    text = f"{duration(span)} ago" if span > timedelta(0) else f"in {duration(span)}"
    return below(format_html('<span title="{}">{}</span>', at.isoformat(), text), moment(at))


def below(first: Any, *rest: Any) -> SafeString:
    """The text of a cell with smaller lines below; '' is left out."""
    asides = ((text,) for text in rest if text != "")
    return format_html("{}{}", first, format_html_join("", '<span class="queueapp-aside">{}</span>', asides))


def short_id(identity: Any) -> SafeString:
    """The end of an id: the beginning is a timestamp and alike in all messages of a batch."""
    text = str(identity)
    return format_html('<code title="{}">…{}</code>', text, text[-12:])


def at_least(count: int, cap: int) -> str:
    """A count that stopped at ``cap``."""
    return f"{cap:,}+" if count > cap else f"{count:,}"


def messages(count: int, cap: int | None = None) -> str:
    """ "1 message", "3 messages", "10,000+ messages"."""
    number = f"{count:,}" if cap is None else at_least(count, cap)
    return f"{number} message" if count == 1 else f"{number} messages"


def counted(count: int, singular: str, many: str) -> str:
    """ "1 copy", "3,000 copies"."""
    return f"{count:,} {singular if count == 1 else many}"


def receivers(count: int) -> str:
    """ "1 receiver", "8 receivers"."""
    return counted(count, "receiver", "receivers")


def about(count: int) -> str:
    """An estimate: "about 4.9 million"."""
    if count >= 1_000_000:
        return f"about {count / 1_000_000:.1f} million"
    return f"about {round(count, -3):,}"


def with_link(text: Any, url: str, link: str) -> SafeString:
    """A text and a link behind it; the text alone without an address."""
    return format_html('{} <a href="{}">{}</a>', text, url, link) if url else format_html("{}", text)


def queue_link(label: str, queue: Any, admin_site: Any, request: Any) -> Any:
    """The name of a queue, linked to its messages if the user may see that page."""
    page = admin_site._registry.get(queue) if queue is not None else None
    if page is None or not page.has_view_permission(request):
        return inline(label)
    meta = queue._meta
    url = reverse(f"{admin_site.name}:{meta.app_label}_{meta.model_name}_changelist")
    return format_html('<a href="{}">{}</a>', url, breakable(label))
