"""The site's pages: the admin, and the demo app at the root."""

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path

from project.paths import CHECKOUT

urlpatterns: list[URLPattern | URLResolver] = [
    path("admin/", admin.site.urls),
]

if (CHECKOUT / "project/flights/urls.py").exists():
    urlpatterns.append(path("", include("project.flights.urls")))
