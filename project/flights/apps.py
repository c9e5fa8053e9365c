"""The demo app: real flights of 2013 become messages, consumers, a page."""

from django.apps import AppConfig


class FlightsConfig(AppConfig):
    """Configuration of the demo app; its label is what queues are addressed by: ``flights.FlightDelays``."""

    name = "project.flights"
    label = "flights"
    default_auto_field = "django.db.models.BigAutoField"
