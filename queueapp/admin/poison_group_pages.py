"""What is done with a whole group of poison messages: its canary after a deploy, and the notes on it."""

from __future__ import annotations

from itertools import islice
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, DELETION
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from .. import registry
from ..errors import QueueError
from ..models import PoisonMessage, PoisonNote, distinct_values
from ..operations import requeue_after_deploy
from ..sql import nonblocking
from .formatting import untrusted
from .operations import Options, ask, log_entry, to_operation
from .poison_groups import notes_of

#: Queues of a group that are offered.
QUEUES = 50

_CANARY = (
    "A canary requeues one message of the group. While the workers handle its messages, it requeues the next 2, 5, 20, "
    "then 100 at a time, each batch when all messages of the previous one have ended. The canary stops if its first "
    "message fails again, or when more messages than the budget have; the others stay in poison, and the canary leaves "
    "a note on the group. All live workers of the queue must have one version."
)
_NOTE = "All users who may view poison messages see the note with its group. It is kept for a year."


class _Canary(Options):
    """The queue, where the group has messages of several, and the budget."""

    queue = forms.ChoiceField(label="Queue")
    budget = forms.IntegerField(
        min_value=0,
        max_value=1_000_000,
        initial=requeue_after_deploy.DEFAULT_BUDGET,
        label="Failure budget",
        help_text="How many messages may fail again before the canary stops.",
    )
    again = forms.BooleanField(required=False, label="Start it even if this group has had a canary on this version")


class _Note(Options):
    text = forms.CharField(max_length=1000, widget=forms.Textarea(attrs={"rows": 4}), label="Note")


def canary_view(page: Any, request: HttpRequest) -> HttpResponse:
    """The page that starts the canary of a group."""
    if not page.has_requeue_permission(request):
        raise PermissionDenied
    alias, group = page.database(request), _group(page, request)
    rows = nonblocking(PoisonMessage.objects.using(alias)).filter(
        group_key=group, status=PoisonMessage.Status.UNRESOLVED
    )
    queues = list(islice(distinct_values(rows, "queue"), QUEUES))
    form = _Canary(request.POST) if "confirmed" in request.POST else _Canary()
    form.fields["queue"].choices = [(label, untrusted.visible(label)) for label in queues]  # type: ignore[attr-defined]
    if not form.is_valid():
        return _ask(page, request, alias, group, "Requeue group {} as a canary?", _CANARY, form, "Start the canary")
    label, budget, again = (form.cleaned_data[name] for name in ("queue", "budget", "again"))
    try:
        queue = registry.queues.find(label)
        started = requeue_after_deploy.start(queue, group, budget=budget, again=again, using=alias, by=request.user)
    except QueueError as error:
        page.message_user(request, f"Nothing was started: {untrusted.visible(str(error))[:500]}", messages.ERROR)
        return HttpResponseRedirect(page.list_url(alias, group=group))
    text = f"Canary of group {group}, queue {label}, budget {budget}: {started}"
    log_entry(page, request, untrusted.visible(text), about=str(started), flag=DELETION).save()
    return to_operation(page, request, started)


def notes_view(page: Any, request: HttpRequest) -> HttpResponse:
    """The page that adds a note to a group."""
    if not page.has_triage_permission(request):
        raise PermissionDenied
    alias, group = page.database(request), _group(page, request)
    form = _Note(request.POST) if "confirmed" in request.POST else _Note()
    if not form.is_valid():
        return _ask(page, request, alias, group, "Add a note to group {}", _NOTE, form, "Save the note")
    text, by = form.cleaned_data["text"], request.user.get_username()
    PoisonNote.objects.using(alias).create(group_key=group, text=text, username=by[:150])
    about = f"group {group[:6]}"
    log_entry(page, request, f"Note: {untrusted.visible(text)}", about=about, flag=ADDITION).save()
    page.message_user(request, "The note was saved.", messages.SUCCESS)
    return HttpResponseRedirect(page.list_url(alias, group=group))


def _group(page: Any, request: HttpRequest) -> str:
    """The group in the address; it has, or had, messages."""
    group = request.GET.get("group", "")
    rows = nonblocking(PoisonMessage.objects.using(page.database(request)))
    if not group or len(group) > 64 or "\0" in group or not rows.filter(group_key=group).exists():
        raise Http404("There is no such group.")
    return group


def _ask(
    page: Any, request: HttpRequest, alias: str, group: str, title: str, explanation: str, form: Options, yes: str
) -> HttpResponse:
    return ask(
        page, request, title=title.format(group[:6]), explanation=explanation, few=notes_of(alias, group), hidden=[],
        form=form, yes=yes, dangerous=False, post_to=request.get_full_path(),
        back_to=page.list_url(alias, group=group),
    )  # fmt: skip
