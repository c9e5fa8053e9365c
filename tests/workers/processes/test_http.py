"""The pages of a process tree: they live, they are ready, and one endpoint counts for all processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError
from prometheus_client.parser import text_string_to_metric_families

from queueapp.errors import InvalidOption
from queueapp.operations import control
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Leased
from tests.workers.trees import Tree, children_of
from workers.management.startup import bind
from workers.processes.http import Endpoint, Reply, Request, parse_address
from workers.processes.metrics import MetricsCollector
from workers.processes.probes import CachedQuery, Probes
from workers.processes.supervisor import Supervisor

pytestmark = [real_commits]


def get(tree: Tree, path: str, **headers: str) -> tuple[int, str]:
    """(status, body) of a page."""
    (address,) = eventually(lambda: re.findall(r"probes and metrics: (http://\S+:\d+)", tree.output)[:1], 4 * DEADLINE)
    request = urllib.request.Request(address + path, headers={name.title(): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def reported(tree: Tree, path: str) -> tuple[int, Any]:
    status, body = get(tree, path)
    return status, json.loads(body)


def value(tree: Tree, name: str, **labels: str) -> float | None:
    """What a scrape says of a sample; None: it is not there."""
    for family in text_string_to_metric_families(get(tree, "/metrics")[1]):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def test_one_endpoint_is_right_for_all_processes_of_a_tree_and_for_those_that_died(
    start_tree: Callable[..., Tree],
) -> None:
    tree = start_tree("testapp.Leased", "--processes", "2", "--http", "0")
    tree.wait_for_workers(2)
    act = {"queue": "testapp.Leased", "consumer": "leased.act"}
    Leased.send_many(Ping(str(number)) for number in range(50))
    eventually(lambda: Effect.objects.count() == 50, 4 * DEADLINE)
    eventually(lambda: value(tree, "queueapp_acked_total", queue="testapp.Leased") == 50)
    assert value(tree, "queueapp_handled_total", **act) == 50
    assert value(tree, "queueapp_handler_seconds_count", **act) == 50
    assert value(tree, "queueapp_handler_seconds_bucket", **act, le="+Inf") == 50
    assert (value(tree, "queueapp_handler_seconds_sum", **act) or 0) > 0
    assert value(tree, "queueapp_receivers", queue="testapp.Leased") == 8
    eventually(lambda: value(tree, "queueapp_messages_waiting", queue="testapp.Leased") == 0)
    assert value(tree, "queueapp_workers", queue="testapp.Leased") == 2
    assert value(tree, "queueapp_breaker_state", breaker="receive", queue="testapp.Leased") == 0

    Leased.send(Ping("failing", fail=1))
    eventually(lambda: value(tree, "queueapp_handled_total", **act) == 51)
    assert value(tree, "queueapp_failed_total", **act, verdict="retry") == 1
    # This one kills its process each time, which the supervisor counts.
    Leased.send(Ping("deadly", die=True))
    eventually(lambda: value(tree, "queueapp_failed_total", **act, verdict="poison") == 1, 4 * DEADLINE)
    restarts = value(tree, "queueapp_process_restarts_total")
    assert restarts == 3
    assert value(tree, "queueapp_failed_total", **act, verdict="retry") == 1 + restarts - 1
    assert value(tree, "queueapp_handled_total", **act) == 51, "of processes that are gone as well"
    tree.wait_for_workers(2)
    eventually(lambda: value(tree, "queueapp_receivers", queue="testapp.Leased") == 8)
    assert tree.terminate() == 0, tree.output


def test_a_tree_is_ready_when_all_of_it_is(start_tree: Callable[..., Tree]) -> None:
    tree = start_tree("testapp.Leased", "--http", "0")
    assert reported(tree, "/healthz")[0] == 200
    found = eventually(lambda: answer[1] if (answer := reported(tree, "/readyz"))[0] == 200 else None, 4 * DEADLINE)
    assert found["ok"] is True
    assert found["workers"] == 1
    assert [item["name"] for item in found["processes"]] == ["worker 1", "dispatcher"]

    control.pause(Leased)
    eventually(lambda: "is paused" in tree.output)
    Leased.send(Ping())
    found = eventually(lambda: answer[1] if (answer := reported(tree, "/readyz?max-waiting=0"))[0] == 503 else None)
    assert "message waits, more than 0" in found["problems"][0]
    assert reported(tree, "/readyz?max-waiting=1000&max-age=3600")[0] == 200
    for wrong in ("max-age=soon", "max-age=nan", "max-age=", "max-waiting=-1", "max_waiting=5"):
        assert get(tree, f"/readyz?{wrong}")[0] == 400, wrong
    assert get(tree, "/admin")[0] == 404
    assert get(tree, "/metrics", accept="application/openmetrics-text; version=1.0.0")[1].endswith("# EOF\n")


def test_a_process_that_does_nothing_any_more_is_seen(
    start_tree: Callable[..., Tree],
) -> None:
    tree = start_tree("testapp.Leased", "--http", "0", "--no-dispatcher", "--no-maintenance")
    (worker,) = tree.wait_for_workers()
    eventually(lambda: reported(tree, "/healthz")[1]["processes"][0]["silent"] is not None)
    os.kill(worker, signal.SIGSTOP)
    try:
        eventually(lambda: reported(tree, "/healthz")[1]["processes"][0]["silent"] > 2)
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: reported(tree, "/healthz")[1]["processes"][0]["silent"] < 2)

    def unready() -> bool:
        # A successor may be ready before the first request: that one is killed as well, and its own waits longer.
        for item in children_of(tree.process.pid):
            os.kill(item, signal.SIGKILL)
        return reported(tree, "/readyz")[0] == 503

    eventually(unready)
    assert reported(tree, "/healthz")[0] == 200, "it is replaced"
    eventually(lambda: reported(tree, "/readyz")[0] == 200, 4 * DEADLINE)


def test_nothing_is_left_of_a_tree_that_has_ended(
    start_tree: Callable[..., Tree], child_environment: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_environment["TMPDIR"] = str(tmp_path)
    tree = start_tree("testapp.Leased", "--http", "0", "--no-dispatcher", "--no-maintenance")
    tree.wait_for_workers()
    (there,) = tmp_path.glob("queueapp-metrics-*")
    remaining = tmp_path / "queueapp-metrics-killed"
    remaining.mkdir()
    (remaining / "lock").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    MetricsCollector().close()
    assert list(tmp_path.glob("queueapp-metrics-*")) == [there], "no process has the other one"
    assert tree.terminate() == 0, tree.output
    assert list(tmp_path.glob("queueapp-metrics-*")) == []


def test_metrics_of_a_tree_want_the_token_that_the_settings_have(settings: Any) -> None:
    settings.QUEUEAPP = {"METRICS_TOKEN": "a token of the tests"}
    supervisor = Supervisor([Leased], endpoint=Endpoint("127.0.0.1", 0))
    page = supervisor.probes.pages["/metrics"]
    try:
        assert page(Request({}, {})).status == 401
        assert page(Request({}, {"Authorization": "Bearer another"})).status == 401
        assert page(Request({}, {"Authorization": "Bearer a token of the tests"})).status == 200
    finally:
        supervisor.close()


def test_whether_it_lives_asks_no_database(django_assert_num_queries: Any) -> None:
    supervisor = Supervisor([Leased], endpoint=Endpoint("127.0.0.1", 0))
    try:
        with django_assert_num_queries(0):
            assert supervisor.probes.pages["/healthz"](Request({}, {})).status == 200
        supervisor.turned_at -= 60
        reply = supervisor.probes.pages["/healthz"](Request({}, {}))
        assert (reply.status, json.loads(reply.body)["problems"]) == (503, ["the supervisor is silent for 60 s"])
    finally:
        supervisor.close()


@pytest.mark.parametrize("kept_alive", [True, False])
def test_a_silent_process_is_stuck_unless_its_supervisor_keeps_its_leases(kept_alive: bool) -> None:
    """A handler in C code keeps the interpreter lock for a minute: a restart would run it again."""
    child = SimpleNamespace(name="worker 1", process=SimpleNamespace(pid=7), alive=True, started_at=0.0)
    tree: Any = SimpleNamespace(
        children=[child], turned_at=time.monotonic(), silence_of=lambda _: 60.0, keeps_alive=lambda _: kept_alive
    )

    reply = Probes(tree, None).healthz(Request({}, {}))

    assert reply.status == (200 if kept_alive else 503)


@pytest.mark.parametrize("text", ["x", "70000", "-1", "a:b:1", "", "host:", "::1:80"])
def test_an_address_that_is_none_is_a_line(text: str) -> None:
    with pytest.raises(InvalidOption, match="--http"):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("9100") == ("127.0.0.1", 9100)
    assert parse_address("0.0.0.0:9100") == ("0.0.0.0", 9100)
    assert parse_address("[::1]:0") == ("::1", 0)


def test_a_port_that_is_taken_is_a_line_before_anything_runs() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CommandError, match="cannot listen on this address: Address already in use"),
    ):
        bind(str(taken.getsockname()[1]))
    assert bind(None) is None


def test_who_asks_does_not_wait_for_a_database_that_hangs() -> None:

    answers, began = threading.Event(), []

    def read() -> int:
        began.append(1)
        answers.wait(DEADLINE)
        return len(began)

    asked = CachedQuery(read, max_age=60, timeout=0.05)
    assert asked() is None
    assert asked() is None
    assert len(began) == 1, "one thread asks, however many wait"
    answers.set()
    assert eventually(asked) == 1
    assert asked() == 1


def test_an_answer_that_failed_is_none() -> None:
    def read() -> int:
        raise ValueError("away")

    started = time.monotonic()
    assert CachedQuery(read, timeout=DEADLINE)() is None
    assert time.monotonic() - started < DEADLINE


def ask(address: str, path: str) -> int:
    with urllib.request.urlopen(address + path, timeout=DEADLINE) as response:
        return int(response.status)


def test_liveness_answers_beside_a_thousand_idle_and_half_sent_connections() -> None:
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start({"/healthz": lambda _: Reply(200, b"ok\n"), "/metrics": lambda _: Reply(200, b"m\n")}, ("/healthz",))
    port = int(endpoint.address.rpartition(":")[2])
    idle: list[socket.socket] = []
    try:
        for number in range(1000):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
            if number % 2:
                idle[-1].sendall(b"GET /metrics HTTP/1.1\r\n")
        started = time.monotonic()
        assert ask(endpoint.address, "/healthz") == 200
        assert ask(endpoint.address, "/metrics") == 200
        assert time.monotonic() - started < 5
    finally:
        for item in idle:
            item.close()
        endpoint.close()


def test_liveness_answers_while_all_other_requests_wait_for_a_database() -> None:
    blocked = threading.Event()

    def slow(_: Request) -> Reply:
        blocked.wait(DEADLINE)
        return Reply(200, b"late\n")

    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start({"/healthz": lambda _: Reply(200, b"ok\n"), "/readyz": slow}, ("/healthz",))
    port = int(endpoint.address.rpartition(":")[2])
    waiting = [socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) for _ in range(20)]
    try:
        for message in waiting:
            message.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ask(endpoint.address, "/healthz") == 200
        blocked.set()
        answers = sorted(item.recv(100).split()[1] for item in waiting)
        assert answers == [b"200"] * 16 + [b"503"] * 4
    finally:
        for message in waiting:
            message.close()
        endpoint.close()


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"x" * 70_000])
def test_a_malformed_request_is_refused_and_the_next_one_answered(request_: bytes) -> None:
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start({"/healthz": lambda _: Reply(200, b"ok\n")}, ("/healthz",))
    try:
        port = int(endpoint.address.rpartition(":")[2])
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection,
        ):
            connection.sendall(request_)
            assert b" 200 " not in connection.recv(1000)
        assert ask(endpoint.address, "/healthz") == 200
    finally:
        endpoint.close()
