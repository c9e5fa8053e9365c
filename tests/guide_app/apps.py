"""The app that the guide's example models belong to; its models are on the guide's page."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "tests.guide_app"
    label = "shop"
    default_auto_field = "django.db.models.BigAutoField"
