"""The settings of the tests, with the tables of django-celery-beat."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_beat"]  # noqa: F405
