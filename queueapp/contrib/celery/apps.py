"""The Django app of the Celery broker and result backend."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig

from ...services import maintenance_hooks


class CeleryConfig(AppConfig):
    """Configuration of the ``queueapp.contrib.celery`` app."""

    name = "queueapp.contrib.celery"
    label = "queueapp_celery"
    verbose_name = "Celery"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import ended_tasks, options, queue_stats, result_rows  # noqa: F401  options registers a check

        queue_stats.install()
        maintenance_hooks["celery results"] = result_rows.run_maintenance
        if find_spec("celery") is not None:
            from celery.app.backends import BACKEND_ALIASES
            from celery.signals import worker_init

            worker_init.connect(_on_worker_init, dispatch_uid="queueapp.contrib.celery.worker", weak=False)
            ended_tasks.install()
            # An installed package has an entry point for this; a checkout has none.
            BACKEND_ALIASES.setdefault("queueapp", "queueapp.contrib.celery.results:ResultBackend")


def _on_worker_init(sender: Any, **_: Any) -> None:
    from celery.signals import task_postrun

    from . import failure_hook, renewal_process, retrying  # needed in workers only

    renewal_process.worker = sender
    failure_hook.install(sender.app)
    task_postrun.connect(retrying.close_lost_connections, dispatch_uid="queueapp.contrib.celery.lost_connections")
