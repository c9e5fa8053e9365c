"""The page of Django's tasks: its blocks run, in order, with the settings that it shows."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from queueapp.contrib.tasks import consumers
from queueapp.contrib.tasks.models import TaskQueue
from queueapp.contrib.tasks.task_options import OPTIONS
from tests.in_process_worker import Worker, eventually

from .pages import DOCS, blocks
from .running import run_blocks

PAGE = DOCS / "howto/tasks.md"


@pytest.mark.django_db(transaction=True)
def test_the_blocks_of_the_page_run(settings: Any, monkeypatch: pytest.MonkeyPatch, no_consumers: None) -> None:
    if find_spec("django.tasks") is None:
        monkeypatch.setitem(sys.modules, "django.tasks", import_module("django_tasks"))
    shown: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0].code, shown)
    assert set(shown["INSTALLED_APPS"]) <= {*settings.INSTALLED_APPS, "queueapp.workers"}
    settings.TASKS = shown["TASKS"]
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    with run_blocks(PAGE) as module:
        consumers.install()
        worker = Worker(TaskQueue).start()
        eventually(lambda: not TaskQueue.objects.exists())
        worker.stop()
        module.result.refresh()
        assert module.result.return_value == 3
        module.later.refresh()
        assert (module.later.status, module.later.task.queue_name) == ("READY", "mail")
        assert module.Jobs._meta.label == "shop.Jobs"
        assert module.Jobs.delivery.priorities == 10


def test_every_option_of_the_backend_is_on_the_page() -> None:
    text = PAGE.read_text()
    own_value = [option.name for option in OPTIONS][:5]

    assert [name for name in own_value if f"| `{name}` |" not in text] == []
    assert own_value == ["queue", "enqueue_on_commit", "retention", "work", "modules"]
