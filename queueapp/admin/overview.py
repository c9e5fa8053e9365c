"""The overview of all queues, and what is done to a whole queue: pause, resume, purge.

It stands in the admin's index as "Queues", as the list page of ``QueueControl``; there is no page per row, only the
history of who did what. Every button is a POST with a CSRF token and needs ``queueapp.operate_queue``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.timezone import localtime

from .. import registry
from ..errors import QueueNotFound
from ..models import DISPATCHER, DelayedMessage, PoisonMessage, QueueControl, Subscriber
from ..operating import control
from ..operating.statistics import in_words, span
from .figures import Figures, of_all_queues, of_queue
from .operations import ask
from .showing import display, untrusted

OPERATE = "queueapp.operate_queue"


class OverviewAdmin(admin.ModelAdmin):
    """All queues of this process on one page."""

    actions = None

    class Media:
        css = {"all": ["queueapp/admin.css"]}

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        views = {
            verb: self.admin_site.admin_view(partial(self.operate_view, verb=verb))
            for verb in ("pause", "resume", "purge")
        }
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
        """Pause, resume or purge one queue: by POST only; a purge asks first."""
        if not request.user.has_perm(OPERATE):
            raise PermissionDenied
        try:
            queue = registry.queues.find(label)
        except QueueNotFound:
            raise Http404(f"There is no queue {label}.") from None
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        if verb == "purge":
            if "confirmed" not in request.POST:
                return self._ask_before_purge(request, queue)
            self._purge(request, queue)
        elif verb == "pause":
            changed = control.pause(queue, by=request.user)
            self.message_user(request, f"Queue {label} {'is paused' if changed else 'was paused already'}.")
        else:
            changed = control.resume(queue, by=request.user)
            self.message_user(request, f"Queue {label} {'is running again' if changed else 'was not paused'}.")
        return HttpResponseRedirect(self._url("changelist"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """For the history page: a queue has one even when nothing was ever set for it."""
        try:
            return QueueControl(queue=registry.queues.find(object_id)._meta.label)
        except QueueNotFound:
            return None

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Who paused, resumed or purged a queue, and when."""
        return super().history_view(request, object_id, {"title": f"History of {object_id}", **(extra_context or {})})

    # -- inside ---------------------------------------------------------------------------------------------------

    def _line(self, request: HttpRequest, figures: Figures) -> dict[str, Any]:
        label = figures.label
        return {
            "figures": figures,
            "link": display.queue_link(label, figures.queue, self.admin_site, request),
            "state": self._state(figures),
            "oldest": display.duration(figures.oldest) if figures.oldest is not None else "",
            "notes": [untrusted.inline(text, 300) for text in self._notes(figures)],
            "delayed_url": self._list_of(request, DelayedMessage, destination=label),
            "poison_url": self._list_of(request, PoisonMessage, queue=label),
            "subscribers_url": self._list_of(request, Subscriber, queue=label),
            "history_url": self._url("history", label),
            "pause_url": self._url("resume" if figures.paused else "pause", label),
            "pause_text": "Resume" if figures.paused else "Pause",
            "purge_url": self._url("purge", label),
        }

    @staticmethod
    def _notes(figures: Figures) -> list[str]:
        of = figures.of
        left = [f"{one}; the oldest is {span(one.oldest_seconds)} old" for one in of.stranded]
        return [text for text in (of.error, of.note, *map(in_words, of.trouble), *left) if text]

    def _state(self, figures: Figures) -> SafeString:
        if figures.label == DISPATCHER:
            return self._state_of_dispatchers(figures)
        if figures.queue is None:
            return display.badge("bad", "no such queue")
        if figures.of.waiting is None:
            return display.badge("bad", "not readable")
        if figures.paused:
            by = figures.changed_by or "a script"
            since = f"since {localtime(figures.control.changed_at):%Y-%m-%d %H:%M:%S}" if figures.control else ""
            return display.badge("warn", f"paused by {by}", since)
        if figures.of.error:
            return display.badge("bad", "partly known")
        if figures.of.trouble:
            return display.badge("bad", "trouble")
        if not figures.subscribers:
            return display.badge("quiet", "no worker")
        return display.badge("good", "running")

    @staticmethod
    def _state_of_dispatchers(figures: Figures) -> SafeString:
        if figures.subscribers is None:
            return display.badge("bad", "not readable")
        if figures.of.trouble:
            return display.badge("bad", "trouble")
        return display.badge("good", "running") if figures.subscribers else display.badge("warn", "none alive")

    def _ask_before_purge(self, request: HttpRequest, queue: Any) -> HttpResponse:
        figures, label = of_queue(queue), queue._meta.label
        count = f"{figures.waiting} waiting message{'' if figures.waiting == '1' else 's'}"
        return ask(
            self,
            request,
            title=f"Purge {label} ({count})?",
            explanation="Every waiting message is deleted for good and will not be handled. Messages that are leased "
            "or just being received are left alone. Delayed and poison messages stay.",
            few=[],
            hidden=[],
            yes=f"Purge {label}",
            dangerous=True,
            post_to=self._url("purge", label),
            back_to=self._url("changelist"),
        )

    def _purge(self, request: HttpRequest, queue: Any) -> None:
        purged = control.purge(queue, by=request.user)
        text = f"{display.messages(purged.deleted)} of {queue._meta.label} deleted."
        if not purged.complete:
            text += f" Stopped after {control.PURGE_FOR.seconds} seconds; there are more: purge again for the rest."
        self.message_user(request, text, messages.SUCCESS if purged.complete else messages.WARNING)

    def _url(self, page: str, *args: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}", args=args)

    def _list_of(self, request: HttpRequest, model: Any, **filters: str) -> str:
        """The address of another list, filtered; '' when the user may not see it."""
        page = self.admin_site._registry.get(model)
        if page is None or not page.has_view_permission(request):
            return ""
        meta = model._meta
        url = reverse(f"{self.admin_site.name}:{meta.app_label}_{meta.model_name}_changelist")
        return f"{url}?{urlencode(filters)}"
