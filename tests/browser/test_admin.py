"""The admin's pages in a real browser: what an operator clicks, what must never run, and that both themes can be
read."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from playwright.sync_api import Page, Route, expect

from queueapp import consumer, publish
from queueapp.admin.large_tables import sliced_search
from queueapp.models import DISPATCHER, BulkOperation, PoisonMessage, QueueControl, Subscriber
from queueapp.operations import bulk_operations
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from queueapp.services.service import stop_all
from tests.bulk_rows import fill_up
from tests.in_process_worker import eventually, starting_workers
from tests.testapp.models import Leased, Transactional

from .conftest import PATIENCE_MS
from .pages import OVERVIEW
from .rows import HOSTILE, poison

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

Browse = Callable[..., Any]
#: Messages of a group that is requeued: few in the suite.
REQUEUED = int(os.environ.get("QUEUEAPP_REQUEUED", "1500"))


def in_another_thread(change: Callable[[], Any]) -> None:
    """Change the database while a page is looked at: the browser's thread has no connection."""

    def run() -> None:
        try:
            change()
        finally:
            connection.close()

    thread = Thread(target=run)
    thread.start()
    thread.join()


# -- what an operator does -----------------------------------------------------------------------------------------


def test_a_whole_poison_group_is_requeued_with_select_all(browse: Browse) -> None:
    poison(130)
    poison(2, group_key="b", exception_type="KeyError")

    def requeue(page: Page) -> str:
        page.goto("/admin/queueapp/poisonmessage/")
        page.get_by_text("Group: All").click()
        page.get_by_role("link", name="ValueError · a (130)").click()
        page.get_by_label("Select all objects on this page for an action").check()
        page.get_by_text("Select all 130 messages").click()
        expect(page.get_by_text("All 130 selected")).to_be_visible()
        page.get_by_label("Action:").select_option("Requeue")
        page.locator("button[name=index]").click()
        expect(page.get_by_role("heading", name="Requeue 130 messages?")).to_be_visible()
        expect(page.get_by_text("and 120 more")).to_be_visible()
        page.get_by_label("Keep: counts and history stay").check()
        page.get_by_role("button", name="Requeue").click()
        return page.locator(".messagelist li").inner_text()

    assert browse(requeue) == "130 messages requeued."
    assert (Leased.objects.count(), PoisonMessage.objects.count()) == (130, 2)
    assert LogEntry.objects.get().object_repr == "130 messages"


def test_overview_shows_open_breakers_and_unroutable_messages(browse: Browse, populated: None) -> None:
    trouble = [
        {"name": "Renewal of leases of testapp.Leased", "state": "failing", "error": f"OperationalError: {HOSTILE}"}
    ]
    Subscriber.objects.filter(queue=DISPATCHER).delete()
    Subscriber.objects.filter(queue="testapp.Leased").update(
        breakers=json.dumps(trouble), consumers='[["a", "b"]]', unknown_types=json.dumps(["", HOSTILE])
    )
    poison(2, queue="gone.Shop")
    Transactional.send({})
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_short RENAME TO elsewhere")

    def look(page: Page, width: int) -> tuple[list[str], int, list[str]]:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/admin/queueapp/queuecontrol/")
        if directory := os.environ.get("QUEUEAPP_TEST_SCREENSHOTS"):
            page.screenshot(path=str(Path(directory) / f"overview-{width}.png"), full_page=True)
        rows = [row.inner_text() for row in page.locator("#result_list tbody tr").all()]
        # Only the table may be wider than the screen, in its own box.
        wide = page.evaluate("document.documentElement.scrollWidth")
        notes = page.locator(".queueapp-more bdi").all()
        boxes = [
            (note.inner_text(), note.bounding_box(), page.locator(".queueapp-scroll").bounding_box()) for note in notes
        ]
        cut = [text for text, box, shown in boxes if box["x"] + box["width"] > shown["x"] + shown["width"]]
        return rows, wide, cut

    try:
        for width in (1280, 390):
            rows, wide, cut = browse(partial(look, width=width))
            text = "\n".join(rows)
            assert wide <= width
            assert cut == [], "what is said of a queue is on the screen as a whole"
            assert "Renewal of leases of testapp.Leased: failing: OperationalError: <script>" in text
            assert "9 messages without a type, no consumer in a live worker; the oldest is" in text
            assert "messages: the table does not exist" in text
            (gone,) = [row.split() for row in rows if row.startswith("gone.Shop")]
            assert [" ".join(gone[1:4]), *gone[4:9]] == ["no such queue", "–", "–", "–", "–", "2"]  # noqa: RUF001
            (dispatchers,) = [row for row in rows if row.startswith("(dispatcher)")]
            assert "not running" in dispatchers
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO testapp_short")


def test_a_button_on_a_messages_own_page_asks_and_can_be_declined(browse: Browse, populated: None) -> None:
    held = Leased.objects.earliest("pk").pk

    def release(page: Page) -> str:
        page.goto(f"/admin/testapp/leased/{held}/change/")
        page.get_by_role("button", name="Release lease…").click()
        page.get_by_role("link", name="Cancel").click()
        expect(page).to_have_url(re.compile(r"/admin/testapp/leased/$"))
        expect(page.get_by_text("worker-1.reservations").first).to_be_visible()
        page.get_by_role("link", name=str(held), exact=True).click()
        page.get_by_role("button", name="Release lease…").click()
        expect(page.get_by_text("the message is handled twice")).to_be_visible()
        page.get_by_role("button", name="Release lease").click()
        return page.locator(".messagelist li").inner_text()

    assert browse(release) == "1 message released."
    assert Leased.objects.get(pk=held).lease_token is None


def test_a_poison_message_is_edited_and_requeued_from_its_own_page(browse: Browse, tmp_path: Path) -> None:
    poison(1, headers='{"content-type":"application/json"}')

    def mend(page: Page) -> str:
        page.goto("/admin/queueapp/poisonmessage/")
        page.locator("#result_list tbody .field-message a").first.click()
        page.get_by_role("link", name="Edit and requeue…").click()
        page.get_by_label("Body:").fill('{"gate":')
        page.get_by_role("button", name="Requeue the edited message").click()
        expect(page.get_by_text("does not suit its content type")).to_be_visible()
        page.get_by_label("Body:").fill('{\n  "gate": "B12"\n}')
        page.screenshot(path=tmp_path / "edit.png", full_page=True)
        page.get_by_role("button", name="Requeue the edited message").click()
        return page.locator(".messagelist li").inner_text()

    assert "the original is kept as edited" in browse(mend)
    assert Leased.objects.get().body == b'{\n  "gate": "B12"\n}'
    assert PoisonMessage.objects.get().status == PoisonMessage.Status.EDITED


def test_a_queue_is_paused_changed_resumed_and_purged_from_the_overview(browse: Browse) -> None:
    Leased.send_many({"n": n} for n in range(5))

    def operate(page: Page) -> list[str]:
        said = []

        def press(name: str, question: str) -> None:
            page.locator('summary[aria-label="Actions for testapp.Leased"]').click()
            page.get_by_role("button", name=name).click()
            expect(page.get_by_role("heading", name=question)).to_be_visible()
            if name.startswith("Concurrency"):
                page.get_by_label("Receivers of each worker process").fill("8")
                name = "Set concurrency"
            page.get_by_role("button", name=name).click()
            said.append(page.locator(".messagelist li").inner_text())

        page.goto("/admin/")
        page.get_by_role("link", name="Queues", exact=True).last.click()
        press("Pause testapp.Leased", "Pause testapp.Leased?")
        expect(page.get_by_text("by operator")).to_be_visible()
        press("Concurrency testapp.Leased", "Change the concurrency of testapp.Leased?")
        expect(page.get_by_text("8 receivers per process")).to_be_visible()
        press("Resume testapp.Leased", "Resume testapp.Leased (5 waiting messages)?")
        press("Purge testapp.Leased", "Purge testapp.Leased (5 waiting messages)?")
        return said

    assert browse(operate) == [
        "Queue testapp.Leased is paused.",
        "Queue testapp.Leased: each worker process has 8 receivers.",
        "Queue testapp.Leased is running again.",
        "5 messages of testapp.Leased deleted.",
    ]
    assert (Leased.objects.count(), QueueControl.objects.get().paused) == (0, False)


def test_a_queue_fills_and_drains_on_the_overview_without_reloading(browse: Browse, populated: None) -> None:
    Leased.objects.all().delete()

    def look(page: Page) -> list[str]:
        page.goto(OVERVIEW)
        row = page.locator('tbody[data-queue="testapp.Leased"]')
        ready = row.locator('td[data-label="Ready"]')
        expect(ready).to_have_text("0")
        row.locator(".queueapp-menu summary").click()
        page.evaluate("window.loaded = true")
        in_another_thread(lambda: Leased.send_many({"n": n} for n in range(7)))
        expect(ready).to_have_text("7")
        in_another_thread(lambda: Leased.objects.all().delete())
        expect(ready).to_have_text("0")
        assert page.evaluate("window.loaded"), "the page was not loaded again"
        expect(row.get_by_role("button", name="Purge testapp.Leased")).to_be_visible()
        return page.locator("#queueapp-refreshed").inner_text()

    assert browse(look) == "Refreshed every 5 seconds."


def test_the_overview_says_when_it_is_not_refreshed(browse: Browse) -> None:
    def look(page: Page) -> None:
        page.goto(OVERVIEW)
        page.evaluate("Object.defineProperty(Response.prototype, 'ok', {get: () => false})")
        expect(page.locator("#queueapp-refreshed")).to_contain_text("Not refreshed for")
        expect(page.locator("#result_list tbody tr").first).to_be_visible()

    browse(look)


def test_a_group_is_requeued_while_a_worker_handles_it_paused_resumed_and_stopped_half_way(
    browse: Browse, maintenance: Any, no_consumers: None
) -> None:
    fill_up(
        PoisonMessage(
            queue="testapp.Leased", reason="ValueError: no gate", exception_type="ValueError", group_key="a" * 32,
            message_id=uuid.uuid4(), headers="{}", body=b"{}",
        ),
        REQUEUED,
    )  # fmt: skip
    handled, half = [], Event()

    @consumer(Leased, name="gates")
    def handle(message: Any) -> None:
        handled.append(message)
        if len(handled) >= REQUEUED // 2 and not half.is_set():
            bulk_operations.set_rate(BulkOperation.objects.get().pk, 1)  # a slow browser comes in time to stop it
            half.set()

    def operate(page: Page) -> None:
        page.goto("/admin/queueapp/poisonmessage/")
        page.get_by_role("button", name="Requeue group…").click()
        expect(page.get_by_text("in the background")).to_be_visible()
        page.get_by_label("Messages a second").fill(str(REQUEUED // 6))
        page.get_by_role("button", name="Requeue").click()
        expect(page.locator("#queueapp-live .queueapp-badge")).to_have_text("running")
        page.evaluate("window.loaded = true")
        expect(page.locator("#queueapp-live")).to_contain_text(re.compile("Changed[1-9]"))  # without reloading
        assert page.evaluate("window.loaded")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#queueapp-live .queueapp-badge")).to_have_text("paused")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#queueapp-live .queueapp-badge")).to_have_text("running")
        assert half.wait(PATIENCE_MS / 1000)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#queueapp-live .queueapp-badge")).to_have_text("stopped")

    with starting_workers() as start:
        start(Leased)
        browse(operate)
        eventually(lambda: not Leased.objects.exists())
    operation = BulkOperation.objects.get()
    assert REQUEUED // 2 <= operation.changed < REQUEUED
    assert operation.changed == len(handled) == REQUEUED - PoisonMessage.objects.count()


def test_an_operator_signs_in_and_finds_a_message_by_an_order_number(browse: Browse) -> None:
    Leased.send_many({"order": number} for number in range(4700, 4730))
    wanted = Transactional.send({"order": 4711, "customer": "acme"}, headers={"type": "shop.Order"})

    def find(page: Page) -> str:
        page.context.clear_cookies()
        page.goto(OVERVIEW)
        page.get_by_label("Username:").fill("operator")
        page.get_by_label("Password:").fill("x")
        page.get_by_role("button", name="Log in").click()
        page.get_by_label("Search all messages").fill("order=4711 customer=acme")
        page.get_by_role("button", name="Search").click()
        page.get_by_role("link", name=str(wanted)).click()
        return page.locator("#content").inner_text()

    found = browse(find)
    assert f"Message {Transactional.objects.get().pk} in testapp.Transactional" in found
    assert '"customer": "acme"' in found


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response of a search looks at a few rows, and its user may view few tables."""
    monkeypatch.setattr(sliced_search, "FIRST_SIZE", 16)
    monkeypatch.setattr(sliced_search, "MAX_SIZE", 16)
    monkeypatch.setattr(sliced_search, "STATEMENTS", 3)
    Leased.send_many({"order": number % 40} for number in range(100))


MAY_SEARCH = ["queueapp.view_queuecontrol", "queueapp.view_delayedmessage", "testapp.view_leased"]


def test_a_search_goes_on_by_itself_to_the_last_table(browse: Browse, small_slices: None) -> None:
    def find(page: Page) -> tuple[int, int]:
        page.goto(f"{OVERVIEW}search/?q=order%3D7")
        expect(page.locator("#queueapp-progress")).to_have_text("2 of 2 tables, 100 messages looked at.")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        expect(page.locator(".queueapp-empty")).to_have_count(0)
        return page.locator(".queueapp-found").count(), page.locator(".queueapp-found tbody tr").count()

    assert browse(find, permissions=MAY_SEARCH) == (1, 3)


def test_a_search_is_stopped_and_goes_on_by_its_link(browse: Browse, small_slices: None) -> None:
    further = re.compile(r"search/\?q=.*&at=")

    def find(page: Page) -> None:
        held: list[Route] = []
        page.route(further, lambda route: held.append(route))
        with page.expect_request(further):
            page.goto(f"{OVERVIEW}search/?q=order%3D7")
        page.get_by_role("button", name="Stop").click()
        held[0].continue_()
        expect(page.locator("#queueapp-progress")).to_contain_text("Stopped. ")
        page.unroute(further)
        page.get_by_role("link", name="Search on").click()
        expect(page.locator("#queueapp-progress")).to_have_text("2 of 2 tables, 100 messages looked at.")

    browse(find, permissions=MAY_SEARCH)


def test_the_journal_is_replayed_after_its_count_was_shown(browse: Browse, settings: Any, maintenance: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^browser": None}}
    for number in range(10):
        publish("browser.orders", {"n": number})

    def replay(page: Page) -> None:
        page.goto("/admin/queueapp/journalentry/")
        page.get_by_role("link", name="Replay…").click()
        page.get_by_label("Topic:").fill("browser.orders")
        page.get_by_label("Filter:").fill("/n > 6")
        page.get_by_label("Into the queue:").select_option("testapp.Leased")
        page.get_by_role("button", name="Count them").click()
        expect(page.get_by_role("heading", name="Replay 3 messages into testapp.Leased?")).to_be_visible()
        page.get_by_role("button", name="Replay").click()
        expect(page.locator("#queueapp-live .queueapp-badge")).to_have_text("finished")

    browse(replay)
    assert sorted(json.loads(bytes(body))["n"] for body in Leased.objects.values_list("body", flat=True)) == [7, 8, 9]


def test_who_may_only_look_sees_neither_bodies_nor_buttons(browse: Browse) -> None:
    poison(1, body=b'{"card": "4711-0815"}')
    key = PoisonMessage.objects.get().pk

    def look(page: Page) -> list[tuple[str, int]]:
        seen = []
        for address in (OVERVIEW, "/admin/queueapp/poisonmessage/", f"/admin/queueapp/poisonmessage/{key}/change/"):
            page.goto(address)
            buttons = page.locator("#content button, #content input[type=submit]:not([value=Search])")
            seen.append((page.locator("#content").inner_text(), buttons.count()))
        return seen

    pages_seen = browse(look, permissions=["queueapp.view_queuecontrol", "queueapp.view_poisonmessage"])
    assert "ValueError" in pages_seen[2][0]
    assert [("4711-0815" in text, buttons) for text, buttons in pages_seen] == 3 * [(False, 0)]


@pytest.fixture
def maintenance(transactional_db: None) -> Iterator[Maintenance]:
    """The maintenance of the database."""
    service = Maintenance("default", [Leased], Elector("default", "maintenance", uuid.uuid4()), round_interval=0.1)
    service.start()
    yield service
    assert stop_all([service], 30)


# -- what must never happen ----------------------------------------------------------------------------------------


def test_nothing_in_a_message_runs_on_any_page(browse: Browse, addresses: list[str]) -> None:
    Leased.objects.update(headers=json.dumps({"type": HOSTILE, HOSTILE: HOSTILE}), correlation_id=HOSTILE)

    def look(page: Page) -> list[str]:
        ran = []
        for address in addresses:
            page.goto(address)
            if page.evaluate("window.pwned") is not None or page.locator("img[src=x]").count():
                ran.append(address)
        return ran

    assert browse(look) == []


def test_a_body_is_saved_and_not_opened(browse: Browse, tmp_path: Path) -> None:
    identity = Leased.send(HOSTILE.encode())
    seq = Leased.objects.get().pk

    def save(page: Page) -> tuple[str, bytes]:
        page.goto(f"/admin/testapp/leased/{seq}/change/")
        with page.expect_download() as started:
            page.get_by_role("link", name="Download the stored body").click()
        started.value.save_as(tmp_path / "body")
        return started.value.suggested_filename, (tmp_path / "body").read_bytes()

    assert browse(save) == (f"{identity}.bin", HOSTILE.encode())


# -- how it looks --------------------------------------------------------------------------------------------------

#: What axe finds wrong in our part of a page (the rest is Django's) by these rules, each as a line.
AXE = """async runOnly => {
  const {violations} = await axe.run("#content", {runOnly, resultTypes: ["violations"]});
  return violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.target} ${node.html.slice(0, 200)}`));
}"""
#: By theme: the rules of WCAG 2.2, levels A and AA; with other colours only what depends on them.
RULES = {
    "light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    "dark": ["color-contrast", "link-in-text-block"],
}


def test_axe_finds_no_fault_on_any_page(browse: Browse, addresses: list[str], axe: str) -> None:
    def look(page: Page) -> dict[tuple[str, str], list[str]]:
        found = {}
        for address in addresses:
            page.goto(address)
            page.evaluate(axe)
            # A button of Django's fades from colour to colour; on a busy machine it is met half-way.
            page.add_style_tag(content="* { transition: none !important; }")
            for theme, rules in RULES.items():
                page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
                if faults := page.evaluate(AXE, rules):
                    found[address, theme] = faults
        return found

    assert browse(look) == {}


def test_badges_are_words_and_not_only_colours(browse: Browse, populated: None) -> None:
    def read(page: Page) -> set[str]:
        page.goto("/admin/testapp/leased/")
        return set(page.locator(".queueapp-badge").all_inner_texts())

    assert browse(read) == {"ready", "leased", "lease expired", "expired"}
