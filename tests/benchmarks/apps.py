"""The queues of the benchmarks, as an app, so that worker processes know them."""

from django.apps import AppConfig

from tests.benchmarks.sdk import provide_if_asked


class BenchmarksConfig(AppConfig):
    name = "tests.benchmarks"
    label = "benchmarks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        provide_if_asked()
