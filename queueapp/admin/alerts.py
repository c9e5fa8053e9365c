"""The open alerts, which channels were notified when, the rules and the channels. The evaluation opens and resolves
alerts; an operator can silence them for some hours, and send a test by the channels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..alerts import channels, store
from ..alerts.conditions import AGE, CANARY, DEAD_WORKER, DEPTH, LEDGER, POISON, SWITCHES
from ..conf import settings
from ..models import Alert, Now, PoisonMessage, UtcField
from .databases import DatabaseFilter, OfDatabases
from .formatting import display, untrusted
from .operations import LOGGED_ONE_BY_ONE, Options, ask, log_entry
from .read_only import OperatedAdmin

KINDS = {
    POISON: "new poison",
    CANARY: "canary stopped",
    LEDGER: "ledger difference",
    DEAD_WORKER: "dead worker",
    AGE: "oldest message",
    DEPTH: "queue depth",
}


class Silence(Options):
    """For how long the channels are not notified."""

    hours = forms.FloatField(min_value=0.1, max_value=store.MAX_SILENCE / timedelta(hours=1), initial=4)


class KindFilter(admin.SimpleListFilter):
    title = "kind"
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(KINDS.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(kind=self.value()) if self.value() else queryset


class AlertAdmin(OperatedAdmin, OfDatabases):
    """One row per alert that is open, or whose end was not notified yet."""

    actions = ("silence", "end_silence")
    change_list_template = "admin/queueapp/alerts.html"
    show_facets = admin.ShowFacets.NEVER
    list_display = ("alert_text", "state", "open_since", "notified", "subject")
    list_display_links = None
    list_filter = (DatabaseFilter, KindFilter)
    ordering = ("-since", "key")

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer."""
        return lookup in {DatabaseFilter.parameter_name, KindFilter.parameter_name}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Alerts", **(extra_context or {})}
        context |= {"rules": rules(), "channels": _channels(), "may_operate": self.has_operate_permission(request)}
        context["test_url"] = reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_test")
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_test"
        return [path("test/", self.admin_site.admin_view(self.test_view), name=name), *super().get_urls()]

    # -- operations -----------------------------------------------------------------------------------------------

    def test_view(self, request: HttpRequest) -> HttpResponse:
        """Send a test alert by each channel. POST only."""
        if not self.has_operate_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        for channel, error in channels.send_test().items():
            text = f"{channel}: {untrusted.visible(error)[:300] if error else 'a test alert was sent'}."
            self.message_user(request, text, messages.ERROR if error else messages.SUCCESS)
        return HttpResponseRedirect(self.list_url())

    @admin.action(description="Silence", permissions=["operate"])
    def silence(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Notify no channel of these alerts for some hours, after confirmation."""
        rows = list(queryset)
        form = Silence(request.POST) if "confirmed" in request.POST else Silence()
        if not rows:
            self.message_user(request, "Nothing was changed: these alerts are over.", messages.WARNING)
            return None
        if not form.is_valid():
            return ask(
                self, request, title=f"Silence {display.counted(len(rows), 'alert', 'alerts')}?",
                explanation="No channel is notified of them for this time, neither when they end nor when they begin "
                "again. One that is open when it is over, and was not notified before, is notified then.",
                few=[untrusted.inline(row.text, 200) for row in rows],
                hidden=[("action", "silence"), *((ACTION_CHECKBOX_NAME, row.pk) for row in rows)],
                form=form, yes="Silence", post_to=request.get_full_path(), back_to=self.list_url(queryset.db),
            )  # fmt: skip
        hours = form.cleaned_data["hours"]
        self._set_silence(request, rows, timedelta(hours=hours), f"Silenced for {hours:g} hours.")
        return None

    @admin.action(description="End the silence", permissions=["operate"])
    def end_silence(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Notify the channels of these alerts again."""
        self._set_silence(request, list(queryset), None, "Silence ended.")

    def _set_silence(self, request: HttpRequest, rows: list[Alert], period: timedelta | None, text: str) -> None:
        by, alias = request.user.get_username(), self.database(request)
        changed = store.silence(alias, [row.key for row in rows], period, by=by)
        for row in rows[:LOGGED_ONE_BY_ONE]:
            log_entry(self, request, text, about=untrusted.visible(row.text)[:200]).save()
        self.message_user(request, f"{display.counted(changed, 'alert', 'alerts')}: {text}", messages.SUCCESS)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """There is no page per alert."""
        raise PermissionDenied

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """There are no operations on alerts."""
        raise PermissionDenied

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """A deleted alert would be opened and notified again."""
        raise PermissionDenied

    # -- columns --------------------------------------------------------------------------------------------------

    @admin.display(description="alert", ordering="text")
    def alert_text(self, row: Alert) -> SafeString:
        return untrusted.inline(row.text, 500)

    @admin.display(description="state", ordering="resolved_at")
    def state(self, row: Any) -> SafeString:
        kind = KINDS.get(row.kind, "")
        if row.silenced_until is not None and row.silenced_until > row.db_now:
            silence = format_html(
                "until {} by {}", display.moment(row.silenced_until), untrusted.inline(row.silenced_by)
            )
            tone: display.Tone = "quiet"
            return display.below(display.badge(tone, "silenced"), kind, silence)
        if row.resolved_at is not None:
            return display.below(display.badge("good", "resolved"), kind, display.moment(row.resolved_at))
        return display.below(display.badge("bad", "open"), kind)

    @admin.display(description="since", ordering="since")
    def open_since(self, row: Any) -> Any:
        return display.ago(row.since, row.db_now)

    @admin.display(description="notified", ordering="notified_at")
    def notified(self, row: Any) -> SafeString | str:
        """The channels that were notified, and those that are pending."""
        pending = row.pending_channels.split(",") if row.pending_channels else []
        when = display.ago(row.notified_at, row.db_now) if row.notified_at is not None else "not yet"
        by = (
            ", ".join(name for name in channels.configured() if name not in pending)
            if row.notified_at is not None
            else ""
        )
        of = "that it is resolved" if row.resolved_at is not None and not pending else by and f"by {by}"
        if not pending:
            return display.below(when, of)
        tries = "" if not row.tries else f", {display.counted(row.tries, 'try', 'tries')}"
        missing = f"pending: {', '.join(pending)}{tries}"
        then = f"next try in {display.duration(row.next_try - row.db_now)}" if row.next_try > row.db_now else ""
        return display.below(when, of, untrusted.inline(missing, 200), then)

    @admin.display(description="subject", ordering="name")
    def subject(self, row: Alert) -> SafeString | str:
        """The poison group, the process, or the queue that the alert is about."""
        if row.kind in (POISON, CANARY):
            page: Any = self.admin_site._registry.get(PoisonMessage)
            short = untrusted.inline(row.name, 12)
            if page is None:
                return short
            return format_html('<a href="{}">{}</a>', page.list_url(row._state.db, group=row.name), short)
        return display.below(untrusted.inline(row.queue, 200), untrusted.inline(row.name, 255) if row.name else "")


def rules() -> list[tuple[str, str]]:
    """The rules of ``QUEUEAPP["ALERTS"]``, each with its bound in words."""
    given = settings.ALERTS
    if not given:
        return []
    found = [(KINDS[kind], "on" if given.get(kind, True) else "off") for kind in SWITCHES]
    for kind, name in ((AGE, "max_age"), (DEPTH, "max_waiting")):
        bound = given.get(name)
        bounds = bound.items() if isinstance(bound, dict) else [("*", bound)] if bound is not None else []
        found += [
            (f"{KINDS[kind]}, {'each queue' if queue == '*' else queue}", _bound(value)) for queue, value in bounds
        ]
    return found


def _bound(value: Any) -> str:
    return f"more than {display.in_full(value) if isinstance(value, timedelta) else f'{value:,}'}"


def _channels() -> list[tuple[str, str]]:
    """The channels. The address of a webhook is often a secret."""
    shown = {"signal": "receivers of queueapp.signals.alerted", "webhook": "POST to the address in the settings"}
    mail = ", ".join(settings.ALERTS.get("mail") or ())
    return [(name, shown.get(name, mail)) for name in channels.configured()]
