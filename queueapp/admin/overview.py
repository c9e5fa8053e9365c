"""The overview of all queues, with a button for each thing that can be done to a whole queue (see queue_operations).

It stands in the admin's index as "Queues", as the list page of ``QueueControl``; there is no page per row, only the
history of who did what. Every button is a POST with a CSRF token and needs ``queueapp.operate_queue``.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError, router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from .. import overrides, registry
from ..errors import QueueNotFound
from ..models import NO_QUEUES, DelayedMessage, PoisonMessage, QueueControl, Subscriber
from ..operations.statistics import in_words
from ..sending.validation import alias_of
from .databases import PARAMETER, Named, told_of
from .formatting import display, untrusted
from .operations import Options, ask
from .overview_rows import Figures, of_all_queues
from .queue_operations import OPERATIONS, QueueOperation
from .read_only import ReadOnlyAdmin

OPERATE = "queueapp.operate_queue"


class OverviewAdmin(ReadOnlyAdmin):
    """All queues of this process on one page."""

    actions = None

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        views = {verb: self.admin_site.admin_view(partial(self.operate_view, verb=verb)) for verb in OPERATIONS}
        own = [path(f"<str:label>/{verb}/", view, name=f"{name}_{verb}") for verb, view in views.items()]
        # Django's pages to add and delete are not ours.
        kept = ("_changelist", "_history", "_change")
        return [*own, *(url for url in super().get_urls() if str(url.name).endswith(kept))]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The overview."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        lines = [self._line(request, figures) for figures in of_all_queues()]
        context = {
            **self.admin_site.each_context(request),
            "title": "Queues",
            "opts": self.opts,
            "media": self.media,
            "lines": lines,
            "may_operate": request.user.has_perm(OPERATE),
            "several_databases": len({line["figures"].alias for line in lines}) > 1,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        return TemplateResponse(request, "admin/queueapp/overview.html", context)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """Where Django links to from its log: there is no page per queue but the overview."""
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(self._url("changelist"))

    def operate_view(self, request: HttpRequest, label: str, verb: str) -> HttpResponse:
        """Do one of the operations to one queue: by POST only, and asked for first."""
        if not request.user.has_perm(OPERATE):
            raise PermissionDenied
        try:
            queue = registry.queues.find(label)
        except QueueNotFound:
            raise Http404(f"There is no queue {label}.") from None
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        alias = alias_of(queue)
        try:
            # What only asks is read within a savepoint, as in or_note.
            with nullcontext() if "confirmed" in request.POST else transaction.atomic(using=alias):
                return self._operate(request, queue, OPERATIONS[verb])
        except (DatabaseError, InterfaceError) as error:
            cause = told_of(error, alias, queue._meta.db_table)
            if not cause:
                raise
            self.message_user(request, f"Queue {queue._meta.label}: {cause}", messages.ERROR)
        return HttpResponseRedirect(self._url("changelist"))

    def _operate(self, request: HttpRequest, queue: Any, operation: QueueOperation) -> HttpResponse:
        confirmed = "confirmed" in request.POST
        options = operation.options_of(queue) if operation.options_of is not None else operation.options
        form = options(request.POST) if confirmed else options(initial=operation.initial(queue))
        if not confirmed or not form.is_valid():
            return self._ask(request, queue, operation, form)
        text, level = operation.run(queue, request.user, form.cleaned_data)
        self.message_user(request, text, level)
        return HttpResponseRedirect(self._url("changelist"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """For the history page: a queue has one even when nothing was ever set for it."""
        try:
            return QueueControl(queue=registry.queues.find(object_id)._meta.label)
        except QueueNotFound:
            return None

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Who did what to a queue, and when."""
        # Its name alone: what is set for it is not read here, so "running" could be untrue.
        label = unquote(object_id)
        named = {"title": f"History of {label}", "object": Named(label, label)}
        return super().history_view(request, object_id, {**named, **(extra_context or {})})

    # -- inside ---------------------------------------------------------------------------------------------------

    def _line(self, request: HttpRequest, figures: Figures) -> dict[str, Any]:
        label = figures.label
        return {
            "figures": figures,
            "link": display.queue_link(label, figures.queue, self.admin_site, request),
            "state": self._state(figures),
            "set": self._set(figures),
            "oldest": display.duration(figures.oldest) if figures.oldest is not None else "",
            "notes": [untrusted.inline(text, 300) for text in self._notes(figures)],
            "delayed_url": self._list_of(request, DelayedMessage, figures.alias, destination=label),
            "poison_url": self._list_of(request, PoisonMessage, figures.alias, queue=label),
            "subscribers_url": self._list_of(request, Subscriber, figures.alias, queue=label),
            **({} if figures.queue is None else self._of_known_queue(figures)),
        }

    def _of_known_queue(self, figures: Figures) -> dict[str, Any]:
        # The name of a queue that is no more is whatever a stranger wrote: an address need not exist for it.
        verbs = ("resume" if figures.paused else "pause", "concurrency", "limits", "purge")
        return {
            "history_url": self._url("history", quote(figures.label)),
            "operations": [(OPERATIONS[verb], self._url(verb, figures.label)) for verb in verbs],
        }

    @staticmethod
    def _notes(figures: Figures) -> list[str]:
        of = figures.of
        left = [f"{one}; the oldest is {display.of_seconds(one.oldest_seconds)} old" for one in of.stranded]
        return [
            text for text in (of.error, of.note, *map(in_words, of.breakers), *left, *map(str, of.unserved)) if text
        ]

    def _state(self, figures: Figures) -> SafeString:
        if figures.label in NO_QUEUES:
            return self._state_of_no_queue(figures)
        if figures.queue is None:
            return display.badge("bad", "no such queue")
        if figures.of.waiting is None:
            return display.badge("bad", "not readable")
        if figures.paused:
            return display.badge("warn", "paused")
        if figures.of.error:
            return display.badge("bad", "partly known")
        if figures.of.breakers:
            return display.badge("bad", "degraded")
        if not figures.subscribers:
            return display.badge("quiet", "no worker")
        if figures.of.unserved or any(left.what == "recipient" for left in figures.of.stranded):
            return display.badge("warn", "consumer not served")
        return display.badge("good", "running")

    @staticmethod
    def _set(figures: Figures) -> list[Any]:
        """What somebody has set for the queue; who set something last, and when."""
        if figures.control is None:
            return []
        tasks = figures.control.concurrency
        by, at = f"by {figures.changed_by or 'a script'}", display.moment(figures.control.changed_at)
        values = ((name, getattr(figures.control, name)) for name in overrides.SETTABLE)
        set_ = [
            f"{name.replace('_', ' ')} {display.in_full(value) if isinstance(value, timedelta) else value}"
            for name, value in values
            if value is not None
        ]
        return [*([f"{display.tasks(tasks)} per process"] if tasks is not None else []), *set_, by, at]

    @staticmethod
    def _state_of_no_queue(figures: Figures) -> SafeString:
        if figures.subscribers is None:
            return display.badge("bad", "not readable")
        if figures.of.breakers:
            return display.badge("bad", "degraded")
        return display.badge("good", "running") if figures.subscribers else display.badge("warn", "none alive")

    def _ask(self, request: HttpRequest, queue: Any, operation: QueueOperation, form: Options) -> HttpResponse:
        label = queue._meta.label
        return ask(
            self,
            request,
            title=operation.title(queue),
            explanation=operation.explanation,
            few=[],
            hidden=[],
            form=form,
            yes=operation.answer or f"{operation.label} {label}",
            dangerous=operation.dangerous,
            post_to=self._url(operation.name, label),
            back_to=self._url("changelist"),
        )

    def _url(self, page: str, *args: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}", args=args)

    def _list_of(self, request: HttpRequest, model: Any, alias: str, **filters: str) -> str:
        """The address of another list, of one database and filtered; '' when the user may not see it."""
        page = self.admin_site._registry.get(model)
        if page is None or not page.has_view_permission(request):
            return ""
        meta = model._meta
        url = reverse(f"{self.admin_site.name}:{meta.app_label}_{meta.model_name}_changelist")
        if alias != router.db_for_write(model):
            filters[PARAMETER] = alias
        return f"{url}?{urlencode(filters)}"
