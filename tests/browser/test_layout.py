"""How the admin's pages look: nothing is cut or overlaps, on a telephone and on a small desktop, in both themes.

With ``QUEUEAPP_TEST_SCREENSHOTS=<directory>`` each page is also kept as a picture, to be looked at.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from queueapp.kombu.models import CeleryResult, DeclaredQueue
from queueapp.models import Alert, DelayedMessage, JournalEntry, PoisonMessage, Subscriber, Subscription
from queueapp.operating import control
from queueapp.tasks.models import Result
from tests.browser.conftest import SUBJECT
from tests.testapp.models import Leased

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

Browse = Callable[..., Any]
TELEPHONE, DESKTOP = 390, 1280
OVERVIEW = "/admin/queueapp/queuecontrol/"

#: Texts and controls that reach beyond the window, or beyond a box around them that would have to be scrolled sideways.
CUT = """() => {
  const found = [];
  for (const e of document.querySelectorAll('#content *, .breadcrumbs, .messagelist li')) {
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const control = ['INPUT', 'SELECT', 'TEXTAREA', 'BUTTON'].includes(e.tagName) && e.type !== 'hidden';
    const box = e.getBoundingClientRect();
    if (!(text || control) || !e.checkVisibility({visibilityProperty: true}) || box.width <= 1) continue;
    if (e.closest('.visually-hidden, .queueapp-hex, option, script')) continue;
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

#: Cells of a row of a list that overlap each other.
OVERLAPS = """() => {
  const found = [];
  for (const row of document.querySelectorAll('#result_list tbody tr, .queueapp-failures tbody tr')) {
    const boxes = [...row.children].map(c => c.getBoundingClientRect()).filter(b => b.width * b.height > 0);
    for (const [n, a] of boxes.entries()) for (const b of boxes.slice(n + 1))
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
        found.push(row.innerText.slice(0, 80));
  }
  return found;
}"""


def every_page(page: Page, addresses: list[str]) -> Iterator[str]:
    """Goes through the pages, those that ask before something is done included; yields the name of each."""
    for number, address in enumerate(addresses):
        page.goto(address)
        yield f"{number:02}-" + (
            re.sub(r"/[0-9a-f-]{9,}|\W+", "-", address.removeprefix("/admin/")).strip("-") or "index"
        )
    for verb in ("Pause", "Concurrency", "Limits", "Purge"):
        page.goto(OVERVIEW)
        page.get_by_role("button", name=f"{verb} testapp.Leased", exact=True).click()
        yield f"ask-{verb}"
    for subject, name in (("nobody", "unknown"), (SUBJECT, "known")):
        page.goto("/admin/queueapp/subjectkey/")
        page.get_by_label("Subject").fill(subject)
        page.get_by_role("button", name="Look for its keys").click()
        yield f"ask-subject-{name}"
    for model, operation in (
        (PoisonMessage, "requeue"),
        (PoisonMessage, "delete_selected"),
        (Leased, "release_lease"),
        (Subscription, "purge_copies"),
        (Subscription, "move_copies"),
        (Subscription, "remove"),
        (DeclaredQueue, "delete_queues"),
    ):
        page.goto(f"/admin/{model._meta.app_label}/{model._meta.model_name}/")
        page.get_by_label("Select all objects on this page for an action").check()
        page.get_by_label("Action:").select_option(operation)
        page.locator("button[name=index]").click()
        yield f"ask-{model._meta.model_name}-{operation}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [TELEPHONE, DESKTOP])
def test_nothing_is_cut_or_overlaps_on_any_page(browse: Browse, addresses: list[str], width: int, theme: str) -> None:
    control.set_concurrency(Leased, 8)

    def measure(page: Page) -> dict[str, list[str]]:
        wrong = {}
        for name in every_page(page, addresses):
            if directory := os.environ.get("QUEUEAPP_TEST_SCREENSHOTS"):
                page.screenshot(path=Path(directory) / f"{name}-{width}-{theme}.png", full_page=True)
            if found := page.evaluate(CUT) + page.evaluate(OVERLAPS):
                wrong[name] = found
        return wrong

    assert browse(measure, viewport={"width": width, "height": 800}, color_scheme=theme) == {}


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
        for name in ("Waiting", "Oldest", "Poison"):
            cell = row["cells"][name]
            assert cell["left"] >= 0
            assert cell["right"] <= TELEPHONE
            assert cell["width"] > 60
            assert cell["label"] == f'"{name}"', "a figure without the head of its column says what it is"
            assert cell["text"].strip(), "a dash where it is not known"


@pytest.mark.parametrize(
    "model",
    [Leased, DelayedMessage, PoisonMessage, Subscriber, Subscription, CeleryResult, JournalEntry, Result, Alert],
)
def test_each_figure_of_a_list_has_its_name_on_a_telephone(browse: Browse, populated: None, model: Any) -> None:
    rows = cells(browse, f"/admin/{model._meta.app_label}/{model._meta.model_name}/", TELEPHONE)
    assert rows
    for row in rows:
        unnamed = [name for name, cell in row["cells"].items() if cell["text"].strip() and cell["label"] == "none"]
        assert row["card"]
        assert unnamed == []


@pytest.mark.parametrize(("width", "least"), [(TELEPHONE, 250), (DESKTOP, 165)])
def test_what_an_alert_says_has_room(browse: Browse, populated: None, width: int, least: int) -> None:
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
        assert row["cells"]["field-why"]["right"] <= TELEPHONE
        assert row["cells"]["field-why"]["width"] > 250


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (OVERVIEW, "queueapp-operate"),
        ("/admin/queueapp/poisonmessage/", "field-why"),
        ("/admin/queueapp/subscriber/", "field-counts"),
        ("/admin/queueapp/alert/", "field-one_for_each"),
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
