"""docs/howto/recipes.md: the policy backs off within its bounds, the event is what PagerDuty reads, the dashboard uses our metrics."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from queueapp import Poison, RetryLater
from queueapp.alerts.channels import Notification

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "howto" / "recipes.md"


@pytest.mark.django_db(transaction=True)
def test_the_policy_doubles_its_delay_up_to_an_hour_and_gives_up_after_eight_attempts() -> None:
    with run_blocks(PAGE) as module:
        for attempt in range(1, 8):
            verdict = module.exponential(SimpleNamespace(attempt=attempt, exception=ValueError()))
            longest = min(timedelta(seconds=2**attempt), timedelta(hours=1))
            assert isinstance(verdict, RetryLater)
            assert longest / 2 <= verdict.delay <= longest
        assert isinstance(module.exponential(SimpleNamespace(attempt=8, exception=ValueError())), Poison)


@pytest.mark.django_db(transaction=True)
def test_an_alert_and_its_end_have_one_deduplication_key_at_pagerduty() -> None:
    alert = Notification(
        "age", "shop.Orders", "", "The oldest message waits for 7 minutes", "default", datetime.now(UTC)
    )
    over = Notification("age", "shop.Orders", "", "over", "default", datetime.now(UTC), resolved=True)
    with run_blocks(PAGE) as module:
        first, last = (module.pagerduty_event(each, "key") for each in (alert, over))
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
