"""Running the Python blocks of a page, in order, as if they were the models module of an app."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from django.apps import apps
from django.db import connection

from queueapp import registry
from queueapp.consuming.registry import registered
from queueapp.schedules.declarations import declared
from queueapp.sending.isolation import close_isolated

from .pages import Block, blocks


def create_missing_tables() -> None:
    """What makemigrations and migrate would do for the models a block has just defined."""
    there = connection.introspection.table_names()
    with connection.schema_editor() as editor:
        for queue in registry.queues:
            if queue._meta.app_label == "shop" and queue._meta.managed and queue._meta.db_table not in there:
                editor.create_model(queue)


def module_of(page: Path, name: str) -> ModuleType:
    """A module made of every Python block of a page, in order; its lines are those of the page."""
    module = ModuleType(name)
    for block in blocks(page, "python"):
        _run(block, page, module)
    return module


@contextmanager
def run_blocks(page: Path, before: Callable[[Block], None] = lambda block: None) -> Iterator[ModuleType]:
    """Run them; the module with all that they have made. What they registered is gone at the end. ``before`` is called
    with each block before it runs."""
    module = ModuleType("tests.guide_app.models")
    sys.modules[module.__name__] = module
    known, schedules = set(registry.queues), dict(declared)
    try:
        for block in blocks(page, "python"):
            before(block)
            _run(block, page, module)
            create_missing_tables()
        yield module
    finally:
        close_isolated()
        for name in declared.keys() - schedules.keys():
            del declared[name]
        with connection.schema_editor() as editor:
            for queue in set(registry.queues) - known:
                registry.queues.remove(queue)
                for registration in registered.of(queue):
                    registered.remove(registration.name)
                apps.all_models["shop"].pop(queue._meta.model_name, None)
                if queue._meta.managed:
                    editor.delete_model(queue)
        apps.clear_cache()
        del sys.modules[module.__name__]


def _run(block: Block, page: Path, module: ModuleType) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
