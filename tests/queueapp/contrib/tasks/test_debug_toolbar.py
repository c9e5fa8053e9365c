"""The panel of tasks of django-debug-toolbar shows what a request has enqueued."""

from __future__ import annotations

from typing import Any

import django
import pytest
from django.http import HttpRequest, HttpResponse

from . import declared

pytestmark = pytest.mark.skipif(django.VERSION < (6, 0), reason="the toolbar's panel of tasks needs Django 6.0")


def test_the_panel_shows_the_tasks_of_a_request(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from debug_toolbar.panels.tasks import TasksPanel

    def respond(request: HttpRequest) -> HttpResponse:
        declared.add.using(priority=5).enqueue(1, right=2)
        return HttpResponse()

    request = HttpRequest()
    panel = TasksPanel(None, respond)  # the toolbar around it has a table of its own, and no part in this
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(panel, "record_stats", recorded.update)
    panel.enable_instrumentation()
    try:
        response = panel.process_request(request)
        panel.generate_stats(request, response)
    finally:
        panel.disable_instrumentation()

    (shown,) = recorded["tasks"]
    assert shown["task"]["module_path"] == "tests.queueapp.contrib.tasks.declared.add"
    assert (shown["task"]["priority"], shown["status"], shown["args"]) == (5, "READY", [1])
    assert shown["kwargs"] == {"right": 2}
