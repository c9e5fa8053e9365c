"""``manage.py demo``: the main job on real input, from the source file to the checked figures."""

from __future__ import annotations

import json
import logging
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from project.flights import source, spark_job
from project.flights.demo import maintenance, reset, workers
from project.flights.demo.progress import Progress
from project.flights.demo.results import Results
from project.flights.producer import publish_flights_without_spark
from project.flights.publication import Published
from project.java import MINIMUM_VERSION, find_java
from workers.spark.session import SparkDidNotStart

_INTERRUPTED = 130


class Command(BaseCommand):
    """Run the demo."""

    help = (
        "Publish the late and cancelled flights of 2013 through Spark, handle them with workers, and check the result "
        "against the source file. Starts from its own clean state. Exit code 1 when the check fails."
    )
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--no-spark", action="store_true", help="Publish without Spark.")
        parser.add_argument("--json", action="store_true", help="Print the result as one JSON object.")
        parser.add_argument(
            "--limit", type=int, metavar="ROWS", help="Read only so many rows of the file; implies --no-spark."
        )
        parser.add_argument("--processes", type=int, default=workers.PROCESSES, metavar="N",
                            help="Worker processes (default %(default)s).")  # fmt: skip
        parser.add_argument("--concurrency", type=int, default=workers.CONCURRENCY, metavar="N",
                            help="Threads per queue in each (default %(default)s).")  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        if options["limit"] is not None and options["limit"] < 1:
            raise CommandError(f"--limit {options['limit']} is not accepted: it must be at least 1.")
        # `kill` should stop the children as Ctrl-C does.
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._report(self._run(options), options["json"])
        except KeyboardInterrupt:
            raise CommandError("Stopped; the next demo starts from a clean state.", returncode=_INTERRUPTED) from None
        except (
            reset.AnotherDemoRuns,
            workers.HandlingStopped,
            maintenance.NotDone,
            source.FlightsMissing,
        ) as error:
            raise CommandError(str(error)) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    def _report(self, results: Results, as_json: bool) -> None:
        self.stdout.write(json.dumps(results.as_dict(), indent=2) if as_json else results.as_text())
        wrong = [check for check in results.checks() if not check.holds]
        if wrong:
            found = "; ".join(f"{check.name}: {check.found:,}, expected {check.expected:,}" for check in wrong)
            raise CommandError(f"The check fails: {found}")

    def _run(self, options: dict[str, Any]) -> Results:
        # With --json, standard output has the one object and nothing else.
        progress = Progress(sys.stderr if options["json"] else sys.stdout)
        limit = options["limit"]
        folder = Path(settings.DATA_DIR)
        with reset.only_demo(folder), ExitStack() as keep:
            call_command("migrate", verbosity=0, interactive=False, skip_checks=False)
            reset.remove_results()
            progress.say("Computing from the source file what must come out ...")
            expected = source.expected(limit)
            publication, with_spark = self._publish(progress, limit, options["no_spark"], keep)
            log = folder / "demo-workers.log"
            log.unlink(missing_ok=True)
            with maintenance.by_celery(folder) as trimmed:
                handled = workers.handle_until_empty(
                    publication.published, progress, log,
                    processes=options["processes"], concurrency=options["concurrency"],
                )  # fmt: skip
                progress.say(f"Celery has trimmed {trimmed():,} old rows.")
            journal = None
            if with_spark:
                progress.say("Computing the figures from the journal with Spark ...")
                journal = spark_job.figures_of_journal()
            return Results.read(publication, with_spark, handled, expected, limit is None, journal)

    def _publish(
        self, progress: Progress, limit: int | None, no_spark: bool, keep: ExitStack
    ) -> tuple[Published, bool]:
        with_spark = not no_spark and limit is None
        if with_spark and find_java() is None:
            progress.say(f"Without Spark, because there is no Java {MINIMUM_VERSION} or newer here.")
            with_spark = False
        progress.say("Starting Spark ..." if with_spark else "Publishing without Spark ...")
        progress.begin("publishing", min(limit or source.FLIGHTS, source.FLIGHTS))

        def show(read: int, published: int) -> None:
            progress.show(read, "rows read")

        try:
            if with_spark:
                try:
                    with _py4j_is_quiet():
                        return spark_job.publish_flights(show, keep=keep), True
                except SparkDidNotStart as error:
                    progress.say(f"{error} -- publishing without it.")
            return publish_flights_without_spark(show, limit), False
        finally:
            progress.end()


@contextmanager
def _py4j_is_quiet() -> Iterator[None]:
    """Without the tracebacks that py4j writes to the root logger when a Ctrl-C ends a call; what counts is raised."""
    root = logging.getLogger()

    def of_others(record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts

    root.addFilter(of_others)
    try:
        yield
    finally:
        root.removeFilter(of_others)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
