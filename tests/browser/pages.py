"""The pages of the admin: where they are, and the ways to those that have no address, since they ask or answer
something.

``addresses`` reads the database; what takes a page runs in the browser's thread and does not.
"""

import re
from collections.abc import Iterator
from typing import Any

from django.contrib.admin.utils import quote
from playwright.sync_api import Page

from project.flights.models import FlightDelays
from queueapp.contrib.celery.models import BrokerQueue, CeleryResult, DeclaredQueue, PendingMove
from queueapp.contrib.tasks.models import Result
from queueapp.models import (
    BulkOperation,
    DelayedMessage,
    JournalEntry,
    MessageGroup,
    MessageResult,
    PoisonMessage,
    Schedule,
    Subscriber,
    Subscription,
)
from tests.browser.rows import LONG_NAME, LONG_REASON, SUBJECT
from tests.testapp.models import Addressed, Leased, Urgent

OVERVIEW = "/admin/queueapp/queuecontrol/"
SUBJECTS = "/admin/queueapp/subjectkey/"
Status = PoisonMessage.Status


def list_of(model: Any) -> str:
    """The address of a model's list."""
    return f"/admin/{model._meta.app_label}/{model._meta.model_name}/"


def addresses() -> list[str]:
    """At least one of every kind of page."""
    found = ["/admin/", "/admin/queueapp/", OVERVIEW, f"{OVERVIEW}testapp.Leased/history/", f"{OVERVIEW}databases/"]
    found.append(f"{OVERVIEW}search/?q=n%3D1")
    found += [f"{OVERVIEW}testapp.Transactional/history/", f"{OVERVIEW}testapp.Leased/charts/"]
    for model in (
        Leased,
        Urgent,
        Addressed,
        BulkOperation,
        BrokerQueue,
        DelayedMessage,
        Subscriber,
        CeleryResult,
        PendingMove,
        JournalEntry,
        Result,
        Schedule,
        MessageGroup,
        MessageResult,
    ):
        keys = model._base_manager.order_by("-pk").values_list("pk", flat=True)[:2]
        found += [list_of(model), *(f"{list_of(model)}{key}/change/" for key in keys)]
        if model is not JournalEntry:
            found.append(f"{list_of(model)}{keys[0]}/history/")
    poison = list_of(PoisonMessage)
    found += [poison, f"{poison}?status=all", f"{poison}?status=edited"]
    found += [f"{poison}?group=a", f"{poison}canary/?group=a"]
    messages = PoisonMessage.objects
    long, odd = messages.get(consumer=LONG_NAME), messages.filter(body=None)
    found += [f"{poison}{long.pk}/{page}/" for page in ("change", "edit", "history", "delete")]
    part = (*odd, *messages.exclude(status=Status.UNRESOLVED), messages.get(headers__contains="aes256gcm"))
    found += [f"{poison}{item.pk}/change/" for item in (*part, messages.exclude(edit_of=None).get())]
    found += [f"{poison}{messages.get(status=Status.EDITED).pk}/history/", f"{poison}{odd.get().pk}/edit/"]
    declared = [f"{list_of(DeclaredQueue)}{quote(f'default:{item.pk}')}" for item in DeclaredQueue.objects.all()]
    found += [list_of(DeclaredQueue), *(f"{item}/change/" for item in declared), f"{declared[0]}/history/"]
    found += ["/admin/queueapp/alert/", SUBJECTS, list_of(Subscription), f"{poison}{long.pk}/rehearse/"]
    found += [f"{list_of(Schedule)}add/", f"{list_of(Schedule)}{quote(Schedule.objects.earliest('name').pk)}/delete/"]
    held, waiting = Leased.objects.filter(lease_token__isnull=False).earliest("pk"), Leased.objects.latest("pk")
    found += [f"{list_of(Leased)}{held.pk}/change/", f"{list_of(Leased)}{waiting.pk}/delete/"]
    found.append(f"{list_of(DelayedMessage)}{DelayedMessage.objects.latest('pk').pk}/delete/")
    # What there is nothing of; the last two are answered by another page, with a note.
    found += [f"{list_of(Leased)}?{query}" for query in ("q=nonsense", "q=1234567", "state=leased")]
    found += [list_of(FlightDelays), f"{list_of(Leased)}999999/change/", f"{list_of(Leased)}?state=nonsense"]
    return found


def name_of(address: str) -> str:
    """What a picture of it is called."""
    return re.sub(r"/[0-9a-f-]{9,}|\W+", "-", address.removeprefix("/admin/"))[:80].strip("-") or "index"


def opened(page: Page, addresses: list[str], first: int = 0, step: int = 1) -> Iterator[str]:
    """Goes through the pages, or every so many of them; yields the name of each."""
    for number in range(first, len(addresses), step):
        address = addresses[number]
        page.goto(address)
        yield f"{number:02}-{name_of(address)}"


def asked_of_queues(page: Page) -> Iterator[str]:
    """Goes through the pages that ask before something is done to a queue or a subject, for each thing that can be;
    yields the name of each."""
    page.goto(OVERVIEW)
    buttons = page.locator(".queueapp-operate button")  # within a closed menu
    labels = buttons.evaluate_all("all => all.map(e => e.ariaLabel)")
    # Each verb once, of the queue that has most to say.
    verbs = {label.partition(" ")[0]: label for label in labels}
    verbs |= {label.partition(" ")[0]: label for label in labels if label.endswith(" testapp.Leased")}
    for verb, label in sorted(verbs.items()):
        operate(page, label)
        yield f"ask-queue-{verb}"
    for subject, name in (("no-such-subject", "unknown"), (SUBJECT, "known")):
        page.goto(SUBJECTS)
        page.get_by_label("Subject").fill(subject)
        page.get_by_role("button", name="Look for its keys").click()
        yield f"ask-subject-{name}"


def operate(page: Page, label: str) -> None:
    """Choose an operation on a queue, ``Pause app.Queue``, in the menu of its row."""
    page.goto(OVERVIEW)
    page.locator(f'summary[aria-label="Actions for {label.partition(" ")[2]}"]').click()
    page.get_by_role("button", name=label, exact=True).click()


def asked_of_rows(page: Page, models: tuple[Any, ...]) -> Iterator[str]:
    """Goes through the pages that ask before something is done to rows of these lists, for each thing that can be."""
    for model in models:
        page.goto(list_of(model))
        offered = page.get_by_label("Action:").locator("option").evaluate_all("all => all.map(e => e.value)")
        for operation in filter(None, offered):
            ask(page, model, operation)
            yield f"ask-{model._meta.model_name}-{operation}"


def ask(page: Page, model: Any, operation: str, query: str = "", everything: str = "") -> None:
    """Ask for an operation on all rows of a page of the list; on those of the other pages too by the link
    ``everything``."""
    page.goto(list_of(model) + query)
    page.get_by_label("Select all objects on this page for an action").check()
    if everything:
        page.get_by_text(everything).click()
    page.get_by_label("Action:").select_option(operation)
    page.locator("button[name=index]").click()


def refused(page: Page, editable: int) -> Iterator[str]:
    """Goes through pages that say of what was typed, or asked for, why it is not done; yields the name of each."""
    operate(page, "Limits testapp.Leased")
    page.get_by_label("Lease period").fill("soon")
    page.get_by_role("button", name="Set limits").click()
    yield "refused-limits"
    page.goto(f"{list_of(PoisonMessage)}{editable}/edit/")
    page.get_by_label("Headers").fill(f"no JSON, but {LONG_REASON}")
    page.get_by_role("button", name="Requeue the edited message").click()
    yield "refused-edit"
    ask(page, Subscription, "move_copies")
    page.get_by_label("Consumer of the same queue").fill(LONG_NAME)
    page.get_by_role("button", name="Move copies").click()
    yield "notice-moved"
    ask(page, PoisonMessage, "requeue")
    page.get_by_role("button", name="Requeue").click()
    yield "notice-requeued"
    ask(page, Leased, "delete_selected")
    page.get_by_role("button", name="Delete").click()
    yield "notice-deleted"
