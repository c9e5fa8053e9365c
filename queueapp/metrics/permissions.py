"""Who may read the figures over HTTP, and what is read for all who ask in the same moment."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..conf import settings
from ..operations import statistics
from .cache import Remembered

#: Who has one of these may see the figures in the admin as well.
PERMISSIONS = ("queueapp.view_queuecontrol", "queueapp.operate_queue")
#: Seconds: several collectors, and several of their tries, cost the database one look.
REMEMBERED = 2.0

remembered = Remembered(statistics.figures, REMEMBERED)


def for_readers(view: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """A view for ``Authorization: Bearer`` with ``QUEUEAPP["METRICS_TOKEN"]``, or a user with a permission to view queues; 401 for
    others who said nothing of themselves, 403 for those who did."""

    @require_safe
    @never_cache
    @wraps(view)
    def guarded(request: HttpRequest) -> HttpResponse:
        if may_read(request.headers.get("Authorization", "")) or _may_see(getattr(request, "user", None)):
            return view(request)
        known = getattr(getattr(request, "user", None), "is_authenticated", False)
        refused = HttpResponse("not for you\n", status=403 if known else 401, content_type="text/plain")
        if not known:
            refused["WWW-Authenticate"] = 'Bearer realm="metrics"'
        return refused

    return guarded


def may_read(authorization: str) -> bool:
    """Whether this header has the token. Without one in the settings there is none that would do."""
    token: str = settings.METRICS_TOKEN
    given = authorization.removeprefix("Bearer ")
    return bool(token) and authorization != given and hmac.compare_digest(given.strip().encode(), token.encode())


def _may_see(user: Any) -> bool:
    return user is not None and any(user.has_perm(permission) for permission in PERMISSIONS)
