"""The import form: one flight, as a user enters it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.core.validators import RegexValidator
from django.utils import timezone

from .figures import AIRPORTS, CARRIERS
from .messages import FlightDelayed

_FLYING_TIME = timedelta(minutes=90)


class Outcome:
    """What became of the flight; the last one shows how a message ends that no attempt can handle."""

    ARRIVED, CANCELLED, BROKEN = "arrived", "cancelled", "broken"
    CHOICES = (
        (ARRIVED, "departed late, arrived"),
        (CANCELLED, "cancelled"),
        (BROKEN, "departed late, no arrival time (a broken record)"),
    )


class ImportForm(forms.Form):
    """A flight that departed late or was cancelled."""

    carrier = forms.ChoiceField(choices=[(code, f"{code} {name}") for code, name in CARRIERS.items()], initial="UA")
    flight = forms.IntegerField(label="Flight number", min_value=1, max_value=9999, initial=1545)
    origin = forms.ChoiceField(label="From", choices=[(code, f"{code} {name}") for code, name in AIRPORTS.items()])
    destination = forms.CharField(
        label="To",
        max_length=3,
        initial="IAH",
        validators=[RegexValidator(r"^[A-Za-z]{3}$", "Three letters, for example IAH.")],
        widget=forms.TextInput(attrs={"autocapitalize": "characters", "autocomplete": "off"}),
    )
    scheduled_departure = forms.DateTimeField(
        label="Scheduled departure",
        initial=datetime(2013, 12, 31, 17, 15),  # noqa: DTZ001  the clock of the form, as it is typed in
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    outcome = forms.ChoiceField(choices=Outcome.CHOICES)
    minutes = forms.IntegerField(
        label="Minutes late", min_value=16, max_value=2880, initial=130, required=False, help_text="over 120: rebooked"
    )

    def clean_destination(self) -> str:
        destination: str = self.cleaned_data["destination"]
        return destination.upper()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("outcome") != Outcome.CANCELLED and cleaned.get("minutes") is None and "minutes" in cleaned:
            self.add_error("minutes", "A flight that departed late needs its minutes.")
        return cleaned

    def message(self) -> FlightDelayed:
        """The message of a valid form."""
        entered = self.cleaned_data
        scheduled: datetime = entered["scheduled_departure"]
        local = timezone.localtime(scheduled)
        cancelled = entered["outcome"] == Outcome.CANCELLED
        arrived = entered["outcome"] == Outcome.ARRIVED
        delay = None if cancelled else timedelta(minutes=entered["minutes"])
        arrival = local + _FLYING_TIME
        return FlightDelayed(
            carrier=entered["carrier"],
            flight=entered["flight"],
            origin=entered["origin"],
            destination=entered["destination"],
            day=local.date(),
            hour=local.hour,
            scheduled_departure=scheduled,
            departure=None if delay is None else scheduled + delay,
            scheduled_arrival=_minutes_of_day(arrival),
            arrival=_minutes_of_day(arrival + delay) if arrived and delay is not None else None,
            delay=None if cancelled else entered["minutes"],
            cancelled=cancelled,
            air_time=int(_FLYING_TIME.total_seconds()) // 60 if arrived else None,
            tail_number=None,
        )


def _minutes_of_day(moment: datetime) -> int:
    return moment.hour * 60 + moment.minute
