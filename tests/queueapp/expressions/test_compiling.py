"""What an expression is once it is compiled: kept, shared, and good for filters, priorities and barriers."""

from __future__ import annotations

import subprocess
import sys
import threading
from math import isnan
from pathlib import Path

import pytest

from queueapp.expressions import Expression, ParsedMessage, compile_expression
from tests.in_process_worker import patience

CHECKOUT = Path(__file__).parents[3]


def test_the_same_text_is_compiled_once() -> None:
    assert compile_expression("/a = 1") is compile_expression("/a = 1")
    assert compile_expression("/a = 1") is not compile_expression("/a = 1", strict=True)
    assert compile_expression("/a = 1", strict=True).strict


def test_it_knows_its_text() -> None:
    expression = compile_expression("/a = 1", strict=True)
    assert (expression.text, str(expression)) == ("/a = 1", "/a = 1")
    assert repr(expression) == "<expression '/a = 1' strict>"


def test_it_cannot_be_given_other_attributes() -> None:
    with pytest.raises(AttributeError):
        compile_expression("/a = 1").undeclared = 1  # type: ignore[attr-defined]


def test_a_filter_takes_what_it_matches() -> None:
    wanted = compile_expression("/symbol IN ('MSFT', 'IBM') AND /price * /qty > 1000")
    orders = [{"symbol": "IBM", "price": 10, "qty": 101}, {"symbol": "IBM", "price": 10, "qty": 100}, {"symbol": "X"}]
    assert [wanted.matches(ParsedMessage(order)) for order in orders] == [True, False, False]


def test_a_priority_is_a_field_or_a_product_and_nan_is_detected() -> None:
    by_field, by_product = compile_expression("/priority"), compile_expression("/price * /quantity")
    body = {"priority": 2**64 - 1, "price": 3, "quantity": "4"}
    assert by_field.evaluate(ParsedMessage(body)) == 2**64 - 1
    assert by_product.evaluate(ParsedMessage(body)) == 12
    priority = by_product.evaluate(ParsedMessage({"price": 3, "quantity": "many"}))
    assert isinstance(priority, float)
    assert isnan(priority)
    assert by_product.evaluate(ParsedMessage({})) is None


def test_a_barrier_is_any_value_that_is_not_null() -> None:
    barrier = compile_expression("/isSyncPoint IS NOT NULL")
    assert [barrier.matches(ParsedMessage(body)) for body in ({"isSyncPoint": 0}, {"isSyncPoint": ""}, {}, None)] == [
        True, False, False, False,
    ]  # fmt: skip


def test_threads_share_the_parser_and_the_expressions() -> None:
    """From the first parse of a process on, so in a process of its own."""
    code = (
        "import threading\n"
        "from queueapp.expressions import ParsedMessage, compile_expression\n"
        "begin, wrong = threading.Barrier(8), []\n"
        "def work(number):\n"
        "    begin.wait()\n"
        "    for n in range(40):\n"
        "        text = f'/a = {number} AND (/b IN ({n}, {n + 1}) OR CONCAT(/c, {n}) LIKE \"x{n}$\")'\n"
        "        filter = compile_expression(text)\n"
        "        if not filter.matches(ParsedMessage({'a': number, 'b': n})): wrong.append(text)\n"
        "        if not filter.matches(ParsedMessage({'a': number, 'c': 'x'})): wrong.append(text)\n"
        "        if filter.matches(ParsedMessage({'a': number + 1, 'b': n})): wrong.append(text)\n"
        "def run(number):\n"
        "    try: work(number)\n"
        "    except Exception as error: wrong.append(repr(error))\n"
        "threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(wrong)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_one_expression_serves_many_threads() -> None:
    filter, wrong = compile_expression("/n % 2 = 0 AND /s LIKE '^x[0-9]+$'"), []

    def work() -> None:
        wrong.extend(n for n in range(2000) if filter.matches(ParsedMessage({"n": n, "s": f"x{n}"})) is (n % 2 == 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_importing_queueapp_and_its_models_loads_neither_the_parser_nor_re2() -> None:
    code = (
        "import os, sys, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'tests.settings'; django.setup()\n"
        "import queueapp.queue; print([name for name in ('lark', 're2') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("missing", ["lark", "re2"])
def test_without_the_extra_its_name_is_reported(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import queueapp.expressions"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=patience(60)
    )
    assert "ImportError: queueapp.expressions needs the extra queueapp[expressions]" in done.stderr


def test_an_expression_needs_no_settings() -> None:
    code = "from queueapp.expressions import *; print(compile_expression('1 + 1').evaluate(ParsedMessage()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout.strip() == "2", done.stderr


def test_the_type_is_public() -> None:
    assert isinstance(compile_expression("1"), Expression)
