"""The notebook of docs/howto/spark.md runs, cell by cell, and docs/spark.md has every option and state."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from queueapp.contrib.spark.options import OPTIONS, STREAM_OPTIONS, State
from queueapp.failures.poison_store import insert_poison
from queueapp.sql.message_columns import Row
from tests.docs.pages import DOCS, Block
from tests.docs.running import run_blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def failed_orders(block: Block) -> None:
    """What workers have left before the cell that asks why."""
    if block.title == "poison":
        for error in (ConnectionError, ConnectionError, ConnectionError, ValueError, ValueError):
            row = Row(0, uuid.uuid4(), "{}", b"{}")
            insert_poison("default", "shop.LargeOrders", row, "no", attempts=3, exception=error("no"))


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_notebook_runs(spark: SparkSession, settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"orders": timedelta(days=14)}}
    with run_blocks(DOCS / "howto" / "spark.md", failed_orders) as module:
        assert settings.QUEUEAPP == module.QUEUEAPP


def test_every_option_and_state_is_on_the_page() -> None:
    text = (DOCS / "spark.md").read_text()
    for option in (*OPTIONS, *STREAM_OPTIONS):
        default = f"{option.default:,} |" if isinstance(option.default, int) else ""
        if isinstance(option.default, bool):
            default = f"{str(option.default).lower()} |"
        assert f"| `{option.name}` | {default}" in text, option.name
    for state in State:
        assert f"| `{state.value}` |" in text, state
