"""The admin's pages of Celery: its results, the queues that programs have declared, and what a move has set aside."""

from . import aside, declared_queues, results

__all__ = ["aside", "declared_queues", "results"]
