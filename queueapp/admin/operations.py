"""Operations on messages: one description per operation, and one code path that carries all of them out.

    button or action menu --POST--> confirm page (what, how many, options) --POST--> batch --> log entry --> message
                                                         or, above IN_REQUEST, --POST--> log entry --> background

An operation works on keys and not on objects in memory. "Select all" of more than ``IN_REQUEST`` messages becomes an
operation that maintenance carries out (``operations.bulk_operations``). The permission is checked when the menu is
built and again when the operation starts. It may skip rows (leased, gone, locked); the answer reports how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import django
from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, connections
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext

from ..errors import QueueError
from ..models import BulkOperation
from ..operations import bulk_operations
from ..operations.selections import Source
from ..signals import log as operations_log
from ..sql import nonblocking
from .formatting import display
from .formatting.untrusted import visible
from .large_tables import search
from .large_tables.lists import capped_count

#: So many messages are done in the request. "Select all" of more is carried out in the background.
IN_REQUEST = 200
#: Rows per transaction of a request, and the time within which it answers; if there are more rows, the answer says so.
#: It does more than ``IN_REQUEST`` only for a filter or a search that the background does not know.
BATCH = 1000
TIME = timedelta(seconds=20)
#: Messages named on the confirm page; the others are counted.
SHOWN = 10
#: Up to so many messages get a log entry each, which their history page shows; more get one together.
LOGGED_ONE_BY_ONE = 100


class Options(forms.Form):
    """The options of the confirm page; subclasses add fields."""


class Rate(forms.Form):
    """The field that the confirm page of a background operation has beside its options."""

    rate = forms.FloatField(
        required=False,
        min_value=0.01,
        max_value=bulk_operations.MAX_RATE,
        label="Messages a second",
        help_text="Empty: as fast as it can.",
    )


@dataclass(frozen=True)
class Operation:
    """One operation, as the menu, the buttons, the confirm page and the log need it."""

    name: str
    label: str  #: "Release lease"
    done: str  #: "released", in "3 messages released."
    explanation: str  #: the effect, for the confirm page
    skipped: str  #: why a row may have been skipped
    permission: str  #: ``page.has_<permission>_permission``
    run: bulk_operations.Run
    flag: int = CHANGE
    options: type[Options] = Options
    dangerous: bool = False
    #: The question with "{}" for "12 messages", where these do not follow the label.
    question: str = ""
    #: The button of the confirm page; "": the label.
    answer: str = ""
    #: Whether a message's own page offers it.
    offered: Callable[[Any], bool] = lambda message: True

    def allowed(self, page: Any, request: HttpRequest) -> bool:
        """Whether this user may do it."""
        return bool(getattr(page, f"has_{self.permission}_permission")(request))

    def as_action(self) -> Callable[[Any, HttpRequest, QuerySet[Any]], HttpResponse | None]:
        """The operation as an action of a Django change list."""

        def action(page: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
            return _perform(self, page, request, queryset)

        action.__name__ = self.name
        action.short_description = self.label  # type: ignore[attr-defined]
        action.allowed_permissions = (self.permission,)  # type: ignore[attr-defined]
        return action


def actions(*operations: Operation) -> list[Any]:
    """``ModelAdmin.actions`` of these operations."""
    return [operation.as_action() for operation in operations]


# -- carrying out --------------------------------------------------------------------------------------------------


def _perform(op: Operation, page: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
    if not op.allowed(page, request):
        raise PermissionDenied
    across = request.POST.get("select_across") == "1"
    # Rows that another operator has handled since the list was shown are not in the query any more.
    chosen = len(set(request.POST.getlist(ACTION_CHECKBOX_NAME)))
    up_to = _whole_number(request.POST.get("up_to"))
    confirmed = "confirmed" in request.POST and (up_to is not None or not across)
    if across:
        # Messages that arrive after the page was shown are not confirmed.
        up_to = up_to if confirmed else _newest(queryset)
        queryset = queryset.filter(pk__lte=up_to) if up_to is not None else queryset.none()
    if not across and not queryset.exists():
        _report(op, page, request, chosen, Done(0))
        return None
    asked = capped_count(queryset) if across else chosen
    filters = _background_filters(op, page, request, queryset.db) if across and asked > IN_REQUEST else None
    options = op.options if filters is None else type("Background", (op.options, Rate), {})
    form = options(request.POST) if confirmed else options()
    if not confirmed or not form.is_valid():
        return confirm_page(
            op, page, request, queryset, post_to=request.get_full_path(), form=form, across=across, up_to=up_to,
            in_background=filters is not None,
        )  # fmt: skip
    source = Source(page.model, queryset.db)
    if filters is not None:
        return _start(op, page, request, source, filters, form.cleaned_data, up_to)
    selected = [] if across else list(queryset.order_by("pk")[: LOGGED_ONE_BY_ONE + 1])
    done = _in_batches(op, source, queryset, form.cleaned_data, request.user.get_username())
    for text, count in Counter(done.errors).most_common(SHOWN):
        page.message_user(request, f"{display.messages(count)} not {op.done}: {visible(text)[:300]}", messages.ERROR)
    _log(op, page, request, selected, done.changed, form.cleaned_data)
    _report(op, page, request, asked, done)
    return None


def _background_filters(op: Operation, page: Any, request: HttpRequest, alias: str) -> dict[str, str] | None:
    """The filters of the list, for an operation in the background; None: it knows not all of them, or not the
    operation."""
    filters = page.filters_of(request)
    can_start = filters is not None and bulk_operations.can_start(Source(page.model, alias), op.name, filters)
    return filters if can_start else None


def _start(
    op: Operation,
    page: Any,
    request: HttpRequest,
    source: Source,
    filters: dict[str, str],
    options: dict[str, Any],
    up_to: int | None,
) -> HttpResponse:
    rate = options.pop("rate")
    started = bulk_operations.start(source, op.name, filters, options, last=up_to, rate=rate, by=request.user)
    limit = {} if rate is None else {"rate": rate}
    chosen = "".join(f", {name}: {value}" for name, value in {**options, **limit}.items() if value not in ("", None))
    matching = visible(unquote_plus(request.GET.urlencode())) or "no filter"
    text = f"{op.label}{chosen}: started {started} on all that matched {matching}"
    log_entry(page, request, text[:4000], about=str(started), flag=op.flag).save()
    return to_operation(page, request, started)


def to_operation(page: Any, request: HttpRequest, started: BulkOperation) -> HttpResponse:
    """A redirect to the page of an operation that was just started."""
    page.message_user(request, f"{str(started).capitalize()} has started.", messages.SUCCESS)
    of_operations = page.admin_site._registry.get(BulkOperation)
    address = of_operations.url_of(started) if of_operations is not None else request.get_full_path()
    return HttpResponseRedirect(address)


def is_gone(page: Any, request: HttpRequest, queryset: QuerySet[Any]) -> bool:
    """Whether all selected rows are gone, because another operator was first; the user gets a message."""
    if queryset.exists():
        return False
    text = "Nothing was changed: the selected rows are gone. Another operator has handled them."
    page.message_user(request, text, messages.WARNING)
    return True


class Done(NamedTuple):
    """The result: rows changed, why the operation stopped early ('': it did not), and the errors of messages."""

    changed: int
    stopped: str = ""
    errors: tuple[str, ...] = ()


def _in_batches(op: Operation, source: Source, queryset: QuerySet[Any], options: dict[str, Any], by: str) -> Done:
    keys_in_order = queryset.order_by("pk").values_list("pk", flat=True)
    end = monotonic() + TIME.total_seconds()
    changed, last = 0, None
    errors: list[str] = []
    while True:
        rest = keys_in_order if last is None else keys_in_order.filter(pk__gt=last)
        keys = list(rest[:BATCH])
        if not keys:
            return Done(changed, errors=tuple(errors))
        if last is not None and monotonic() > end:
            return Done(
                changed,
                f"Stopped after {TIME.seconds} seconds; there are more messages: repeat the operation for the rest.",
            )
        try:
            result = op.run(source, keys, options, by)
        except QueueError as error:
            return Done(changed, f"Refused: {visible(str(error))[:300]}")
        except DatabaseError as error:
            if connections[queryset.db].in_atomic_block:
                raise
            # The batches before this one are committed: the log and the user need to know.
            operations_log.exception("An admin operation stopped after %s.", display.messages(changed))
            return Done(
                changed, f"Stopped by the database ({type(error).__name__}): repeat the operation for the rest."
            )
        changed += result.changed
        errors += result.errors.values()
        last = keys[-1]


def confirm_page(
    op: Operation,
    page: Any,
    request: HttpRequest,
    queryset: QuerySet[Any],
    *,
    post_to: str,
    form: Options | None = None,
    across: bool = False,
    up_to: int | None = None,
    in_background: bool = False,
) -> HttpResponse:
    """The page that shows the operation and the number of messages, and asks for confirmation. Changes nothing."""
    count = capped_count(queryset)
    few = list(queryset.order_by("pk")[:SHOWN])
    # Django requires a selected row even for "select all".
    keys = [row.pk for row in few[:1]] if across else queryset.order_by("pk").values_list("pk", flat=True)
    hidden = [("action", op.name), *((ACTION_CHECKBOX_NAME, key) for key in keys)]
    if across:
        hidden += [("select_across", "1"), ("up_to", up_to)]
    return ask(
        page,
        request,
        title=f"{op.question or op.label + ' {}'}?".format(display.messages(count, search.COUNTED)),
        explanation=op.explanation,
        in_background=in_background,
        filters=visible(unquote_plus(request.GET.urlencode())) if across else None,
        few=[page.describe(row) for row in few],
        more=display.at_least(count - len(few), search.COUNTED - len(few)) if count > len(few) else "",
        form=form or op.options(),
        hidden=hidden,
        yes=op.answer or op.label,
        dangerous=op.dangerous,
        post_to=post_to,
        back_to=page.list_url(queryset.db),
    )


def breadcrumbs(page: Any, *last: tuple[Any, Any]) -> dict[str, Any]:
    """The context of the breadcrumbs: from the index to the list of the page, then ``last`` as (URL, text). The present
    page has no URL."""
    site, meta = page.admin_site.name, page.opts
    section, pages = meta.app_config.verbose_name, capfirst(meta.verbose_name_plural)
    first = [
        (reverse(f"{site}:index"), gettext("Home")),
        (reverse(f"{site}:app_list", args=(meta.app_label,)), section),
        (reverse(f"{site}:{meta.app_label}_{meta.model_name}_changelist"), pages),
    ]
    if section == pages:  # the overview
        del first[1]
    return {"breadcrumbs": [*first, *last], "breadcrumb_list": django.VERSION >= (6, 1)}


def render_page(page: Any, request: HttpRequest, template: str, title: str, context: dict[str, Any]) -> HttpResponse:
    """A page with this title below the list of ``page``."""
    about = {"title": title, **breadcrumbs(page, ("", title)), "opts": page.opts, "media": page.media}
    request.current_app = page.admin_site.name  # type: ignore[attr-defined]
    return TemplateResponse(request, template, {**page.admin_site.each_context(request), **about, **context})


def ask(page: Any, request: HttpRequest, *, title: str, **question: Any) -> HttpResponse:
    """Render the confirm page with ``question`` as context. The answer is a POST of ``confirmed`` to ``post_to``."""
    return render_page(page, request, "admin/queueapp/confirm.html", title, question)


def _report(op: Operation, page: Any, request: HttpRequest, asked: int, done: Done) -> None:
    text = f"{display.messages(done.changed)} {op.done}."
    if done.stopped:
        text += f" {done.stopped}"
    elif done.changed < asked <= search.COUNTED:
        text += f" {display.messages(asked - done.changed)} skipped: {op.skipped}."
    complete = not done.stopped and done.changed >= min(asked, search.COUNTED)
    page.message_user(request, text, messages.SUCCESS if complete else messages.WARNING)


def _log(
    op: Operation, page: Any, request: HttpRequest, selected: list[Any], changed: int, options: dict[str, Any]
) -> None:
    if not changed:
        return
    chosen = "".join(f", {name}: {value}" for name, value in options.items() if value not in ("", None))
    if changed == len(selected) <= LOGGED_ONE_BY_ONE:
        LogEntry.objects.bulk_create(
            log_entry(page, request, f"{op.label}{chosen}.", row=row, flag=op.flag) for row in selected
        )
        return
    if selected:
        which = f"of {', '.join(page.key_of(row) for row in selected)}"
    else:
        which = f"of all that matched {visible(unquote_plus(request.GET.urlencode())) or 'no filter'}"
    text = f"{op.label}{chosen}: {display.messages(changed)} {which}"
    log_entry(page, request, text[:4000], about=display.messages(changed), flag=op.flag).save()


def log_entry(
    page: Any, request: HttpRequest, text: str, *, row: Any = None, about: str = "", flag: int = CHANGE
) -> LogEntry:
    """An unsaved entry for the admin's log, for one row or about ``about``."""
    user: Any = request.user
    return LogEntry(
        user_id=user.pk,
        content_type=ContentType.objects.get_for_model(page.model, for_concrete_model=False),
        object_id=None if row is None else page.key_of(row),
        object_repr=about if row is None else visible(str(row))[:200],
        action_flag=flag,
        change_message=text,
    )


def _newest(queryset: QuerySet[Any]) -> Any:
    # The end of the primary key, without the filter: a single index look-up.
    newest = nonblocking(queryset.model._base_manager.using(queryset.db)).order_by("-pk").values_list("pk", flat=True)
    return newest.first()


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and is_key(text) else None


def is_key(text: str) -> bool:
    """Whether this can be the number of a message."""
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63
