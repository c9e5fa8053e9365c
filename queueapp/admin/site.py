"""Which model gets which page."""

from __future__ import annotations

from django.contrib import admin

from .. import registry


def register() -> None:
    """Register what is not registered yet; a user's own ModelAdmin for a queue wins."""
    for queue in registry.queues:
        if not queue._meta.abstract and not admin.site.is_registered(queue):
            admin.site.register(queue)
