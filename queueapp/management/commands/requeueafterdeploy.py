"""``manage.py requeueafterdeploy``: requeue poison as canaries, for the workers of a new version."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...errors import QueueError
from ...operations import requeue_after_deploy
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """Start canaries."""

    help = (
        "After a deploy, start a canary for each poison group in which a message failed on another version than that "
        "of the live workers. A canary requeues 1 message of its group, then 2, 5, 20 and 100 at a time, while the "
        "workers handle them. It stops if its first message fails again, or when more messages than its budget have; "
        "the messages that it has not requeued stay in poison, and it leaves a note on the group. Without QUEUE, the "
        "command covers all queues of the database, also those without the option requeue_after_deploy. All live "
        "workers of a queue must have one version. A group has one canary for each version. Maintenance runs the "
        "canaries; the page Operations of the admin shows them."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues (label or table).")
        parser.add_argument("--group", default="", help="Only this group: its whole key, as --dry-run prints it.")
        parser.add_argument(
            "--budget",
            type=int,
            help="How many messages may fail again before a canary stops (default: the queue's option, or 5).",
        )
        parser.add_argument(
            "--again",
            action="store_true",
            help="Also groups that have had a canary on this version, or have failed on it only.",
        )
        parser.add_argument("--database", default="default", help="Which database (default: 'default').")
        parser.add_argument(
            "--dry-run", action="store_true", help="Print queue and key of each group, and start nothing."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias, budget = options["database"], options["budget"]
        if budget is not None and not 0 <= budget <= 1_000_000:
            raise CommandError(f"--budget {budget} is not accepted: it must be from 0 to 1000000.")
        queues = [registry.queues.find(name) for name in options["queue"]]
        count, problems = 0, []
        for queue in queues or [queue for queue in registry.queues if router.db_for_write(queue) == alias]:
            label = queue._meta.label
            if not queues and not requeue_after_deploy.groups_of(alias, label).exists():
                continue
            try:
                groups = _groups(queue, alias, options)
            except QueueError as error:
                problems.append(str(error))
                continue
            for group in groups:
                if options["dry_run"]:
                    self.stdout.write(f"{label}  {group}")
                    continue
                try:
                    started = requeue_after_deploy.start(
                        queue, group, budget=budget, again=options["again"], using=alias
                    )
                except QueueError as error:
                    problems.append(str(error))
                    continue
                count += 1
                self.stdout.write(f"{label}  {group}  {started}")
        if not options["dry_run"]:
            self.stdout.write(f"{counted(count, 'canary was', 'canaries were')} started.")
        if problems:
            raise CommandError(" ".join(problems))


def _groups(queue: Any, alias: str, options: dict[str, Any]) -> list[str]:
    """The groups of a queue that these options choose. Raises QueueError where its workers are not of one version."""
    label, group = queue._meta.label, options["group"]
    if cause := requeue_after_deploy.refused(queue):
        raise QueueError(f"{label}: {cause}.")
    version = requeue_after_deploy.deployed_version(alias, queue)
    if options["again"]:
        return list(requeue_after_deploy.groups_of(alias, label, group)[: requeue_after_deploy.MAX_GROUPS])
    return requeue_after_deploy.due_groups(alias, label, version, group)
