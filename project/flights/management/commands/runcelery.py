"""``manage.py runcelery``: Celery's worker for the site's maintenance, or the clock that sends it."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from project.celery import app


class Command(BaseCommand):
    """Run one of Celery's processes until it gets a signal."""

    help = "Run Celery's worker for the periodic maintenance of the site, or its clock (beat)."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("role", choices=("worker", "beat"))

    def handle(self, *args: Any, **options: Any) -> None:
        if options["role"] == "worker":
            app.worker_main(["worker", "--pool", "threads", "--concurrency", "1", "--loglevel", "WARNING"])
            return
        schedule = Path(settings.DATA_DIR) / "celerybeat-schedule"
        app.start(["beat", "--schedule", str(schedule), "--pidfile", "", "--loglevel", "WARNING"])
