"""The pages of the demo app."""

from django.urls import path

from project.flights import views

app_name = "flights"

urlpatterns = [
    path("", views.page, name="page"),
    path("live.json", views.live, name="live"),
    path("import", views.import_flight, name="import"),
]
