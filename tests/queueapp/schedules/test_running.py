"""Running schedules: what is sent, what is made up for, and that the failure of one touches no other."""

from __future__ import annotations

import json
import logging
import math
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import NEVER
from queueapp.messages import decode_headers
from queueapp.models import Schedule
from queueapp.schedules import stored
from queueapp.schedules.runner import ScheduleRunner
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from tests.in_process_worker import eventually, real_commits
from tests.testapp.leases import Aging
from tests.testapp.messages import Ping
from tests.testapp.models import Keyed, Leased, Urgent

from .conftest import MovedClock


def sent(alias: str, queue: Any = Leased) -> list[str]:
    """The times that the messages are for."""
    found = queue.objects.using(alias).order_by("seq").values_list("headers", flat=True)
    return [f"{datetime.fromisoformat(decode_headers(statement)['scheduled-for']):%d %H:%M}" for statement in found]


def declare(alias: str, **options: Any) -> Schedule:
    Leased.schedule({"n": 1}, **{"name": "tested", "every": timedelta(hours=1), "misfire_grace": 60, **options})
    stored.declare(alias)
    return Schedule.objects.using(alias).get(name=options.get("name", "tested"))


def test_a_run_sends_the_typed_message_with_the_name_and_the_time(placed: str, clock: MovedClock) -> None:
    Urgent.schedule(Ping("hello"), name="greet", cron="0 1 * * *", timezone="UTC", priority=2, headers={"x": "y"})
    stored.declare(placed)

    assert stored.run_due(placed) == timedelta(hours=1)
    clock.move(hours=1)
    assert stored.run_due(placed) == timedelta(hours=24)

    (message,) = Urgent.objects.using(placed)
    headers = decode_headers(message.headers)
    assert (json.loads(message.body)["name"], message.priority) == ("hello", 2)
    assert headers["type"] == "tests.testapp.messages.Ping"
    assert (headers["schedule"], headers["scheduled-for"]) == ("greet", "2026-01-01T01:00:00+00:00")
    assert headers["x"] == "y"
    row = Schedule.objects.using(placed).get()
    assert (row.runs, row.last_id, row.last_at) == (1, message.id, datetime(2026, 1, 1, 1, tzinfo=UTC))
    assert row.next_at == datetime(2026, 1, 2, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"misfire": "once"}, ["01 05:00"]),
        ({"misfire": "all"}, ["01 01:00", "01 02:00", "01 03:00", "01 04:00", "01 05:00"]),
        ({"misfire": "all", "misfire_limit": 2}, ["01 04:00", "01 05:00"]),
        ({"misfire": "skip"}, []),
        # What is within the grace is not missed.
        ({"misfire": "skip", "misfire_grace": timedelta(hours=2)}, ["01 04:00", "01 05:00"]),
        ({"misfire": "once", "misfire_grace": timedelta(hours=2)}, ["01 03:00", "01 04:00", "01 05:00"]),
    ],
)
def test_missed_runs(placed: str, clock: MovedClock, options: dict[str, Any], expected: list[str]) -> None:
    declare(placed, **options)

    clock.move(hours=5, minutes=30)
    stored.run_due(placed)

    assert sent(placed) == expected
    assert Schedule.objects.using(placed).get().next_at == datetime(2026, 1, 1, 6, tzinfo=UTC)
    clock.move(minutes=30)
    stored.run_due(placed)
    assert sent(placed) == [*expected, "01 06:00"]


def test_a_single_time_is_sent_once_and_is_over(placed: str, clock: MovedClock) -> None:
    declare(placed, every=None, at=clock.now + timedelta(minutes=5))
    clock.move(minutes=5)

    assert stored.run_due(placed) is None
    assert stored.run_due(placed) is None

    assert sent(placed) == ["01 00:05"]


def test_jitter_delays_runs_and_loses_none(placed: str, clock: MovedClock) -> None:
    declare(placed, every=timedelta(minutes=10), jitter=timedelta(minutes=25), misfire_grace=timedelta(hours=1))

    for _ in range(600):
        clock.move(minutes=1)
        stored.run_due(placed)

    times = sent(placed)
    assert times == [f"01 {n // 60:02}:{n % 60:02}" for n in range(10, 10 * len(times) + 1, 10)]
    assert len(times) >= 57


def test_the_message_of_a_schedule_may_never_expire(placed: str, clock: MovedClock) -> None:
    Aging.schedule({"n": 1}, name="for ever", every=3600, expires_in=NEVER)
    stored.declare(placed)

    assert stored.problem_of(Schedule.objects.using(placed).get()) == ""
    assert stored.run_now(placed, "for ever")

    assert Aging.objects.using(placed).get().expires.year > 9000


def test_a_paused_schedule_sends_nothing_and_has_nothing_to_make_up_for(placed: str, clock: MovedClock) -> None:
    declare(placed, misfire="all")
    assert stored.pause(placed, ["tested", "unknown"]) == 1

    clock.move(hours=3, minutes=10)
    assert stored.run_due(placed) is None
    assert stored.resume(placed, ["tested"]) == 1
    stored.run_due(placed)
    assert sent(placed) == []

    clock.move(minutes=50)
    stored.run_due(placed)
    assert sent(placed) == ["01 04:00"]


def test_run_now_sends_one_more_and_keeps_the_next_run(placed: str, clock: MovedClock) -> None:
    row = declare(placed)

    identity = stored.run_now(placed, "tested")

    assert Leased.objects.using(placed).get().id == identity
    assert Schedule.objects.using(placed).get().next_at == row.next_at
    assert stored.run_now(placed, "unknown") is None


def test_a_dedupe_key_lets_a_run_wait_once(placed: str, clock: MovedClock) -> None:
    Keyed.schedule({}, name="keyed", every=60, dedupe_key="k", misfire="all")
    stored.declare(placed)

    for _ in range(3):
        clock.move(minutes=1)
        stored.run_due(placed)

    assert Keyed.objects.using(placed).count() == 1
    assert Schedule.objects.using(placed).get().runs == 3


def test_a_failing_schedule_is_recorded_and_the_others_run(
    placed: str, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        declare(placed, name=name, misfire="all", misfire_grace=timedelta(days=1))
    rows = Schedule.objects.using(placed)
    rows.filter(name="b").update(options='{"priority": 9}')
    clock.move(hours=1)

    with caplog.at_level(logging.ERROR):
        wait = stored.run_due(placed)

    assert len(sent(placed)) == 2
    assert "Schedule 'b' could not be run (failure 1)" in caplog.text
    failed = rows.get(name="b")
    assert (failed.failures, failed.runs) == (1, 0)
    assert "priority = 9" in failed.error
    assert wait == stored.FIRST_WAIT

    # It waits longer each time, keeps its time, and is made up for once it can run.
    clock.move(seconds=5)
    assert stored.run_due(placed) == 2 * stored.FIRST_WAIT
    rows.filter(name="b").update(options="")
    clock.move(seconds=10)
    stored.run_due(placed)
    assert sent(placed) == ["01 01:00"] * 3
    assert (rows.get(name="b").failures, rows.get(name="b").error) == (0, "")


@pytest.mark.parametrize(
    "changes",
    [{"cron": "nonsense", "every": None}, {"body": "{"}, {"headers": "[]"}, {"options": '{"at": 1}'}, {"task": "a.b"}],
)
def test_a_row_that_makes_no_sense_fails_and_is_named(placed: str, clock: MovedClock, changes: dict[str, Any]) -> None:
    declare(placed)
    Schedule.objects.using(placed).update(**changes)
    clock.move(hours=1)

    stored.run_due(placed)

    row = Schedule.objects.using(placed).get()
    assert (row.failures, sent(placed)) == (1, [])
    assert stored.problem_of(row)


def test_a_schedule_of_a_queue_that_this_process_does_not_know_is_left_alone(placed: str, clock: MovedClock) -> None:
    declare(placed)
    Schedule.objects.using(placed).update(queue="shop.Orders")
    clock.move(hours=1)

    assert stored.run_due(placed) is None
    assert Schedule.objects.using(placed).get().failures == 0


def test_a_row_that_another_dispatcher_holds_is_passed_over(placed: str, clock: MovedClock) -> None:
    declare(placed)
    clock.move(hours=1)
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic(using=placed):
            Schedule.objects.using(placed).select_for_update().get()
            holds.set()
            done.wait(30)
        connections.close_all()

    second_thread = threading.Thread(target=hold)
    second_thread.start()
    try:
        assert holds.wait(30)
        assert stored.run_one(placed, "tested", clock.now) == 0
    finally:
        done.set()
        second_thread.join()
    assert stored.run_one(placed, "tested", clock.now) == 1
    assert stored.run_one(placed, "tested", clock.now) == 0


def test_many_threads_run_each_time_once(placed: str, clock: MovedClock) -> None:
    for number in range(5):
        declare(placed, name=f"n{number}", every=60, misfire="all", misfire_grace=timedelta(days=1))
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            stored.run_due(placed)
        connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for minute in range(1, 21):
            clock.move(minutes=1)
            eventually(lambda minute=minute: Leased.objects.using(placed).count() >= 5 * minute)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert sorted(sent(placed)) == sorted(5 * [f"01 00:{n:02}" for n in range(1, 21)])


def test_without_schedules_the_runner_asks_once_in_a_while(placed: str, django_assert_num_queries: Any) -> None:
    runner = ScheduleRunner(placed)
    go_on: Callable[[], bool] = lambda: True  # noqa: E731
    runner.round(1, go_on)
    connection = connections[placed]

    with django_assert_num_queries(0, connection=connection):
        runner.woken()
        assert runner.round(1, go_on) == math.inf


@real_commits
def test_the_dispatcher_runs_what_is_due_and_what_an_operator_resumes() -> None:
    row = Schedule(name="soon", queue="testapp.Leased", every=timedelta(seconds=1), misfire="all")
    stored.plan(row, "default")
    row.save(force_insert=True)
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    dispatcher.start()
    try:
        eventually(lambda: Leased.objects.count() >= 3)
    finally:
        assert dispatcher.stop(30)
    times = [
        decode_headers(item)["scheduled-for"]
        for item in Leased.objects.order_by("seq").values_list("headers", flat=True)
    ]
    first = datetime.fromisoformat(times[0])
    assert times == [(first + timedelta(seconds=n)).isoformat() for n in range(len(times))]


@real_commits
def test_without_its_table_delayed_messages_are_moved_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    Leased.send({}, delay=timedelta(0))
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_schedule RENAME TO queueapp_schedule_gone")
        try:
            with caplog.at_level(logging.ERROR):
                dispatcher.dispatch_once()
                dispatcher.dispatch_once()
        finally:
            cursor.execute("ALTER TABLE queueapp_schedule_gone RENAME TO queueapp_schedule")

    assert Leased.objects.count() == 1
    assert caplog.text.count("Schedules in 'default' are not run") == 1
