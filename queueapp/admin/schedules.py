"""The schedules: when each runs next, how its last run went, and pause, resume and run.

A schedule that is declared in code is read-only here, except that it can be paused. Others are added, changed and
deleted by Django's forms. A change is written column by column under the lock of the row, because the dispatcher may
run the schedule between the form and its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.safestring import SafeString

from .. import registry
from ..errors import InvalidOption, QueueError
from ..models import Now, Schedule, UtcField
from ..schedules import declarations, stored
from ..schedules.timing import OPTIONS, next_times
from .databases import DatabaseFilter, OfDatabases
from .features import in_use
from .formatting import display, untrusted
from .operations import log_entry
from .read_only import OPERATE

#: Columns that a form changes.
EDITED = (
    "tags", "cron", "every", "at", "timezone", "start", "end", "jitter", "misfire", "misfire_limit", "misfire_grace",
    "headers", "body", "options",
)  # fmt: skip
#: Columns that the next run follows from.
TIMES = {"cron", "every", "at", "timezone", "start", "end", "jitter"}
#: Those that are points in time.
MOMENTS = ("at", "start", "end")
NEXT_RUNS = 10


class ScheduleForm(forms.ModelForm):
    """A schedule that is made here: when it runs, and the message that it sends."""

    queue = forms.ChoiceField(choices=lambda: [(queue._meta.label, queue._meta.label) for queue in registry.queues])

    class Meta:
        model = Schedule
        fields = ("name", "queue", *EDITED)
        widgets = {
            name: forms.Textarea(attrs={"rows": rows, "cols": 80, "spellcheck": "false", "dir": "ltr"})
            for name, rows in (("headers", 3), ("body", 6), ("options", 3))
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not settings.USE_TZ:  # the fields show a time as it is: in UTC, and read it as one of TIME_ZONE
            for name in MOMENTS:
                if isinstance(moment := self.initial.get(name), datetime) and timezone.is_aware(moment):
                    self.initial[name] = timezone.make_naive(moment)
        # A time has two inputs, and Django labels the pair.
        for name, field in self.fields.items():
            for widget, part in zip(getattr(field.widget, "widgets", ()), ("date", "time"), strict=False):
                widget.attrs["aria-label"] = f"{field.label or name}: {part}"

    def clean_name(self) -> str:
        """A name that commands and pages can address."""
        try:
            return declarations.checked_name(self.cleaned_data["name"])
        except InvalidOption as error:
            raise forms.ValidationError(untrusted.visible(str(error))) from error

    def clean(self) -> dict[str, Any]:
        """The whole is what can run: the times, and a message that ``send`` accepts."""
        data = super().clean() or self.cleaned_data
        if self.errors:
            return data
        for name in MOMENTS:
            if (moment := data.get(name)) is not None and timezone.is_naive(moment):
                data[name] = timezone.make_aware(moment)
        row = Schedule(**{name: data.get(name, getattr(self.instance, name)) for name in ("name", "queue", *EDITED)})
        try:
            for option in OPTIONS:
                option.read(data.get(option.name), "")
            stored.timing_of(row)
            stored.refuse_bad_message(row)
        except QueueError as error:
            raise forms.ValidationError(untrusted.visible(str(error))) from error
        return data


class ScheduleAdmin(OfDatabases):
    """One row per schedule."""

    form = ScheduleForm
    show_facets = admin.ShowFacets.NEVER
    change_form_template = "admin/queueapp/read_only.html"
    change_list_template = "admin/queueapp/list.html"
    object_history_template = "admin/queueapp/history.html"
    list_display = ("schedule_name", "when", "state", "next_run", "last_run", "sent")
    list_filter = (DatabaseFilter, ("queue", admin.AllValuesFieldListFilter), "paused")
    search_fields = ("name", "tags")
    ordering = ("name",)
    actions = ("pause", "resume", "run_now")
    fieldsets = (
        (None, {"fields": ("name", "queue", "tags")}),
        ("When", {"fields": ("cron", "timezone", "every", "at", "start", "end", "jitter")}),
        ("When it is late", {"fields": ("misfire", "misfire_limit", "misfire_grace")}),
        ("Message", {"fields": ("body", "headers", "options")}),
        ("Runs", {"fields": ("state_in_full", "next_runs", "last_run", "runs")}),
    )
    readonly_fields = ("state_in_full", "next_runs", "last_run", "runs")

    class Media:
        css = {"all": ["queueapp/admin.css"]}

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whether the index shows the page."""
        return in_use(Schedule) and self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Pausing, resuming and running."""
        return request.user.has_perm(OPERATE)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """What is declared in code, and a task, is changed there."""
        return (obj is None or not (obj.declared or obj.task)) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """The dispatcher would write what is declared again."""
        return (obj is None or not obj.declared) and super().has_delete_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """The key and the queue stay, since a row is in the database of its queue."""
        return self.readonly_fields if obj is None else ("name", "queue", *self.readonly_fields)

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        return self.get_queryset(request).using(alias).filter(pk=primary).first()

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer."""
        return lookup in {DatabaseFilter.parameter_name, "queue", "queue__isnull", "paused__exact"}

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Schedules", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Write the columns of the form, and the next run where its times have changed."""
        if not change:
            alias = router.db_for_write(registry.queues.find(obj.queue))
            stored.plan(obj, alias)
            obj.save(using=alias, force_insert=True)
            stored.changed(alias)
            return
        alias = obj._state.db or "default"
        with transaction.atomic(using=alias):
            row = Schedule.objects.using(alias).select_for_update().filter(pk=obj.pk, declared="").first()
            if row is None:
                raise PermissionDenied
            edited = set(form.changed_data).intersection(EDITED)
            for name in edited:
                setattr(row, name, getattr(obj, name))
            row.failures, row.error = 0, ""
            if edited & TIMES:
                stored.plan(row, alias)
            row.save(using=alias, update_fields=[*edited, "failures", "error", "next_at", "due_at"])
        stored.changed(alias)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        queryset.filter(declared="").delete()

    # -- columns --------------------------------------------------------------------------------------------------

    @admin.display(description="schedule", ordering="name")
    def schedule_name(self, row: Schedule) -> SafeString:
        target = untrusted.inline(row.task or row.queue, 200)
        return display.below(
            untrusted.inline(row.name, 200), target, untrusted.inline(row.tags, 100) if row.tags else ""
        )

    @admin.display(description="when")
    def when(self, row: Schedule) -> SafeString | str:
        if row.cron:
            return display.below(untrusted.inline(row.cron, 200), untrusted.inline(row.timezone, 64))
        return f"every {display.in_full(row.every)}" if row.every is not None else "once"

    @admin.display(description="state")
    def state(self, row: Any) -> SafeString:
        source = "declared in code" if row.declared else "made in the admin"
        if row.paused:
            return display.below(display.badge("quiet", "paused"), source)
        if row.failures:
            return display.below(display.badge("bad", "fails"), source, untrusted.inline(row.error, 200))
        if row.due_at is None:
            return display.below(display.badge("quiet", "over"), source)
        late = row.db_now - row.due_at > row.misfire_grace
        return display.below(display.badge("bad", "late") if late else display.badge("good", "active"), source)

    @admin.display(description="next run", ordering="due_at")
    def next_run(self, row: Any) -> Any:
        return display.NOTHING if row.paused else display.ago(row.due_at, row.db_now)

    @admin.display(description="last run", ordering="last_sent_at")
    def last_run(self, row: Any) -> Any:
        return display.ago(row.last_sent_at, row.db_now) if row.pk else display.NOTHING

    @admin.display(description="messages sent", ordering="runs")
    def sent(self, row: Schedule) -> str:
        return f"{row.runs:,}"

    @admin.display(description="state")
    def state_in_full(self, row: Any) -> Any:
        if not row.pk:
            return display.NOTHING
        problem = stored.problem_of(row)
        return display.below(self.state(row), untrusted.inline(problem, 500) if problem else "")

    @admin.display(description="next runs")
    def next_runs(self, row: Any) -> Any:
        """The next ten times, without jitter, in the time zone of the site."""
        if not row.pk or row.next_at is None:
            return display.NOTHING
        try:
            times = [row.next_at, *next_times(stored.timing_of(row), row.next_at, NEXT_RUNS - 1)]
        except InvalidOption as error:
            return untrusted.inline(str(error), 500)
        return display.below(*map(display.moment, times))

    # -- operations -----------------------------------------------------------------------------------------------

    @admin.action(description="Pause", permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Pause these schedules."""
        self._for_each(request, queryset, "paused", lambda alias, name: stored.pause(alias, [name]))

    @admin.action(description="Resume", permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Resume these schedules."""
        self._for_each(request, queryset, "resumed", lambda alias, name: stored.resume(alias, [name]))

    @admin.action(description="Run now", permissions=["operate"])
    def run_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Send one message of each of these schedules."""
        self._for_each(request, queryset, "run", lambda alias, name: int(stored.run_now(alias, name) is not None))

    def _for_each(
        self, request: HttpRequest, queryset: QuerySet[Any], done: str, operation: Callable[[str, str], int]
    ) -> None:
        changed = 0
        for row in queryset:
            try:
                count = operation(queryset.db, row.name)
            except QueueError as error:
                self.message_user(request, f"{self.named_row(row)}: {untrusted.visible(str(error))}", messages.ERROR)
                continue
            if count:
                changed += count
                log_entry(self, request, f"Schedule {done}.", row=row, flag=CHANGE).save()
        text = f"{display.counted(changed, 'schedule', 'schedules')} {done}."
        self.message_user(request, text, messages.SUCCESS if changed else messages.WARNING)
