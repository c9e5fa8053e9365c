"""docs/howto/recipes.md: the delays stay within their bounds, the event is what PagerDuty reads, the dashboard uses our
metrics."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from queueapp import Poison
from queueapp.alerts.channels import Notification
from queueapp.conf import settings
from queueapp.failures.recoverability import default_policy

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "howto" / "recipes.md"


@pytest.mark.django_db(transaction=True)
def test_the_delay_doubles_up_to_an_hour_and_the_eighth_failure_is_the_last() -> None:
    with run_blocks(PAGE) as module:

        def option(name: str) -> Any:
            declared = getattr(module.Webhooks.delivery, name, None)
            return getattr(settings, name.upper()) if declared is None else declared

        def verdict(attempt: int) -> Any:
            failure = SimpleNamespace(attempt=attempt, exception=ValueError("no"), consumer=None, option=option)
            return default_policy(failure)  # type: ignore[arg-type]

        for attempt in range(1, 8):
            shortest = timedelta(seconds=2**attempt)
            assert shortest <= verdict(attempt).delay <= min(1.5 * shortest, timedelta(hours=1))
        assert isinstance(verdict(8), Poison)


@pytest.mark.django_db(transaction=True)
def test_an_alert_and_its_end_have_one_deduplication_key_at_pagerduty() -> None:
    alert = Notification(
        "age", "shop.Orders", "", "The oldest message waits for 7 minutes", "default", datetime.now(UTC)
    )
    over = Notification("age", "shop.Orders", "", "over", "default", datetime.now(UTC), resolved=True)
    with run_blocks(PAGE) as module:
        first, last = (module.pagerduty_event(item, "key") for item in (alert, over))
    assert (first["event_action"], last["event_action"]) == ("trigger", "resolve")
    assert first["dedup_key"] == last["dedup_key"]


def test_the_dashboard_shows_metrics_of_the_monitoring_page_and_no_others() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    page = (DOCS / "monitoring.md").read_text()
    shown = set(re.findall(r"queueapp_\w+", page)) | {
        f"queueapp_messages{end}" for end in re.findall(r"`…(_\w+)`", page)
    }
    used = {name.removesuffix("_bucket") for name in re.findall(r"queueapp_\w+", expressions)}
    assert used <= shown
