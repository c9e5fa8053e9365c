"""The Django app: finds consumers, schedules and admin pages once all models are there."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules


class QueueappConfig(AppConfig):
    """Configuration of the ``queueapp`` app."""

    name = "queueapp"
    verbose_name = "Queues"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401  registers the system checks

        if apps.is_installed("django.contrib.admin"):
            from django.contrib import admin

            # Before our own registration: a user's own ModelAdmin for a queue must win in whatever order the apps
            # stand.
            admin.autodiscover()
            from .admin import register

            register()
        # What a queue gives up may be published: topics are a layer above failures.
        from .consuming import context
        from .failures import expire_actions
        from .notifier import after_migrate
        from .topics.publisher import publish, publish_stored

        expire_actions.publisher = publish_stored
        context.publisher = publish

        from . import encryption
        from .alerts import store as alerts
        from .conf import settings
        from .flow import ack_effects, group_members, ledger, rate_limit, results  # noqa: F401  two register themselves
        from .messages import body_filters
        from .receiving import inbox
        from .services import maintenance_hooks

        # By name: tests that change INSTALLED_APPS call this again.
        maintenance_hooks["inbox"] = inbox.run_maintenance
        maintenance_hooks["groups"] = group_members.run_maintenance
        maintenance_hooks["results"] = results.run_maintenance
        maintenance_hooks["rate limits"] = rate_limit.run_maintenance
        maintenance_hooks["alerts"] = alerts.close_without_settings
        encryption.register()
        body_filters.largest = lambda: settings.MAX_DECOMPRESSED

        from . import telemetry

        telemetry.follow()

        from .operations import migrating

        migrating.connect(self)
        post_migrate.connect(after_migrate, sender=self, dispatch_uid="queueapp.notifier")
        autodiscover_modules("consumers", "schedules")
