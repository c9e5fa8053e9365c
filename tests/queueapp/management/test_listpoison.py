"""``listpoison`` shows what a foreign writer may have written, escaped."""

from __future__ import annotations

import json
import uuid
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from queueapp.models import PoisonMessage

pytestmark = pytest.mark.django_db


def bury(**fields: Any) -> None:
    PoisonMessage.objects.create(
        **{"queue": "testapp.Leased", "message_id": uuid.uuid4(), "reason": "", "attempts": 1} | fields
    )


def listed(*arguments: str) -> tuple[list[str], str]:
    """(lines, what was said beside them)."""
    out, beside = StringIO(), StringIO()
    call_command("listpoison", *arguments, stdout=out, stderr=beside, no_color=True)
    return out.getvalue().splitlines(), beside.getvalue()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("boom\nDROP everything", "boom DROP everything"),
        ("\x1b[2J\x1b]0;title\x07", "⟨U+001B⟩[2J⟨U+001B⟩]0;title⟨U+0007⟩"),
        ("a\rb\tc\x85d\u2028e", "a⟨U+000D⟩b c⟨U+0085⟩d⟨U+2028⟩e"),
        ("moc.live\u202e", "moc.live⟨U+202E⟩"),
        ("\x9b31m", "⟨U+009B⟩31m"),
    ],
)
@pytest.mark.parametrize("field", ["reason", "queue", "consumer"])
def test_no_control_character_of_a_message_reaches_the_terminal(field: str, written: str, shown: str) -> None:
    bury(**{field: written})

    (line,), _ = listed()

    assert shown in line
    assert line.isprintable()


def test_a_long_reason_is_cut_and_reports_it() -> None:
    bury(reason="x" * 450)

    (line,), _ = listed()

    assert line.endswith("x" * 300 + "… (150 characters more)")


def test_more_messages_than_the_limit_are_reported() -> None:
    for _ in range(3):
        bury()

    assert listed("--limit", "2")[1] == "Only the newest 2 are shown; there are more (see --limit).\n"
    assert len(listed("--limit", "2")[0]) == 2
    assert listed("--limit", "3")[1] == ""


def test_json_stays_parseable_when_something_is_left_out() -> None:
    for _ in range(2):
        bury(reason="\x1b[2J\n")

    lines, beside = listed("--json", "--limit", "1")

    (loads,) = [json.loads(line) for line in lines]
    assert loads["reason"] == "\x1b[2J\n"
    assert lines[0].isprintable()
    assert "there are more" in beside


def test_a_queue_is_named_by_label_or_table_also_when_it_is_no_more() -> None:
    bury(queue="gone.Queue")
    bury()

    assert len(listed("--queue", "gone.Queue")[0]) == 1
    assert len(listed("--queue", "testapp_leased")[0]) == 1
