"""Rehearsing a poison message: ask, run today's handler in a transaction that is rolled back, report."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from ..errors import QueueError
from ..models import PoisonMessage
from ..operations.rehearsal import Rehearsal, rehearse
from ..sql import nonblocking
from .formatting import untrusted
from .operations import Options, ask, log_entry

WHAT = (
    "The handler that this site has for the message is run in a transaction that is always rolled back. Nothing is "
    "acked, sent or requeued. Sockets and programs are refused. A slow handler keeps this page waiting."
)
#: Lines of a report, and characters of a line.
LINES, LINE = 200, 500


def rehearse_view(page: Any, request: HttpRequest, message: PoisonMessage) -> HttpResponse:
    """The question; after a POST the report, with the same question. Its reader may see what handlers make of the body,
    so it takes the permission to edit."""
    if not page.may_edit(request, message):
        raise PermissionDenied
    if request.method != "POST":
        return _page(page, request, "Rehearse this message?", WHAT, [])
    alias = message._state.db or "default"
    full = nonblocking(PoisonMessage.objects.using(alias)).filter(pk=message.pk).first()
    try:
        if full is None:
            raise QueueError(f"Message {message.pk} is gone.")
        found = rehearse(full)
    except QueueError as error:
        page.message_user(request, untrusted.visible(str(error)), messages.ERROR)
        return HttpResponseRedirect("../change/")
    log_entry(page, request, f"Rehearsed: {'handled' if found.succeeded else 'not handled'}.", row=full).save()
    return _page(page, request, "Rehearsed, and rolled back", _summary(found), _lines(found))


def _summary(found: Rehearsal) -> Any:
    by = f" by {found.consumer}" if found.consumer else ""
    return untrusted.inline(f"{found.result}{by}, in {found.seconds:.3f} s", LINE)


def _lines(found: Rehearsal) -> list[Any]:
    lines = [*found.effects(), *found.traceback.splitlines()]
    return [untrusted.inline(line, LINE) for line in lines[:LINES]]


def _page(page: Any, request: HttpRequest, title: str, explanation: Any, lines: list[Any]) -> HttpResponse:
    return ask(
        page, request, title=title, explanation=explanation, few=lines, hidden=[], form=Options(), yes="Rehearse",
        dangerous=False, post_to=request.path, back_to="../change/",
    )  # fmt: skip
