"""``manage.py resumequeue``: undo ``pausequeue``."""

from __future__ import annotations

from ...operations import control
from .pausequeue import Command as PauseCommand


class Command(PauseCommand):
    """Resume queues."""

    help = "Resume paused queues. Workers receive from them within one peek delay."
    change = staticmethod(control.resume)
    done, already = "resumed", "was not paused"
