"""docs/settings.md is made from the declarations, so it cannot say anything else than the code."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from queueapp import conf
from queueapp.conf import asyncmonolith_names
from queueapp.consuming.registry import OPTIONS
from queueapp.models import delivery
from queueapp.options import Option

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def table(options: Iterable[Option]) -> str:
    rows = ["| name | default | accepted | meaning |", "| --- | --- | --- | --- |"]
    for option in options:
        default = getattr(option.default, "value", option.default)
        rows.append(f"| `{option.name}` | `{default}` | {option.accepted} | {_cell(option.doc)} |")
    return "\n".join(rows)


def grouped(groups: Mapping[str, Iterable[Option]]) -> str:
    return "\n\n".join(f"### {heading}\n\n{table(options)}" for heading, options in groups.items())


def origin_table() -> str:
    rows = [
        "| name | default there | accepted there | ours | accepted | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting in asyncmonolith_names.SETTINGS:
        product = ", ".join(f"`{name}`" for name in setting.settings)
        default = f"{setting.default} {setting.unit}".strip()
        rows.append(
            f"| `{setting.name}` | {default} | {setting.asyncmonolith_bound} | {product} | {setting.accepted} | "
            f"{_cell(setting.doc)} |"
        )
    return "\n".join(rows)


def _cell(text: str) -> str:
    """A bar in it would begin the next cell."""
    return text.replace("|", "\\|")


def page() -> str:
    return f"""# Settings

Every setting with its default and its bounds. A value out of its bounds is refused at start. A consumer's option
takes precedence over its queue's, and a queue's over the project's. Names of NServiceBus, AMPS and AsyncMonolith in
the last column are explained in [Lineage](lineage.md). The page is made from the code by `UPDATE_DOCS=1 python -m
pytest tests/docs`.

## The project: `QUEUEAPP = {{...}}` in Django's settings

{grouped(conf.GROUPS)}

### Under AsyncMonolith's names

`QUEUEAPP` accepts these names as well, each in its original unit. Two names of one setting with different values are
refused.

{origin_table()}

## A queue: `class Delivery`

{grouped(delivery.GROUPS)}

## A consumer: `@consumer(queue, ...)`, or attributes of a `Consumer` class

{table(OPTIONS)}
"""


def test_the_settings_page_is_what_the_code_declares() -> None:
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run UPDATE_DOCS=1 python -m pytest tests/docs"
