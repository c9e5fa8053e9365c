"""The Django app of the tables, and where workers learn of the tasks' queues."""

from __future__ import annotations

from django.apps import AppConfig


class TasksConfig(AppConfig):
    """Configuration of the ``queueapp.tasks`` app."""

    name = "queueapp.tasks"
    label = "queueapp_tasks"
    verbose_name = "Tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import finished, running

        finished.connect()
        running.install()
