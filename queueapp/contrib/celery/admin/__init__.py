"""The admin's pages of Celery: its results, the queues that programs have declared, and what a move has set aside."""

from . import declared_queues, pending_moves, results

__all__ = ["declared_queues", "pending_moves", "results"]
