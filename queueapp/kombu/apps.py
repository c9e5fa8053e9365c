"""The Django app of the tables of Celery's broker."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig

from ..membership import upkeep


class KombuConfig(AppConfig):
    """Configuration of the ``queueapp.kombu`` app."""

    name = "queueapp.kombu"
    label = "queueapp_kombu"
    verbose_name = "Celery"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, keeping  # noqa: F401

        upkeep.pieces.append(keeping.keep_house)
        if find_spec("celery") is not None:
            from celery.app.backends import BACKEND_ALIASES
            from celery.signals import worker_init

            worker_init.connect(_in_a_worker, dispatch_uid="queueapp.kombu.worker", weak=False)
            # An installed package says so by an entry point; a checkout has none.
            BACKEND_ALIASES.setdefault("queueapp", "queueapp.kombu.results:ResultBackend")


def _in_a_worker(sender: Any, **_: Any) -> None:
    from celery.signals import task_postrun

    from . import failed, steady  # a worker's modules, which no other process needs

    failed.install(sender.app)
    task_postrun.connect(steady.close_lost, dispatch_uid="queueapp.kombu.lost")
