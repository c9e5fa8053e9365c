"""docs/settings.md is made from the declarations, so it cannot say anything else than the code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from queueapp import conf
from queueapp.conf import asyncmonolith_names
from queueapp.consuming.options import OPTIONS
from queueapp.models import delivery
from queueapp.options import Option

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def table(options: Iterable[Option]) -> str:
    rows = ["| name | default | accepted | meaning |", "| --- | --- | --- | --- |"]
    for one in options:
        default = getattr(one.default, "value", one.default)
        rows.append(f"| `{one.name}` | `{default}` | {one.accepted} | {_cell(one.doc)} |")
    return "\n".join(rows)


def origin_table() -> str:
    rows = [
        "| name | default there | accepted there | ours | accepted | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in asyncmonolith_names.SETTINGS:
        ours = ", ".join(f"`{name}`" for name in one.ours)
        default = f"{one.default} {one.unit}".strip()
        rows.append(f"| `{one.name}` | {default} | {one.theirs} | {ours} | {one.accepted} | {_cell(one.doc)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """A bar in it would begin the next cell."""
    return text.replace("|", "\\|")


def page() -> str:
    return f"""# Settings

Made from the code by `UPDATE_DOCS=1 python -m pytest tests/docs`; a value out of its bounds is refused at start.
Names of NServiceBus, AMPS and AsyncMonolith in the last column are those of [lineage.md](lineage.md), which tells what differs.

## The project: `QUEUEAPP = {{...}}` in Django's settings

{table(conf.OPTIONS)}

### Under AsyncMonolith's names

`QUEUEAPP` takes these as well, each in the unit that it has there. Two names of one setting that disagree are refused.

{origin_table()}

## A queue: `class Delivery`

{table(delivery.OPTIONS)}

## A consumer: `@consumer(queue, ...)`, or attributes of a `Consumer` class

{table(OPTIONS)}
"""


def test_the_settings_page_says_what_the_code_says() -> None:
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run UPDATE_DOCS=1 python -m pytest tests/docs"
