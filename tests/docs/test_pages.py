"""The examples of the pages run, and the reference pages have every name that the code has."""

from __future__ import annotations

import dataclasses
import re
import uuid
from pathlib import Path

import pytest
from django.db import router
from django.dispatch import Signal

from project import settings as project
from queueapp import Context, signals
from queueapp.expressions import ParsedMessage, compile_expression
from queueapp.expressions.functions import FUNCTIONS, SPECIAL
from queueapp.failures.recoverability import Failure
from queueapp.sql.message_columns import Row
from tests.testapp.models import Leased

from .pages import DOCS, PAGES, blocks
from .running import run_blocks

#: Run by tests of their own, or illustrations that need code of a project (the start page, the last two).
ELSEWHERE = (
    "index.md",
    "guide.md",
    "tutorial.md",
    "howto/deployment.md",
    "howto/schedules.md",
    "howto/tasks.md",
    "howto/tracing.md",
    "howto/testing.md",
    "howto/order-flow.md",
    "delayed_store.md",
    "reference/encoding.md",
    "reference/journal.md",
    "admin.md",
    "spark.md",
    "howto/spark.md",
)
RUN = [page for page in PAGES if page.relative_to(DOCS).as_posix() not in ELSEWHERE and blocks(page, "python")]


def page(name: str) -> Path:
    return DOCS / name


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", [page.relative_to(DOCS).as_posix() for page in RUN])
def test_the_python_of_the_page_runs(name: str) -> None:
    with run_blocks(page(name)):
        pass


def test_every_attribute_of_a_context_is_on_its_page() -> None:
    text = page("reference/context.md").read_text().partition("\n## What a policy gets")[0]
    assert [name for name in dir(Context) if not name.startswith("_") and f"`{name}" not in text] == []


def test_every_attribute_of_a_failure_and_its_row_is_on_the_page() -> None:
    text = page("reference/context.md").read_text().partition("\n## What a policy gets")[2]
    names = {field.name for field in dataclasses.fields(Failure)} | set(dir(Failure)) | set(Row._fields)
    assert [name for name in sorted(names) if not name.startswith("_") and f"`{name}" not in text] == []


def test_every_signal_is_on_its_page_and_no_other() -> None:
    declared = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    named = re.findall(r"^\| `(\w+)` \|", page("reference/signals.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(declared)


def test_every_function_of_expressions_is_on_their_page_and_no_other() -> None:
    functions = page("reference/expressions.md").read_text().partition("\n## Functions")[2].partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`.*?`) \|", functions, re.MULTILINE))
    assert set(re.findall(r"([A-Z_0-9]+)\(", rows)) == {*FUNCTIONS, *SPECIAL}


def test_every_expression_of_the_page_gives_what_it_states() -> None:
    rows = re.findall(r"^\| `(.+)` \| `([^`]+)` \|$", page("reference/expressions.md").read_text(), re.MULTILINE)
    assert len(rows) == 16
    for text, result in rows:
        expected, given = (compile_expression(item).evaluate(ParsedMessage({})) for item in (result, text))
        assert (type(given), given) == (type(expected), expected), text


@pytest.mark.parametrize("word", ["AND", "OR"])
def test_the_truth_tables_of_the_page_are_true(word: str) -> None:
    table = page("reference/expressions.md").read_text().partition(f"\n| {word} | TRUE | FALSE | NULL |\n")[2]
    for row in table.splitlines()[1:4]:
        left, *results = re.findall(r"TRUE|FALSE|NULL", row)
        for right, result in zip(("TRUE", "FALSE", "NULL"), results, strict=True):
            given = compile_expression(f"{left} {word} {right}").evaluate(ParsedMessage())
            assert given is compile_expression(result).evaluate(ParsedMessage())


@pytest.mark.django_db(transaction=True)
def test_the_receivers_of_the_page_are_called() -> None:
    with run_blocks(page("reference/signals.md")) as module:
        signals.send_expired(module.Payments, [uuid.UUID(int=1), uuid.UUID(int=2)], signals.TIME_IS_OVER)
        assert module.reported == [("shop.Payments", 2, "its time was over")]


@pytest.mark.django_db(transaction=True)
def test_the_router_of_the_page_places_the_queues_of_one_app(settings: object) -> None:
    with run_blocks(page("howto/databases.md")) as module:
        routes = module.Routes()
        settings.DATABASE_ROUTERS = [routes]
        assert router.db_for_write(Leased) == "default"
        assert [routes.allow_migrate("warehouse", app) for app in ("queueapp", "warehouse", "shop")] == [
            True,
            True,
            False,
        ]
        assert [routes.allow_migrate("default", app) for app in ("queueapp", "warehouse", "shop")] == [
            True,
            False,
            True,
        ]


@pytest.mark.django_db(transaction=True)
def test_the_figures_and_the_formatter_of_the_page_state_what_there_is() -> None:
    Leased.send({"n": 1})
    with run_blocks(page("howto/alerts.md")) as module:
        assert module.late(-1.0) == ["testapp.Leased"]
        assert module.late(3600.0) == []
        given = module.LOGGING["formatters"]["json"]
        assert given == project.LOGGING["formatters"]["json"], "as the demo site has it"
