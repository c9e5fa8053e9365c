"""The page with the live result, what it polls, and the import: a row and a message in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from project.flights import charts, figures
from project.flights.forms import ImportForm
from project.flights.models import FlightDelays, Import

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

View = Callable[[HttpRequest], HttpResponse]


def _strict(view: View) -> View:
    """Send a Content-Security-Policy: the page needs nothing inline and nothing from elsewhere."""

    @wraps(view)
    def with_policy(request: HttpRequest) -> HttpResponse:
        response = view(request)
        response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
        return response

    return with_policy


@require_safe
@never_cache
@_strict
def page(request: HttpRequest) -> HttpResponse:
    """The live result and the import form."""
    return _page(request, ImportForm())


@require_safe
@never_cache
def live(request: HttpRequest) -> HttpResponse:
    """The numbers of the page as JSON, and what the page shows of them: it is drawn in one place, by the templates."""
    tiles, drawn = _tiles(), _charts()
    html = {"tiles": render_to_string("flights/_tiles.html", {"tiles": tiles})}
    for name, chart in drawn.items():
        html[name] = render_to_string(chart.template, {"chart": chart})
        html[f"{name}-rows"] = render_to_string("flights/_rows.html", {"chart": chart})
    return JsonResponse(
        {
            "at": timezone.now().isoformat(),
            "numbers": {tile.key: tile.value for tile in tiles},
            "figures": {name: [asdict(figure) for figure in chart.figures] for name, chart in drawn.items()},
            "html": html,
        }
    )


@require_POST
@_strict
def import_flight(request: HttpRequest) -> HttpResponse:
    """Save an import and send its message: both are committed, or neither is."""
    form = ImportForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    message = form.message()
    with transaction.atomic():
        message_id = FlightDelays.send(message)
        Import.objects.create(note=message.key, message_id=message_id)
    messages.success(request, f"{message.key} was saved and its message sent ({message_id}).")
    return redirect("flights:page")


@dataclass(frozen=True, slots=True)
class Tile:
    """One number on top of the page; ``link`` leads to the page of the admin that shows what is counted."""

    key: str
    label: str
    value: int
    hint: str
    link: str = ""
    is_alarming: bool = False

    @property
    def text(self) -> str:
        return f"{self.value:,}" + ("+" if self.value == figures.COUNT_LIMIT else "")


def _page(request: HttpRequest, form: ImportForm, status: int = 200) -> HttpResponse:
    return render(request, "flights/page.html", {"tiles": _tiles(), **_charts(), "form": form}, status=status)


def _tiles() -> list[Tile]:
    backlog = figures.backlog()
    waiting = backlog.waiting + backlog.rebookings_waiting
    return [
        Tile("waiting", "Waiting", waiting, "messages in the queues", _admin("flights_flightdelays")),
        Tile("handled", "Handled", figures.handled_flights(), "flights counted, exactly once"),
        Tile("delayed", "Delayed", backlog.delayed, "messages not due yet", _admin("queueapp_delayedmessage")),
        Tile("rebooked", "Rebooked", figures.rebooked_flights(), "flights over two hours late"),
        Tile("poison", "Poison", backlog.poison, "messages that failed their last attempt",
             _admin("queueapp_poisonmessage"), backlog.poison > 0),
        Tile("workers", "Workers", backlog.workers, "processes alive", "", backlog.workers == 0 and waiting > 0),
    ]  # fmt: skip


def _admin(model: str) -> str:
    return reverse(f"admin:{model}_changelist")


def _charts() -> dict[str, charts.Chart]:
    return {
        "hours": charts.columns(figures.per_hour()),
        "carriers": charts.bars(figures.per_carrier()),
        "airports": charts.bars(figures.per_airport()),
    }
