"""The Django app of the tables, and where workers learn of the tasks' queues."""

from __future__ import annotations

from django.apps import AppConfig


class TasksConfig(AppConfig):
    """Configuration of the ``queueapp.contrib.tasks`` app."""

    name = "queueapp.contrib.tasks"
    label = "queueapp_tasks"
    verbose_name = "Tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import consumers, signals

        signals.connect()
        consumers.install()
