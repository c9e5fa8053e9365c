"""The admin pages, one module each. ``register`` is called once every app's own ``admin.py`` has been imported.

An app that wants a page of its own for a queue subclasses ``queueapp.admin.queues.QueueAdmin``.
"""

from __future__ import annotations


def register() -> None:
    """Register the pages of queueapp, and of each queue that its app did not register itself."""
    from . import site

    site.register()
