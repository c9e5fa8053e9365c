"""The consumers of the crash suite, as an app without models: installed in worker processes only."""

from django.apps import AppConfig


class CrashConfig(AppConfig):
    name = "tests.crash.workload"
    label = "crash"
