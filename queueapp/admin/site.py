"""Which model gets which page, on Django's default admin site."""

from __future__ import annotations

from django.contrib import admin

from .. import registry
from ..models import DelayedMessage, PoisonMessage, QueueControl, Subscriber
from .delayed import DelayedAdmin
from .overview import OverviewAdmin
from .poison import PoisonAdmin
from .queues import QueueAdmin
from .subscribers import SubscriberAdmin


def register() -> None:
    """Register what is not registered yet; a user's own ModelAdmin wins, for a queue and for our own models alike."""
    pages = {
        QueueControl: OverviewAdmin,
        DelayedMessage: DelayedAdmin,
        PoisonMessage: PoisonAdmin,
        Subscriber: SubscriberAdmin,
        **dict.fromkeys(registry.queues, QueueAdmin),
    }
    for model, page in pages.items():
        if not model._meta.abstract and not admin.site.is_registered(model):
            admin.site.register(model, page)
