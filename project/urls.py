"""The site's addresses: the demo app at the root, the admin, and a health check."""

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path

from project import health
from queueapp.metrics.autoscale import autoscale
from queueapp.metrics.views import metrics

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("project.flights.urls")),
    path("admin/", admin.site.urls),
    path("queues/", include("queueapp.urls")),
    path("healthz", health.healthz, name="healthz"),
    path("metrics", metrics, name="metrics"),
    path("autoscale", autoscale, name="autoscale"),
]
