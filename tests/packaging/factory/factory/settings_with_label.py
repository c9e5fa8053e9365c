"""The project's package `workers` is an app itself, so that the label "workers" is taken."""

from .settings import *  # noqa: F403
from .settings import OF_DJANGO

INSTALLED_APPS = [*OF_DJANGO, "queueapp", "factory.apps.QueueWorkersConfig", "workers", "workers.shifts"]
