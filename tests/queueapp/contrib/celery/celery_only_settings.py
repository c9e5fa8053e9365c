"""Settings of a project that has nothing but Celery."""

from project.settings import *  # noqa: F403

INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "queueapp", "queueapp.contrib.celery"]
ROOT_URLCONF = __name__
urlpatterns: list[object] = []
