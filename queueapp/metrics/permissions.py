"""Who may read the metrics over HTTP, and the short cache behind the views."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from functools import wraps
from time import monotonic
from typing import Any, Generic, TypeVar

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..conf import settings
from ..operations import snapshots

_T = TypeVar("_T")

#: Either permission gives access; both also open the overview in the admin.
PERMISSIONS = ("queueapp.view_queuecontrol", "queueapp.operate_queue")
#: Several collectors, and the retries of one, cost the database one read in this time.
CACHE_SECONDS = 2.0
UNAUTHORIZED = "401 Unauthorized: a bearer token is required\n"
FORBIDDEN = f"403 Forbidden: one of the permissions {', '.join(PERMISSIONS)} is required\n"


class CachedRead(Generic[_T]):
    """Returns the result of ``read``, at most ``seconds`` old. Concurrent callers wait for one read."""

    def __init__(self, read: Callable[[], _T], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._result: _T | None = None

    def clear(self) -> None:
        """Make the next call read again."""
        with self._lock:
            self._result = None

    def __call__(self) -> _T:
        with self._lock:
            if self._result is None or monotonic() - self._read_at > self._seconds:
                self._result = self._read()
                self._read_at = monotonic()
            return self._result


cached_stats = CachedRead(snapshots.latest_stats, CACHE_SECONDS)


def requires_metrics_access(view: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Protect a view: it answers requests with ``Authorization: Bearer QUEUEAPP["METRICS_TOKEN"]``, and users with
    one of ``PERMISSIONS``. Anonymous requests get 401, other users 403."""

    @require_safe
    @never_cache
    @wraps(view)
    def guarded(request: HttpRequest) -> HttpResponse:
        user = getattr(request, "user", None)
        if has_token(request.headers.get("Authorization", "")) or _has_permission(user):
            return view(request)
        if getattr(user, "is_authenticated", False):
            return HttpResponse(FORBIDDEN, status=403, content_type="text/plain")
        headers = {"WWW-Authenticate": 'Bearer realm="metrics"'}
        return HttpResponse(UNAUTHORIZED, status=401, content_type="text/plain", headers=headers)

    return guarded


def has_token(authorization: str) -> bool:
    """Whether the Authorization header carries the token of the settings. Without a token in the settings, none is
    valid."""
    token: str = settings.METRICS_TOKEN
    given = authorization.removeprefix("Bearer ")
    return bool(token) and authorization != given and hmac.compare_digest(given.strip().encode(), token.encode())


def _has_permission(user: Any) -> bool:
    return user is not None and any(user.has_perm(permission) for permission in PERMISSIONS)
