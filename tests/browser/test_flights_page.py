"""The demo's page in a real browser: it follows the database by itself, and fits a telephone and a desktop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from project.flights.models import DelayFigure, FlightDelays, Import
from tests.in_process_worker import Worker

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

LIVE = "Live: looks again every 2 seconds."


@pytest.fixture
def worker(transactional_db: None) -> Iterator[Worker]:
    started = Worker(FlightDelays).start()
    yield started
    started.stop()


def counted(carrier: str, late: int, hour: int = 17) -> None:
    DelayFigure.objects.create(carrier=carrier, origin="EWR", hour=hour, late=late, cancelled=1, minutes=late * 30)


def shown(page: Page, name: str, text: str) -> None:
    expect(page.locator(f"[data-number={name}]")).to_have_text(text)


def test_open_page_follows_imports_of_another_one_without_a_reload(browse: Callable[..., Any], worker: Worker) -> None:
    def follow(page: Page) -> None:
        page.goto("/")
        shown(page, "handled", "0")
        expect(page.get_by_text("No flight was counted yet.").first).to_be_visible()
        page.evaluate("window.sameDocument = true")
        operator_page = page.context.new_page()
        operator_page.goto("/")
        for outcome in ("arrived", "cancelled", "broken"):
            operator_page.get_by_label("Carrier", exact=True).select_option("DL")
            operator_page.get_by_label("Outcome").select_option(outcome)
            operator_page.get_by_role("button", name="Import").click()
            expect(operator_page.get_by_text("was saved and its message sent")).to_be_visible()
        shown(page, "handled", "2")
        shown(page, "delayed", "1")
        shown(page, "poison", "1")
        expect(page.locator("[data-live=carriers] text").first).to_have_text("Delta Air Lines (DL)")
        expect(page.get_by_text("No flight was counted yet.").first).to_be_hidden()
        assert page.evaluate("window.sameDocument") is True

    browse(follow)
    assert Import.objects.count() == 3


def test_mistake_in_the_form_is_reported_at_its_field(browse: Callable[..., Any]) -> None:
    def mistake(page: Page) -> None:
        # 422 is the right answer and an error in the console; the form is sent as a script would, and shown.
        page.goto("/")
        page.get_by_label("Minutes late").fill("")
        # An empty field is allowed for a cancelled flight, so the browser does not stop it.
        page.route("**/import", lambda route: route.fulfill(response=route.fetch(), status=200))
        page.get_by_role("button", name="Import").click()
        field = page.get_by_label("Minutes late")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(page.locator(".field.minutes .error")).to_have_text("A flight that departed late needs its minutes.")

    browse(mistake)
    assert not Import.objects.exists()


def test_page_states_when_the_site_does_not_answer_and_goes_on(browse: Callable[..., Any]) -> None:
    def interrupted(page: Page) -> None:
        page.goto("/")
        expect(page.get_by_text(LIVE)).to_be_visible()
        page.route("**/live.json", lambda route: route.fulfill(body="nothing to be read"))
        expect(page.get_by_text("The site does not answer")).to_be_visible()
        page.unroute("**/live.json")
        expect(page.get_by_text(LIVE)).to_be_visible()

    browse(interrupted)


def test_open_table_stays_open_while_its_rows_change(browse: Callable[..., Any], worker: Worker) -> None:
    counted("UA", 10)

    def read(page: Page) -> None:
        page.goto("/")
        page.locator(".carriers summary").click()
        expect(page.locator(".carriers tbody td").first).to_have_text("10")
        page.evaluate(
            """async () => {
                const form = new FormData(document.querySelector('form'));
                await fetch('/import', {method: 'POST', body: form});
            }"""
        )
        expect(page.locator(".carriers tbody td").first).to_have_text("11")
        assert page.locator(".carriers details").get_attribute("open") is not None

    browse(read)


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_its_window(browse: Callable[..., Any], width: int, scheme: str) -> None:
    for place, carrier in enumerate(("UA", "AA", "EV", "B6")):
        counted(carrier, 5000 * (place + 1), hour=5 + place)

    def measure(page: Page) -> tuple[int, str]:
        page.goto("/")
        expect(page.get_by_text(LIVE)).to_be_visible()
        page.locator("summary").first.click()
        ground: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return page.evaluate("document.documentElement.scrollWidth"), ground

    wide, ground = browse(measure, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert wide == width
    red, green, blue = (int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(","))
    assert (red + green + blue < 200) == (scheme == "dark")
