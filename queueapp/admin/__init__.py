"""The admin pages, one module each. ``register`` is called once every app's own ``admin.py`` has been imported."""

from __future__ import annotations


def register() -> None:
    """Register the pages of queueapp, and of each queue that its app did not register itself."""
    from . import site

    site.register()
