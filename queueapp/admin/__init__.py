"""The admin pages, one module each. ``register`` is called after every app's own ``admin.py`` is imported.

An app that registers its own page for a queue subclasses ``queueapp.admin.queues.QueueAdmin``.
"""

from __future__ import annotations


def register() -> None:
    """Register the pages of queueapp, and a page for each queue that its app did not register itself."""
    from . import site

    site.register()
