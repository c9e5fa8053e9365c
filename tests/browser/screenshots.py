"""``make screenshots``: the pictures of the README and of the documentation's start page.

The site of the demo runs on a test database with rows as in the middle of ``make demo``; Chromium photographs the
overview in the admin and the demo's page, 1280 pixels wide, in light colours.
"""

from __future__ import annotations

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
from django.test import Client  # noqa: E402
from django.test.runner import DiscoverRunner  # noqa: E402
from django.test.testcases import LiveServerThread  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from project.flights.figures import AIRPORTS, CARRIERS  # noqa: E402
from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings  # noqa: E402
from queueapp import messages  # noqa: E402
from queueapp.models import DISPATCHER, MAINTENANCE, Now, PoisonMessage, Subscriber  # noqa: E402
from tests.chromium import find_chromium  # noqa: E402

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, MAX_BYTES = 1280, 200_000


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
    FlightDelays.send_many({"flight": n} for n in range(1840))
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
            group_key="5f1c2a",
        )
        for _ in range(4)
    )
    supervisor = uuid.uuid4()
    for queue in (FlightDelays._meta.label, Rebookings._meta.label, DISPATCHER, MAINTENANCE):
        for process in range(2 if "." in queue else 1):
            Subscriber.objects.create(
                queue=queue, host="worker-1", process=4711 + process, supervisor=supervisor, version="0.1.0",
                receives="." in queue, alive_until=Now() + timedelta(minutes=10),
            )  # fmt: skip


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


def main() -> None:
    """Write both pictures."""
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
            context = browser.new_context(
                base_url=site, color_scheme="light", viewport={"width": WIDTH, "height": 800}, reduced_motion="reduce"
            )
            context.add_cookies([cookie])  # type: ignore[list-item]
            page = context.new_page()
            shoot(page, "/admin/queueapp/queuecontrol/", "admin.png", 640)
            shoot(page, "/", "demo.png", 900)
            browser.close()
    finally:
        server.terminate()
        runner.teardown_databases(old)
        runner.teardown_test_environment()


if __name__ == "__main__":
    main()
