"""Traces across real processes: what a worker has traced leaves it before it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Effect, Leased
from tests.workers.trees import Tree

pytestmark = [real_commits]

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_one_trace_goes_through_the_handlers_of_a_tree(
    start_tree: Callable[..., Tree], child_environment: dict[str, str], tmp_path: Path
) -> None:
    traces = tmp_path / "traces"
    child_environment |= {"DJANGO_SETTINGS_MODULE": "tests.traced.settings", "TESTS_TRACES": str(traces)}
    # As a web process that is traced sends it.
    Leased.send(
        b'{"name":"an order"}',
        headers={"type": "tests.traced.consumers.Order", "content-type": "application/json", "traceparent": GIVEN},
    )
    tree = start_tree("testapp.Leased", "testapp.Transactional")
    eventually(lambda: tree.process.poll() is not None or Effect.objects.exists(), 4 * DEADLINE)
    assert tree.terminate() == 0, tree.output

    spans = [json.loads(line) for line in traces.read_text().splitlines()]
    by_name: dict[str, Any] = {span["name"]: span for span in spans}
    (effect,) = Effect.objects.all()
    packed, sent, shipped = (
        by_name[name]
        for name in ("process testapp.Leased", "send testapp.Transactional", "process testapp.Transactional")
    )
    assert packed["parent_id"] == f"0x{GIVEN.split('-')[2]}"
    assert sent["parent_id"] == packed["context"]["span_id"]
    assert shipped["parent_id"] == sent["context"]["span_id"]
    assert {span["context"]["trace_id"] for span in (packed, sent, shipped)} == {f"0x{GIVEN.split('-')[1]}"}
    assert effect.detail.split("-")[2] == sent["context"]["span_id"][2:]
