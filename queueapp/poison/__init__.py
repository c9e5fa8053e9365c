"""Poison messages: what is written down of a failure, and what can be done with the messages that failed for good."""

from .editing import edit_and_requeue
from .keeping import archive, drop_old, find, restore
from .requeueing import BATCH, requeue

__all__ = ["BATCH", "archive", "drop_old", "edit_and_requeue", "find", "requeue", "restore"]
