"""The Django app of the tables; registers the queues of tasks for workers."""

from __future__ import annotations

from django.apps import AppConfig


class TasksConfig(AppConfig):
    """Configuration of the ``queueapp.contrib.tasks`` app."""

    name = "queueapp.contrib.tasks"
    label = "queueapp_tasks"
    verbose_name = "Tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import consumers, scheduled_tasks, task_stats

        consumers.connect_signals()
        consumers.install()
        task_stats.install()
        scheduled_tasks.install()
