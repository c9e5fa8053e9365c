"""``manage.py sparkjob``: Spark jobs, on this machine or under ``spark-submit``."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from queueapp.errors import QueueError
from queueapp.management.base_command import OperatorCommand, counted
from queueapp.registry import queues

from ...spark import jobs
from ...spark.progress import reported
from ...spark.session import SparkDidNotStart, SparkJobFailed, job_session, readable_errors


class Command(OperatorCommand):
    """Run a Spark job."""

    help = (
        "Publish files, archive the journal, analyse and requeue poison messages, or compare two sets of messages, by "
        "Spark: on this machine, or on the cluster of spark-submit (spark-submit manage.py sparkjob ...)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--cores", type=int, default=2, help="Cores of this machine (default 2).")
        parser.add_argument("--json", action="store_true", help="Print the result as one JSON object.")
        found = parser.add_subparsers(dest="job", required=True, metavar="JOB")

        publish = found.add_parser("publish", help="Write files into a queue or to a topic.")
        publish.add_argument("path", help="A file or folder of CSV with a header, JSON lines or Parquet.")
        publish.add_argument("--queue", help="The queue: its label or its table.")
        publish.add_argument("--topic", help="Instead of --queue: the topic to publish to.")
        publish.add_argument("--format", choices=sorted(set(jobs.FORMATS.values())), help="Default: by the path.")
        publish.add_argument("--message-type", help="Dotted name of the class of the messages.")
        publish.add_argument(
            "--map", action="append", default=[], metavar="FIELD=COLUMN",
            help="The column of the files for a field of the message; repeat it. Others have the same name.",
        )  # fmt: skip
        publish.add_argument("--publish-id", help="Names the publication: a second job with this name adds nothing.")

        archive = found.add_parser("archive", help="Write whole days of the journal as Parquet, and verify them.")
        archive.add_argument("topic")
        archive.add_argument("folder", help="A folder for this topic alone.")
        archive.add_argument(
            "--until",
            type=date.fromisoformat,
            metavar="DATE",
            help="The first day (UTC) that is not archived; default: every day that ended a day ago.",
        )

        poison = found.add_parser("poison", help="Count poison messages by group and hour.")
        requeue = found.add_parser("requeue", help="Put poison messages that match a condition back into their queues.")
        for job in (poison, requeue):
            job.add_argument("queue", help="The queue: its label or its table.")
        poison.add_argument("--where", metavar="SQL", help="A condition of Spark's SQL.")
        requeue.add_argument(
            "--where", metavar="SQL", required=True, help="A condition of Spark's SQL; 'true' for all."
        )
        requeue.add_argument("--to", help="Another queue (label or table).")

        compare = found.add_parser(
            "reconcile", help="Compare two sets of messages by their ids. Exit code 1 when they differ.",
            description="A set is a queue (app.Model), another state of it (app.Model:poison), the journal of a topic "
            "(topic:NAME), or files with a column id.",
        )  # fmt: skip
        compare.add_argument("left")
        compare.add_argument("right")
        compare.add_argument("--column", help="The column of the ids on the right (default id).")

    def handle(self, *args: Any, **options: Any) -> None:
        log = Path(tempfile.gettempdir()) / f"sparkjob-{os.getpid()}.log"
        try:
            with (
                self.counting("tasks done", lambda count: "the next job goes on.") as progress,
                job_session("sparkjob", cores=options["cores"], log=log) as spark,
                readable_errors(),
                reported(spark, f"sparkjob {options['job']}", lambda done, tasks: progress.at(done)),
            ):
                from queueapp.contrib.spark import register

                register(spark)
                result, lines = getattr(self, f"_{options['job']}")(spark, options)
        except (SparkDidNotStart, SparkJobFailed, QueueError, ImportError) as error:
            raise CommandError(f"{error} (Spark's log: {log})" if log.exists() else str(error)) from error
        log.unlink(missing_ok=True)
        if options["json"]:
            self.write_json(result)
        else:
            self.stdout.write("\n".join(lines))
        if result.get("agree") is False:
            raise CommandError("They differ.")

    def _publish(self, spark: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        if bool(options["queue"]) == bool(options["topic"]):
            raise CommandError("Name one of --queue and --topic.")
        pairs = [text.partition("=") for text in options["map"]]
        if any(not field or not column for field, _, column in pairs):
            raise CommandError(f"--map {options['map']} is not accepted: FIELD=COLUMN.")
        mapping = {field: column for field, _, column in pairs}
        frame = jobs.read_files(spark, options["path"], options["format"])
        given = {name: options[name] for name in ("queue", "topic", "publish_id", "message_type")}
        count = jobs.publish_files(jobs.messages_of(frame, options["message_type"], mapping), **given)
        where = options["queue"] or f"topic {options['topic']}"
        return {"published": count}, [f"{count:,} messages were published to {where}."]

    def _archive(self, spark: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        until = options["until"] and datetime.combine(options["until"], time(), UTC)
        days = jobs.archive_journal(spark, options["topic"], options["folder"], until=until, report=self._say(options))
        new = [day for day in days if day.is_new]
        lines = [f"Archived and verified now: {counted(len(new), 'day')}, {sum(day.rows for day in new):,} entries."]
        if days:
            kept = f"{counted(len(days), 'day')} up to {days[-1].day}"
            lines.append(f"In the archive: {kept}; these may be deleted from the journal.")
        shown = [{"day": day.day, "rows": day.rows, "checksum": day.checksum, "new": day.is_new} for day in days]
        return {"days": shown}, lines

    def _say(self, options: dict[str, Any]) -> Any:
        return (lambda line: None) if options["json"] else self.stdout.write

    def _poison(self, spark: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        groups = jobs.analyse_poison(spark, options["queue"], options["where"])
        lines = [f"{row['messages']:>9,}  {row['hour']}  {row['exception_type']}  {row['reason']}" for row in groups]
        total = sum(row["messages"] for row in groups)
        return {"groups": groups}, [*lines, f"{total:,} poison messages."]

    def _requeue(self, spark: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        from queueapp.contrib.spark import requeue

        to = queues.find(options["to"]) if options["to"] else None
        count = requeue(jobs.read_poison(spark, options["queue"], options["where"]), to=to)
        return {"requeued": count}, [f"{count:,} poison messages were requeued."]

    def _reconcile(self, spark: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        left = jobs.read_ids(spark, options["left"])
        found = jobs.reconcile(left, jobs.read_ids(spark, options["right"], options["column"]))
        result = {"both": found.both, "only_left": found.only_left, "only_right": found.only_right}
        lines = [
            f"in both {found.both:,}, only in {options['left']} {found.only_left:,}, "
            f"only in {options['right']} {found.only_right:,}",
            *(f"for example {identity}" for identity in found.examples),
        ]
        return result | {"examples": found.examples, "agree": found.agree}, lines
