"""The guide's Python blocks run, in order, on a real database; and every public name is on that page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from django.apps import apps
from django.db import connection

import queueapp
from queueapp import registry
from queueapp.consuming.registry import registered
from queueapp.sending.isolation import close_isolated

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def blocks() -> list[tuple[int, str]]:
    """(line, code) of every Python block."""
    text = GUIDE.read_text()
    return [(text[: m.start()].count("\n") + 2, m[1]) for m in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def create_missing_tables() -> None:
    """What makemigrations and migrate would do for the models a block has just defined."""
    there = connection.introspection.table_names()
    with connection.schema_editor() as editor:
        for queue in registry.queues:
            if queue._meta.app_label == "shop" and queue._meta.managed and queue._meta.db_table not in there:
                editor.create_model(queue)


@pytest.mark.django_db(transaction=True)
def test_the_blocks_of_the_guide_run() -> None:
    module = ModuleType("tests.shop.models")
    sys.modules[module.__name__] = module
    before = set(registry.queues._by_label)
    try:
        for line, code in blocks():
            exec(compile("\n" * (line - 1) + code, str(GUIDE), "exec"), module.__dict__)
            create_missing_tables()
        assert {c.name.rsplit(".", 1)[-1] for c in registered.of(module.__dict__["Orders"])} == {"ship", "Refund"}
    finally:
        close_isolated()
        with connection.schema_editor() as editor:
            for label in set(registry.queues._by_label) - before:
                queue = registry.queues._by_label.pop(label)
                registered._by_queue.pop(label, None)
                apps.all_models["shop"].pop(queue._meta.model_name, None)
                if queue._meta.managed:
                    editor.delete_model(queue)
        apps.clear_cache()
        del sys.modules[module.__name__]


def test_every_public_name_is_in_an_example() -> None:
    code = "\n".join(code for _, code in blocks())
    missing = [name for name in queueapp.__all__ if not re.search(rf"\b{name}\b", code)]
    assert missing == []
