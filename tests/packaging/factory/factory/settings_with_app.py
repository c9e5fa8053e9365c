"""The project's package `workers` is an app itself, with the label that comes by itself."""

from .settings import *  # noqa: F403
from .settings import OF_DJANGO

INSTALLED_APPS = [*OF_DJANGO, "queueapp", "queueapp.workers", "workers", "workers.shifts"]
