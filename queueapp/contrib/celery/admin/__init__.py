"""Admin pages of Celery: results, declared queues and pending migrations."""

from . import declared_queues, pending_moves, results

__all__ = ["declared_queues", "pending_moves", "results"]
