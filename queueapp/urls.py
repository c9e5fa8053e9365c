"""The overview of the queues as a read-only page of the project, for people who do not use the admin.

>>> path("queues/", include("queueapp.urls"))

It shows what the admin's overview shows, without links and operations, to signed-in users with one of the
``metrics.permissions.PERMISSIONS``. It needs neither ``django.contrib.admin`` nor a base template of the project.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .admin import overview_rows
from .admin.formatting import charts, display, untrusted
from .metrics.permissions import PERMISSIONS

app_name = "queueapp"
#: The header with which the page's script asks for its rows only.
PART = "X-Queueapp-Part"


@require_safe
@never_cache
def overview(request: HttpRequest) -> HttpResponse:
    """The page. Anonymous users are sent to the login, others without a permission get 403."""
    if not request.user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    if not any(request.user.has_perm(permission) for permission in PERMISSIONS):
        raise PermissionDenied
    found, now = overview_rows.overview(), datetime.now(UTC)
    lines = [
        {
            "row": row,
            "name": untrusted.inline(row.label),
            "state": display.badge(*row.state),
            "oldest": "" if row.oldest is None else display.duration(row.oldest),
            "note": untrusted.inline(row.note, 300) if row.note else "",
            "spark": charts.sparkline(
                [(point.at, point.ready) for point in row.history], now, timedelta(hours=1), "ready in the last hour"
            ),
        }
        for row in found.rows
    ]
    age = "" if found.age is None else display.of_seconds(found.age)
    part = "_rows" if PART in request.headers else ""
    context = {"lines": lines, "age": age, "part_header": PART, "headings": overview_rows.HEADINGS}
    return TemplateResponse(request, f"queueapp/overview{part}.html", context, headers={"Vary": PART})


urlpatterns = [path("", overview, name="overview")]
