"""How the admin's pages look: nothing is cut or overlaps, on a telephone and on a small desktop, in both themes.

With ``QUEUEAPP_TEST_SCREENSHOTS=<directory>`` each page is also kept as a picture, to be looked at.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import Client
from django.urls import resolve
from playwright.sync_api import Page, expect

from queueapp.admin.large_tables import search
from queueapp.admin.queues import QueueAdmin
from queueapp.contrib.celery.models import CeleryResult, DeclaredQueue, PendingMove
from queueapp.contrib.tasks.models import Result
from queueapp.models import Alert, DelayedMessage, JournalEntry, PoisonMessage, Subscriber, Subscription
from queueapp.operations import control
from tests.browser import pages
from tests.browser.rows import LONG_NAME, operator, poison
from tests.databases import known_as
from tests.testapp.models import Leased, Transactional, Urgent

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

Browse = Callable[..., Any]
TELEPHONE, DESKTOP = 390, 1280
OVERVIEW = pages.OVERVIEW

#: Texts and controls that reach beyond the window, or beyond a box around them that would have to be scrolled sideways.
CUT = """() => {
  const found = [];
  for (const e of document.querySelectorAll('#content *, .breadcrumbs, .messagelist li')) {
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const control = ['INPUT', 'SELECT', 'TEXTAREA', 'BUTTON'].includes(e.tagName) && e.type !== 'hidden';
    const box = e.getBoundingClientRect();
    if (!(text || control) || !e.checkVisibility({visibilityProperty: true}) || box.width <= 1) continue;
    if (e.closest('.visually-hidden, .queueapp-hex, option, script')) continue;
    let elided = false;  // an ellipsis says that the text goes on
    for (let p = e; p; p = p.parentElement) elided ||= getComputedStyle(p).textOverflow === 'ellipsis';
    if (elided) continue;
    if (getComputedStyle(e.closest('thead') ?? e).clipPath !== 'none') continue;
    let left = 0, right = innerWidth;
    for (let p = e.parentElement; p; p = p.parentElement) {
      if (getComputedStyle(p).overflowX === 'visible') continue;
      left = Math.max(left, p.getBoundingClientRect().left);
      right = Math.min(right, p.getBoundingClientRect().right);
    }
    // Of what is inside an inline element, each line has a box; a text that is wider than its block is cut, or climbs.
    const wide = e.tagName !== 'SELECT' && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1;
    if (box.left < left - 0.5 || box.right > right + 0.5 || wide)
      found.push(`${e.tagName}.${e.className}: ${e.innerText || e.value}`.slice(0, 100));
  }
  return found;
}"""

#: Cells of a row of a list that overlap each other, and links beside a heading that lie on its text.
OVERLAPS = """() => {
  const found = [];
  const lines = e => { const range = document.createRange(); range.selectNodeContents(e); return [...range.getClientRects()]; };
  for (const link of document.querySelectorAll('.object-tools a')) for (const h of document.querySelectorAll('#content h1, #content h2'))
    for (const [a, b] of lines(h).map(line => [line, link.getBoundingClientRect()]))
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) found.push(h.innerText.slice(0, 80));
  for (const row of document.querySelectorAll('#result_list tbody tr, .queueapp-failures tbody tr')) {
    const boxes = [...row.children].map(c => c.getBoundingClientRect()).filter(b => b.width * b.height > 0);
    for (const [n, a] of boxes.entries()) for (const b of boxes.slice(n + 1))
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
        found.push(row.innerText.slice(0, 80));
  }
  return found;
}"""  # noqa: E501


#: That the page itself has to be scrolled sideways.
WIDE = "() => document.documentElement.scrollWidth > innerWidth ? ['the page is wider than its window'] : []"


AWAY = "away"


class Routes:
    """Urgent lies in a database that does not answer."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return AWAY if model is Urgent else None

    db_for_read = db_for_write


@pytest.fixture
def away(transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database that cannot be reached."""
    guarded = BaseDatabaseWrapper.ensure_connection

    def ensure(connection: BaseDatabaseWrapper) -> None:
        # Django's tests refuse undeclared databases before they get as far as to call.
        if connection.alias != AWAY:
            guarded(connection)
        elif connection.connection is None:
            with connection.wrap_database_errors:
                connection.connect()

    monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", ensure)
    settings.DATABASE_ROUTERS = [Routes()]
    unreachable = {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {}}
    with known_as(AWAY, **unreachable):
        yield AWAY


def wrong_with(page: Page, names: Iterable[str]) -> dict[str, list[str]]:
    """What is cut, overlaps or is wider than its window on each of these pages, at both widths. A page is opened once
    and then turned: what differs between its versions is style alone, and between the themes only colours, so that each
    width has one. Pictures are taken of all four."""
    wrong = {}
    versions = [(TELEPHONE, "light"), (DESKTOP, "dark")]
    if directory := os.environ.get("QUEUEAPP_TEST_SCREENSHOTS"):
        versions = [*product((TELEPHONE, DESKTOP), ("light", "dark"))]
    for name in names:
        page.wait_for_load_state()  # what a click leads to may still be on its way
        for width, theme in versions:
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
            version = f"{name}-{width}-{theme}"
            if directory:
                page.add_style_tag(content="* { transition: none !important; }")  # colours fade from theme to theme
                page.screenshot(path=Path(directory) / f"{version}.png", full_page=True)
            if found := page.evaluate(CUT) + page.evaluate(OVERLAPS) + page.evaluate(WIDE):
                wrong[version] = found
    return wrong


@pytest.mark.parametrize("part", range(3))
def test_nothing_is_cut_or_overlaps_on_any_page(browse: Browse, addresses: list[str], part: int) -> None:
    assert browse(lambda page: wrong_with(page, pages.opened(page, addresses, part, 3))) == {}


def test_nothing_is_cut_or_overlaps_where_something_is_asked_of_queues(browse: Browse, populated: None) -> None:
    control.set_concurrency(Leased, 8)
    assert browse(lambda page: wrong_with(page, pages.asked_of_queues(page))) == {}


@pytest.mark.parametrize("models", [(Leased, DelayedMessage), (PoisonMessage, Subscription, DeclaredQueue)])
def test_nothing_is_cut_or_overlaps_where_something_is_asked_of_rows(
    browse: Browse, populated: None, models: tuple[Any, ...]
) -> None:
    assert browse(lambda page: wrong_with(page, pages.asked_of_rows(page, models))) == {}


def test_nothing_is_cut_or_overlaps_where_something_is_refused(browse: Browse, populated: None) -> None:
    editable = PoisonMessage.objects.get(consumer=LONG_NAME).pk
    assert browse(lambda page: wrong_with(page, pages.refused(page, editable))) == {}


def test_nothing_is_cut_or_overlaps_where_there_is_nothing(browse: Browse) -> None:
    lists = sorted({pages.list_of(model) for model, page in admin.site._registry.items() if not _is_djangos(page)})
    # Of the queues one: they are alike.
    lists = [item for item in lists if not item.startswith("/admin/testapp/") or item == pages.list_of(Leased)]
    assert len(lists) > 12
    assert browse(lambda page: wrong_with(page, (f"empty-{name}" for name in pages.opened(page, lists)))) == {}


def test_nothing_is_cut_or_overlaps_on_pages_over_large_tables(
    browse: Browse, populated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COUNTED", 8)
    monkeypatch.setattr(search, "WINDOW", 9)
    monkeypatch.setattr(admin.site._registry[Leased], "list_per_page", 4)
    middle = list(Leased.objects.order_by("pk").values_list("pk", flat=True))[5]
    messages, filters = pages.list_of(Leased), ("p=1", "p=3", "state=ready", f"seq__gte={middle}")

    def large(page: Page) -> Iterator[str]:
        yield from (f"large-{name}" for name in pages.opened(page, [f"{messages}?{f}" for f in filters]))
        for name, query in (("all", ""), ("filtered", "?state=ready")):
            pages.ask(page, Leased, "delete_selected", query, everything="Select all ")
            yield f"large-ask-{name}"

    assert browse(lambda page: wrong_with(page, large(page))) == {}


def test_nothing_is_cut_or_overlaps_when_something_cannot_be_read(browse: Browse, populated: None, away: str) -> None:
    of_it = [f"{pages.list_of(model)}?database={away}" for model in (DelayedMessage, PoisonMessage, Subscription)]
    poison(2, queue="gone.Shop")
    Transactional.send({})
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_short RENAME TO elsewhere")
    try:
        found = browse(
            lambda page: wrong_with(page, (f"away-{n}" for n in pages.opened(page, [pages.OVERVIEW, *of_it])))
        )
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO testapp_short")
    assert found == {}


def test_nothing_is_cut_or_overlaps_for_who_may_only_look(browse: Browse, addresses: list[str]) -> None:
    may = [f"queueapp.view_{model}" for model in ("queuecontrol", "poisonmessage", "delayedmessage", "journalentry")]
    poison_page = next(address for address in addresses if re.search(r"poisonmessage/\d+/change/", address))
    journal_page = next(address for address in addresses if re.search(r"journalentry/\d+/change/", address))
    aside_page = next(address for address in addresses if re.search(r"pendingmove/\d+/change/", address))
    hidden_body = next(address for address in addresses if re.search(r"delayedmessage/\d+/change/", address))
    seen = ["/admin/", pages.OVERVIEW, pages.list_of(Leased), poison_page, journal_page, aside_page, hidden_body]

    def look(page: Page) -> dict[str, list[str]]:
        return wrong_with(page, (f"reader-{name}" for name in pages.opened(page, seen)))

    assert browse(look, permissions=[*may, "testapp.view_leased", "queueapp_celery.view_pendingmove"]) == {}


def test_every_page_that_can_be_opened_is_looked_at(addresses: list[str]) -> None:
    def kind(address: str) -> tuple[type, str]:
        found = resolve(address.partition("?")[0])
        name = str(found.url_name)
        page = next(
            p for m, p in admin.site._registry.items() if name.startswith(f"{m._meta.app_label}_{m._meta.model_name}_")
        )
        return type(page), name.rpartition("_")[2]

    of_models = [address for address in addresses if address.count("/") > 3]
    looked_at = {kind(of_model) for of_model in of_models}
    keys = {}
    for address in of_models:
        key = re.search(r"/([^/]+)/(change|history)/$", address)
        if key and "999999" not in address:
            keys.setdefault(kind(address)[0], (address.partition("?")[0].rsplit("/", 3)[0], key[1]))
    client, missed = Client(), []
    client.force_login(operator())
    for model, page in admin.site._registry.items():
        if _is_djangos(page) or (type(page) is QueueAdmin and model is not Leased):
            continue
        base, key = keys.get(type(page), (pages.list_of(model).rstrip("/"), str(model._base_manager.first().pk)))
        names = {str(url.name).rpartition("_")[2] for url in page.get_urls() if url.name}
        for name in names - {"changelist"}:
            address = f"{base}/add/" if name == "add" else f"{base}/{key}/{name}/"
            response = client.get(address)
            is_page = response.status_code == 200 and response["Content-Type"].startswith("text/html")
            if is_page and (type(page), name) not in looked_at:
                missed.append(address)
        if (type(page), "changelist") not in looked_at:
            missed.append(pages.list_of(model))
    assert missed == []


def _is_djangos(page: Any) -> bool:
    return type(page).__module__.startswith("django.")


#: For each row of a list: whether it is a card, and by name the boxes (left, right, width) of its cells.
CELLS = """() => [...document.querySelectorAll('#result_list tbody tr:not(.queueapp-more)')].map(row => ({
  card: getComputedStyle(row).display === 'grid',
  cells: Object.fromEntries([...row.cells].map(cell => {
    const box = cell.getBoundingClientRect();
    const name = cell.dataset.label ?? cell.className.split(' ')[0];
    const label = getComputedStyle(cell, '::before').content;
    return [name, {left: box.left, right: box.right, width: box.width, label: label, text: cell.innerText}];
  })),
}))"""


def cells(browse: Browse, address: str, width: int) -> list[dict[str, Any]]:
    def measure(page: Page) -> Any:
        page.goto(address)
        return page.evaluate(CELLS)

    return list(browse(measure, viewport={"width": width, "height": 800}))


def test_depth_age_and_poison_of_each_queue_are_on_the_screen_of_a_telephone(browse: Browse, populated: None) -> None:
    rows = cells(browse, OVERVIEW, TELEPHONE)
    assert len(rows) > 8
    for row in rows:
        for name in ("Ready", "Oldest", "Poison"):
            cell = row["cells"][name]
            assert cell["left"] >= 0
            assert cell["right"] <= TELEPHONE
            assert cell["width"] > 60
            assert cell["label"] == f'"{name}"', "a figure without the head of its column says what it is"
            assert cell["text"].strip(), "a dash where it is not known"


@pytest.mark.parametrize(
    "model",
    [
        Leased,
        DelayedMessage,
        PoisonMessage,
        Subscriber,
        Subscription,
        CeleryResult,
        JournalEntry,
        Result,
        Alert,
        DeclaredQueue,
        PendingMove,
    ],
)
def test_each_figure_of_a_list_has_its_name_on_a_telephone(browse: Browse, populated: None, model: Any) -> None:
    rows = cells(browse, f"/admin/{model._meta.app_label}/{model._meta.model_name}/", TELEPHONE)
    assert rows
    for row in rows:
        unnamed = [name for name, cell in row["cells"].items() if cell["text"].strip() and cell["label"] == "none"]
        assert row["card"]
        assert unnamed == []


@pytest.mark.parametrize("model", [Leased, Urgent, DelayedMessage, PoisonMessage, JournalEntry])
def test_a_message_has_one_line_on_a_small_desktop(browse: Browse, populated: None, model: Any) -> None:
    def heights(page: Page) -> list[float]:
        page.goto(pages.list_of(model))
        rows = page.locator("#result_list tbody tr")
        return rows.evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")

    found = browse(heights, viewport={"width": DESKTOP, "height": 800})
    assert found
    assert max(found) < 45


def test_the_filters_are_above_the_list_on_a_telephone(browse: Browse, populated: None) -> None:
    def choose(page: Page) -> tuple[float, float, list[str]]:
        page.goto(pages.list_of(PoisonMessage))
        filters = page.get_by_role("navigation", name="Filters").bounding_box()
        first = page.locator("#result_list tbody tr").first.bounding_box()
        page.get_by_text("Status: unresolved").click()
        page.get_by_role("link", name="archived").click()
        expect(page.get_by_text("Status: archived")).to_be_visible()
        return filters["y"] + filters["height"], first["y"], page.get_by_text("Clear all filters").all_inner_texts()

    end, first, clear = browse(choose, viewport={"width": TELEPHONE, "height": 800})
    assert end < 400
    assert end < first < 1000, "between them are the groups"
    assert clear == ["Clear all filters"]


@pytest.mark.parametrize(("width", "least"), [(TELEPHONE, 250), (DESKTOP, 165)])
def test_what_an_alert_states_has_room(browse: Browse, populated: None, width: int, least: int) -> None:
    for row in cells(browse, "/admin/queueapp/alert/", width):
        assert row["cells"]["field-alert_text"]["width"] > least


def test_a_name_that_is_asked_for_has_room(browse: Browse, populated: None) -> None:
    def measure(page: Page) -> Any:
        page.goto("/admin/queueapp/subjectkey/")
        return page.get_by_label("Subject").evaluate("e => e.getBoundingClientRect().width")

    assert browse(measure, viewport={"width": TELEPHONE, "height": 800}) > 300


def test_the_reason_of_a_poison_message_is_on_the_screen_of_a_telephone(browse: Browse, populated: None) -> None:
    for row in cells(browse, "/admin/queueapp/poisonmessage/", TELEPHONE):
        assert row["card"]
        assert row["cells"]["field-failure_reason"]["right"] <= TELEPHONE
        assert row["cells"]["field-failure_reason"]["width"] > 250


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (OVERVIEW, "queueapp-operate"),
        ("/admin/queueapp/poisonmessage/", "field-failure_reason"),
        ("/admin/queueapp/subscriber/", "field-counts"),
        ("/admin/queueapp/alert/", "field-subject"),
        ("/admin/queueapp/subscription/", "field-made"),
        ("/admin/testapp/urgent/", "field-delivery_count"),
    ],
)
def test_a_small_desktop_has_tables_with_all_of_their_columns(
    browse: Browse, populated: None, address: str, name: str
) -> None:
    for row in cells(browse, address, DESKTOP):
        assert not row["card"]
        assert row["cells"][name]["right"] <= DESKTOP
