"""The page of a queue with its charts, and the groups of poison messages."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from queueapp.admin import poison_groups
from queueapp.admin.formatting import charts
from queueapp.models import Now, PoisonMessage, QueueControl, QueueSnapshot, Subscriber
from queueapp.operations import ledger
from queueapp.sql import backend_of
from tests.testapp.models import Leased, Ledgered

from .conftest import url

LABEL = "testapp.Leased"


def history(period: int, **figures: Any) -> None:
    now = backend_of(connection).now(connection)
    for number in range(10, 0, -1):
        at = now - timedelta(seconds=period * number)
        QueueSnapshot.objects.create(queue=LABEL, period=period, at=at, seconds=period, **figures)


def test_the_page_of_a_queue_has_charts_with_a_table_each(operator: Client) -> None:
    history(60, ready=7, in_flight=2, handled=600, arrived=1200, handling_p50=0.01, handling_p95=0.25)
    Subscriber.objects.create(
        queue=LABEL, host="worker-9", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1),
        consumers='[["shop.bill", "Order"]]', outstanding=3,
    )  # fmt: skip
    response = operator.get(url(QueueControl, "charts", LABEL))
    text = response.content.decode()
    assert [chart.title for chart in response.context["charts"]] == [
        "Depth", "Messages a second", "Failed attempts a second", "Handling time",
    ]  # fmt: skip
    assert "Depth: ready, in flight; highest 7" in text
    assert "Messages a second: in, out; highest 20" in text
    assert "Handling time: median, 95th percentile; highest 250 ms" in text
    assert "worker-9:1" in text
    assert "shop.bill" in text
    assert text.count("<td>10 ms</td><td>250 ms</td>") == 10
    assert " style=" not in text, "a strict policy allows no inline style"


def test_the_page_of_a_queue_shows_the_last_check_of_its_ledger(operator: Client) -> None:
    def line() -> str:
        text = operator.get(url(QueueControl, "charts", "testapp.Ledgered")).content.decode()
        found = re.search(r"Ledger</th><td>(.*?)</td>", text)
        return re.sub("<.*?>", "", found[1]) if found else ""

    assert line() == "not checked yet"
    Ledgered.send({})
    ledger.check(Ledgered, "default")
    assert line().startswith("closed at 20")
    Ledgered.objects.all().delete()
    ledger.check(Ledgered, "default")
    assert line().startswith("the ledger does not close: 1 fewer in the queue than counted, since 20")
    assert '"row">Ledger<' not in operator.get(url(QueueControl, "charts", LABEL)).content.decode()


@pytest.mark.parametrize(("span", "period"), [("1h", 60), ("24h", 300), ("7d", 3600), ("1y", 60)])
def test_each_span_has_points_of_its_own_period(operator: Client, span: str, period: int) -> None:
    history(period, ready=period)
    chart = operator.get(url(QueueControl, "charts", LABEL), {"span": span}).context["charts"][0]
    assert {value for _, series in chart.lines for _, value in series} == {period, None}


def test_a_queue_without_history_says_why(operator: Client) -> None:
    assert "There is no history for this time" in operator.get(url(QueueControl, "charts", LABEL)).content.decode()
    assert operator.get(url(QueueControl, "charts", "gone.Queue")).status_code == 404


def test_a_user_without_rights_sees_no_charts_and_a_viewer_no_buttons(staff: Callable[..., Client]) -> None:
    assert staff("testapp.view_leased").get(url(QueueControl, "charts", LABEL)).status_code == 403
    text = staff("queueapp.view_queuecontrol").get(url(QueueControl, "charts", LABEL)).content.decode()
    assert "Purge" not in text


# -- drawing ---------------------------------------------------------------------------------------------------------


def test_a_line_is_broken_where_values_are_missing() -> None:
    end = datetime(2026, 1, 1, tzinfo=UTC)
    minutes = [(end - timedelta(minutes=60 - n), float(n)) for n in range(60)]
    holes = [*minutes[:10], (minutes[10][0], None), *minutes[11:20], *minutes[40:]]
    drawn = charts.sparkline(holes, end, timedelta(hours=1), "ready")
    assert drawn.count("<polyline") == 3
    assert 'aria-label="ready: from 0 to 59, highest 59"' in drawn
    assert "<polyline" not in charts.sparkline([], end, timedelta(hours=1), "ready")


def test_the_table_of_a_chart_is_bounded() -> None:
    end = datetime(2026, 1, 1, tzinfo=UTC)
    series = [(end - timedelta(minutes=n), 1.0) for n in range(1000)]
    chart = charts.Chart("t", [("a", series)], end, timedelta(days=1), str)
    assert len(chart.rows) <= charts.TABLE_ROWS
    assert chart.rows[0] == (end, ["1.0"])


# -- poison groups ---------------------------------------------------------------------------------------------------


def poison(count: int, **columns: Any) -> list[int]:
    columns = {
        "queue": LABEL,
        "reason": "ValueError: no gate",
        "exception_type": "ValueError",
        "group_key": "a",
    } | columns
    return [PoisonMessage.objects.create(message_id=uuid.uuid4(), **columns).pk for _ in range(count)]


def test_poison_opens_with_its_groups(operator: Client) -> None:
    trace = 'Traceback:\n  File "/app/shop/views.py", line 3, in call\n  File "/app/shop/gate.py", line 12, in gate\n'
    poison(3, traceback=trace, host="w-1", worker_version="7")
    poison(1, traceback=trace, host="w-2", worker_version="8", queue="testapp.Short")
    poison(2, group_key="b", exception_type="KeyError", reason="'x'")
    poison(1, group_key="", exception_type="", reason="no consumer")
    poison(5, group_key="c", status=PoisonMessage.Status.ARCHIVED)
    response = operator.get(url(PoisonMessage))
    groups = response.context["groups"].groups
    assert [(group.key, group.count) for group in groups] == [("a", 4), ("b", 2), ("", 1)]
    assert groups[0].frame == "shop/gate.py:12 gate"
    assert (groups[0].versions, groups[0].hosts) == ({"7", "8"}, {"w-1", "w-2"})
    assert groups[0].queues == {LABEL, "testapp.Short"}
    assert sum(groups[0].hours) == 4
    text = response.content.decode()
    assert "KeyError: &#x27;x&#x27;" in text
    assert text.count("Requeue group") == 2, "messages without a group have no button"
    assert "groups" not in operator.get(url(PoisonMessage) + "?group=a").context


def test_a_group_is_requeued_from_its_row(operator: Client) -> None:
    numbers = poison(3)
    poison(1, group_key="b")
    data = {"action": "requeue", "select_across": "1", "_selected_action": str(numbers[-1])}
    asked = operator.post(url(PoisonMessage) + "?group=a", data)
    assert "Requeue 3 messages?" in asked.content.decode()
    hidden = dict(asked.context["hidden"])
    operator.post(url(PoisonMessage) + "?group=a", {**data, **hidden, "confirmed": "yes", "counts": "reset"})
    assert Leased.objects.count() == 3
    assert PoisonMessage.objects.get().group_key == "b"


def test_only_users_who_may_requeue_have_the_button(staff: Callable[..., Client]) -> None:
    poison(1)
    text = staff("queueapp.view_poisonmessage").get(url(PoisonMessage)).content.decode()
    assert "no gate" in text
    assert "Requeue group" not in text


def test_groups_are_counted_among_the_newest_and_say_so(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison_groups, "READ", 2)
    poison(3)
    found = operator.get(url(PoisonMessage)).context["groups"]
    assert (found.groups[0].count, found.complete) == (2, False)


# -- what an operator finds from the overview alone ----------------------------------------------------------------


def test_a_tenant_who_floods_a_queue_is_what_its_newest_messages_have_in_common(
    operator: Client, staff: Callable[..., Client]
) -> None:
    for number in range(5):
        Leased.send({"n": number}, headers={"tenant": f"t-{number}"})
    Leased.send_many([{"n": number} for number in range(95)], headers={"tenant": "acme <b>"})
    address = url(QueueControl, "charts", LABEL)
    assert address in operator.get(url(QueueControl)).content.decode()
    text = operator.get(address).content.decode()
    assert "acme &lt;b&gt;" in text
    assert "95 %" in text
    link = re.search(r'href="([^"]+q=header[^"]+acme[^"]+)"', text)
    assert link is not None
    assert operator.get(unescape(link[1])).context["cl"].result_count == 95
    assert "acme" not in staff("queueapp.view_queuecontrol").get(address).content.decode()


def test_a_worker_that_hangs_in_a_message_is_named_on_the_overview(operator: Client) -> None:
    Leased.send({})
    Subscriber.objects.create(
        queue=LABEL, host="w-1", process=7, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1),
        outstanding=1, running=json.dumps([[17, "shop.board", 600.0]]),
    )  # fmt: skip
    text = operator.get(url(QueueControl)).content.decode()
    assert "message 17 in shop.board on w-1:7 has run for 10 min" in text.replace("<wbr>", "")
    assert ">long handler</span>" in text


def test_a_consumer_that_fails_since_a_deploy_is_a_group_with_its_version(operator: Client) -> None:
    for version, count in (("1.0", 1), ("2.0", 5)):
        for _ in range(count):
            PoisonMessage.objects.create(
                message_id=uuid.uuid4(), queue=LABEL, reason="KeyError: gate", exception_type="KeyError",
                group_key=version, worker_version=version, headers="{}", consumer="shop.board",
            )  # fmt: skip
    overview = operator.get(url(QueueControl)).content.decode()
    poison = re.search(r'href="([^"]+poisonmessage/\?queue=testapp.Leased)"', overview)
    assert poison is not None, "the number of poison messages leads to them"
    groups = operator.get(poison[1]).context["groups"].groups
    assert [(group.count, group.versions) for group in groups] == [(5, {"2.0"}), (1, {"1.0"})]
