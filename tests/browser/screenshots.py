"""``make screenshots``: the pictures of the README and of the documentation.

The site of the demo runs on a test database with rows as in the middle of ``make demo``; Chromium photographs the pages
of the admin and the demo's page, 1280 pixels wide, in light colours. ``--all-kinds DIRECTORY`` writes each page of the
admin at 1280 and 390 pixels, light and dark, for people who change it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import uuid
from datetime import timedelta
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django.setup()

from django.conf import settings  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.contrib.staticfiles.handlers import StaticFilesHandler  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.runner import DiscoverRunner  # noqa: E402
from django.test.testcases import LiveServerThread  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from project.flights.figures import AIRPORTS, CARRIERS  # noqa: E402
from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings  # noqa: E402
from queueapp import messages  # noqa: E402
from queueapp.models import (  # noqa: E402
    DISPATCHER,
    MAINTENANCE,
    Alert,
    BulkOperation,
    DelayedMessage,
    JournalEntry,
    Leader,
    Now,
    PoisonMessage,
    QueueControl,
    QueueSnapshot,
    Schedule,
    Subscriber,
)
from queueapp.operations.snapshots import SnapshotRecorder  # noqa: E402
from tests.chromium import find_chromium  # noqa: E402

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, MAX_BYTES = 1280, 200_000
OVERVIEW = "/admin/queueapp/queuecontrol/"
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/app/flights/consumers.py", line 41, in count_delay\n'
    "    minutes = arrival(record) - record.scheduled\n"
    '  File "/app/flights/times.py", line 17, in arrival\n'
    '    raise ValueError("the record lacks the arrival time")\n'
    "ValueError: the record lacks the arrival time\n"
)


def fill() -> None:
    """Rows of a demo that is at work."""
    number = random.Random(7)
    late = {"EV": 90, "B6": 70, "UA": 68, "DL": 52, "9E": 40, "MQ": 38, "AA": 36, "WN": 26, "US": 18, "FL": 8, "VX": 6}
    DelayFigure.objects.bulk_create(
        DelayFigure(
            carrier=carrier, origin=origin, hour=hour, minutes=count * 55, late=count, cancelled=count // 9,
        )
        for carrier in CARRIERS for origin in AIRPORTS for hour in range(5, 24)
        if (count := int(late.get(carrier, 3) * (hour - 3) / 12 * number.uniform(0.5, 1.2)))
    )  # fmt: skip
    Rebooking.objects.bulk_create(Rebooking(flight=f"UA{n} EWR 2013-01-01", minutes=150) for n in range(1, 1405))
    for airline, count in (("UA", 1500), ("DL", 200), ("B6", 140)):
        FlightDelays.send_many(({"flight": n} for n in range(count)), headers={"airline": airline})
    Rebookings.send_many({"flight": n} for n in range(212))
    for minutes in range(1, 97):
        Rebookings.send({"flight": minutes}, delay=timedelta(minutes=minutes))
    PoisonMessage.objects.bulk_create(
        PoisonMessage(
            queue=FlightDelays._meta.label,
            message_id=messages.new_id(),
            body=b"{}",
            attempts=3,
            consumer="flights.count_delay",
            reason="ValueError: the record lacks the arrival time",
            exception_type="ValueError",
            exception_message="the record lacks the arrival time",
            traceback=TRACEBACK,
            headers=json.dumps({"type": "project.flights.Delay", "airline": "UA", "trace": f"7f3a{number:04}"}),
            host="worker-1",
            worker_version="2026.11.3",
            group_key="5f1c2a",
            failures=json.dumps(
                [
                    {"at": f"2026-11-28T17:02:1{attempt}+00:00", "attempt": attempt, "verdict": "RetryLater",
                     "exception": "ValueError: no arrival time", "host": "worker-1", "process": "4711"}
                    for attempt in (1, 2, 3)
                ]
            ),
        )
        for number in range(4)
    )  # fmt: skip
    PoisonMessage.objects.create(
        queue=Rebookings._meta.label, message_id=messages.new_id(), body=b"{}", attempts=5, consumer="flights.rebook",
        reason="OperationalError: the booking service did not answer", exception_type="OperationalError",
        headers="{}", group_key="77aa01", worker_version="2026.11.2", host="worker-2",
    )  # fmt: skip
    supervisor = uuid.uuid4()
    for queue in (FlightDelays._meta.label, Rebookings._meta.label, DISPATCHER, MAINTENANCE):
        for process in range(2 if "." in queue else 1):
            Subscriber.objects.create(
                queue=queue, host="worker-1", process=4711 + process, supervisor=supervisor, version="0.1.0",
                receives="." in queue, alive_until=Now() + timedelta(minutes=10), concurrency=8,
                outstanding=8 if queue == FlightDelays._meta.label else 0, handled=184_000, received=184_020, failed=12,
                memory=96 * 2**20, restarts=process, handling_p50=0.004, handling_p95=0.021,
                running=json.dumps([[17, "flights.rebook", 74.0]] if queue == Rebookings._meta.label else []),
                consumers=json.dumps([["flights.count_delay", "project.flights.Delay"]] if "Delays" in queue else []),
            )  # fmt: skip
    for duty in ("maintenance", "delayed dispatcher"):
        holder = uuid.uuid5(supervisor, "default")
        Leader.objects.create(role=f"{duty} 01234567", holder=holder, expires=Now() + timedelta(minutes=10))
    QueueControl.objects.create(
        queue=Rebookings._meta.label, last_death_at=Now() - timedelta(hours=2),
        last_death="worker-2:815 (leases released: 7)",
    )  # fmt: skip
    console_rows(number)


def console_rows(number: random.Random) -> None:
    """An hour of figures, operations, alerts, a schedule and a journal."""
    SnapshotRecorder("default", [FlightDelays, Rebookings]).record(lambda: True)
    for label, scale in ((FlightDelays._meta.label, 30), (Rebookings._meta.label, 3)):
        for minute in range(60, 0, -1):
            QueueSnapshot.objects.create(
                queue=label, period=60, at=Now() - timedelta(minutes=minute), seconds=60,
                ready=int(scale * (65 - minute) * number.uniform(0.8, 1.2)), in_flight=8, delayed=96, poison=2,
                oldest_ms=int(scale * number.uniform(20, 90)), arrived=scale * 60, received=scale * 50,
                handled=scale * 49, failed=scale // 3, handling_p50=0.004, handling_p95=0.021,
            )  # fmt: skip
    admin = {"username": "admin", "source": "queueapp.PoisonMessage", "first": 1, "last": 12_000}
    BulkOperation.objects.create(
        action="requeue", filters=json.dumps({"group": "5f1c2a"}), options=json.dumps({"counts": "reset"}), rate=100,
        cursor=5_040, changed=5_031, skipped=8, failed=1, errors=json.dumps([[4711, "ValueError: no such airport"]]),
        started_at=Now() - timedelta(seconds=51), **admin,
    )  # fmt: skip
    BulkOperation.objects.create(
        action="archive", state="finished", cursor=12_000, changed=311, started_at=Now() - timedelta(hours=5), **admin
    )
    for kind, queue, text in (
        ("age", FlightDelays._meta.label, f"{FlightDelays._meta.label}: the oldest message has waited for over 5m"),
        ("poison", "", f"{FlightDelays._meta.label}: new poison in flights.count_delay: ValueError"),
    ):
        Alert.objects.create(key=kind, kind=kind, queue=queue, name="5f1c2a", text=text, notified_at=Now())
    Schedule.objects.create(
        name="nightly report", queue=FlightDelays._meta.label, cron="0 3 * * *", timezone="Europe/Vienna",
        next_at=Now() + timedelta(hours=3), due_at=Now() + timedelta(hours=3), runs=12,
    )  # fmt: skip
    for entry in range(5):
        JournalEntry.objects.create(
            topic="flights.delays", txid=entry, message_id=messages.new_id(), body=b'{"flight": 1}',
            headers=json.dumps({"type": "project.flights.Delay"}), queues=f"|{FlightDelays._meta.label}|",
        )  # fmt: skip


def console_pages() -> dict[str, str]:
    """The pages of the console by the names of their pictures."""

    def list_of(model: type) -> str:
        return f"/admin/{model._meta.app_label}/{model._meta.model_name}/"  # type: ignore[attr-defined]

    poison = list_of(PoisonMessage)
    running = BulkOperation.objects.get(state="running").pk
    return {
        "admin": OVERVIEW,
        "admin-queue": f"{OVERVIEW}{FlightDelays._meta.label}/charts/",
        "admin-messages": list_of(FlightDelays),
        "admin-message": f"{list_of(FlightDelays)}{FlightDelays.objects.earliest('seq').pk}/change/",
        "admin-delayed": list_of(DelayedMessage),
        "admin-poison": poison,
        "admin-poison-message": f"{poison}{PoisonMessage.objects.earliest('number').pk}/change/",
        "admin-search": f"{OVERVIEW}search/?q=header%3Aairline%3DB6",
        "admin-workers": list_of(Subscriber),
        "admin-operations": list_of(BulkOperation),
        "admin-operation": f"{list_of(BulkOperation)}{running}/change/",
        "admin-schedules": list_of(Schedule),
        "admin-journal": list_of(JournalEntry),
        "admin-replay": f"{list_of(JournalEntry)}replay/",
        "admin-alerts": list_of(Alert),
        "admin-databases": f"{OVERVIEW}databases/",
    }


def shoot(page: Page, path: str, name: str, height: int | None) -> None:
    page.goto(path)
    page.wait_for_load_state("networkidle")
    target = IMAGES / name
    clip = None if height is None else {"x": 0, "y": 0, "width": WIDTH, "height": height}
    page.screenshot(path=str(target), full_page=height is None, clip=clip)  # type: ignore[arg-type]
    size = target.stat().st_size
    print(f"{target.relative_to(Path.cwd())}: {size:,} bytes")
    if size > MAX_BYTES:
        sys.exit(f"{name} has {size:,} bytes; at most {MAX_BYTES:,} are allowed.")


def shoot_all_kinds(browser: Browser, cookie: dict[str, str], directory: Path) -> None:
    """Each page of the admin, wide and narrow, light and dark."""
    directory.mkdir(parents=True, exist_ok=True)
    for width in (WIDTH, 390):
        for colours in ("light", "dark"):
            context = browser.new_context(
                base_url=cookie["url"], color_scheme=colours, viewport={"width": width, "height": 800},  # type: ignore[arg-type]
                reduced_motion="reduce",
            )  # fmt: skip
            context.add_cookies([cookie])  # type: ignore[list-item]
            page = context.new_page()
            for name, path in console_pages().items():
                page.goto(path)
                page.wait_for_load_state("load")
                page.screenshot(path=str(directory / f"{name}-{width}-{colours}.png"), full_page=True)
            context.close()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots", description=__doc__)
    parser.add_argument("--all-kinds", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit("There is no Chromium on PATH (sudo apt-get install chromium).")
    IMAGES.mkdir(exist_ok=True)
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    runner = DiscoverRunner(verbosity=0, interactive=False)
    runner.setup_test_environment()
    old = runner.setup_databases()
    server = LiveServerThread("127.0.0.1", StaticFilesHandler, connections_override={})
    try:
        fill()
        client = Client()
        client.force_login(User.objects.create_superuser("admin", password=uuid.uuid4().hex))
        server.daemon = True
        server.start()
        server.is_ready.wait()
        site = f"http://127.0.0.1:{server.port}"
        cookie = {"name": settings.SESSION_COOKIE_NAME, "url": site, "value": client.cookies["sessionid"].value}
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # the ORM beside Playwright's event loop, in this script only
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(program), args=["--no-sandbox", "--disable-gpu"])
            if arguments.all_kinds is not None:
                shoot_all_kinds(browser, cookie, arguments.all_kinds)
                return
            context = browser.new_context(
                base_url=site, color_scheme="light", viewport={"width": WIDTH, "height": 800}, reduced_motion="reduce"
            )
            context.add_cookies([cookie])  # type: ignore[list-item]
            page = context.new_page()
            for name, path in console_pages().items():
                shoot(page, path, f"{name}.png", 640 if name == "admin" else 800)
            shoot(page, "/", "demo.png", 900)
            browser.close()
    finally:
        server.terminate()
        with connection.cursor() as cursor:  # of a request that the last page had begun
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        runner.teardown_databases(old)
        runner.teardown_test_environment()


if __name__ == "__main__":
    main()
