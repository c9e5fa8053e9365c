"""The metrics of the site, read by Prometheus' own parser."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Permission
from django.db import connection
from django.test import Client, RequestFactory
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from queueapp.metrics.permissions import cached_stats
from queueapp.metrics.views import metrics
from queueapp.models import Now, Subscriber
from queueapp.operations import control
from tests.testapp.models import Leased, Short

from .conftest import TOKEN

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("anew")]


def scrape(accept: str = "") -> dict[tuple[str, str], float]:
    """(metric, queue) -> value of those with one label."""
    cached_stats.clear()
    response = Client().get("/metrics", headers={"authorization": f"Bearer {TOKEN}", "accept": accept})
    assert response.status_code == 200
    parse = openmetrics if "openmetrics" in accept else text_string_to_metric_families
    families = parse(response.content.decode())
    return {
        (sample.name, sample.labels["queue"]): sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) == {"queue"}
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_the_figures_of_a_queue_are_metrics(accept: str) -> None:
    Leased.send_many(range(3))
    Leased.send(1, delay=timedelta(hours=1))
    Subscriber.objects.create(
        id=uuid.uuid4(), queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(),
        alive_until=Now() + timedelta(seconds=20),
    )  # fmt: skip

    found = scrape(accept)

    def of(name: str) -> float | None:
        return found.get((f"queueapp_{name}", "testapp.Leased"))

    assert (of("messages_waiting"), of("messages_leased"), of("messages_delayed"), of("messages_poison")) == (
        3,
        0,
        1,
        0,
    )
    assert (of("workers"), of("paused"), of("messages_exact"), of("scrape_errors")) == (1, 0, 1, 0)
    assert 0 <= (of("oldest_message_age_seconds") or -1) < 60
    assert of("heartbeat_age_seconds") is not None
    assert of("messages_pending_evaluation") is None, "a queue without expressions has none"
    assert found[("queueapp_oldest_message_age_seconds", "testapp.Short")] == 0
    assert found[("queueapp_workers", "(dispatcher)")] == 0


def test_what_is_not_known_is_left_out_and_never_zero() -> None:
    with connection.schema_editor() as editor:
        editor.alter_db_table(Short, Short._meta.db_table, "elsewhere")
    try:
        found = scrape()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(Short, "elsewhere", Short._meta.db_table)

    assert found[("queueapp_scrape_errors", "testapp.Short")] == 1
    for name in ("messages_waiting", "messages_leased", "oldest_message_age_seconds", "messages_exact"):
        assert (f"queueapp_{name}", "testapp.Short") not in found
    assert found[("queueapp_messages_waiting", "testapp.Leased")] == 0


def test_a_breaker_that_is_not_closed_is_a_metric() -> None:
    reported = '[{"breaker": "peek", "name": "Peek of testapp.Leased", "state": "open", "error": "a \\"quoted\\" one"}]'
    Subscriber.objects.create(
        id=uuid.uuid4(), queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), breakers=reported,
        alive_until=Now() + timedelta(seconds=20),
    )  # fmt: skip
    control.pause(Leased)
    text = Client().get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).content.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}

    (sample,) = families["queueapp_breaker_open"].samples
    assert sample.labels == {"queue": "testapp.Leased", "breaker": "peek", "state": "open"}
    assert "quoted" not in text, "errors may hold anything"
    paused = {sample.labels["queue"]: sample.value for sample in families["queueapp_paused"].samples}
    assert paused["testapp.Leased"] == 1


@pytest.mark.parametrize(
    ("header", "token", "status"),
    [
        (f"Bearer {TOKEN}", TOKEN, 200),
        ("Bearer another", TOKEN, 401),
        (TOKEN, TOKEN, 401),
        ("", TOKEN, 401),
        ("Bearer ", "", 401),
        ("", "", 401),
        ("Bearer é", TOKEN, 401),
    ],
)
def test_an_unauthorized_request_is_refused(settings: Any, header: str, token: str, status: int) -> None:
    settings.QUEUEAPP = {"METRICS_TOKEN": token}
    request = RequestFactory().get("/metrics", headers={"authorization": header})
    request.user = AnonymousUser()
    response = metrics(request)

    assert response.status_code == status
    assert (b"queueapp_" in response.content) == (status == 200)
    assert response.has_header("WWW-Authenticate") == (status == 401)


def test_a_user_needs_a_permission(django_user_model: Any) -> None:
    user = django_user_model.objects.create_user("looker", password="x", is_staff=True)
    client = Client()
    client.force_login(user)
    assert client.get("/metrics").status_code == 403

    user.user_permissions.add(Permission.objects.get(codename="view_queuecontrol"))
    assert client.get("/metrics").status_code == 200
    assert client.post("/metrics").status_code == 405


def test_several_who_ask_in_one_moment_cost_one_look(django_assert_num_queries: Any) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    first = Client().get("/metrics", headers=headers).content
    with django_assert_num_queries(0):
        assert Client().get("/metrics", headers=headers).content == first
