"""``manage.py resumequeue``: the reverse of ``pausequeue``."""

from __future__ import annotations

from ...operations import control
from .pausequeue import Command as PauseCommand


class Command(PauseCommand):
    """Resume queues."""

    help = "Resume queues that were paused. Seen by the workers within one peek delay."
    change = staticmethod(control.resume)
    done, already = "resumed", "was not paused"
