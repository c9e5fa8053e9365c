"""The ways of an alert: the signal ``alerted``, mail, a webhook. Each raises what keeps it from being told, within seconds."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.conf import settings as django_settings
from django.core.mail import EmailMessage, get_connection

from .. import signals
from ..conf import settings

#: Seconds that a mail server or a webhook may take to answer.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Notification:
    """What is told. ``resolved``: it is over."""

    kind: str
    queue: str
    name: str
    text: str
    database: str
    since: datetime
    resolved: bool = False

    @property
    def subject(self) -> str:
        """One line."""
        return f"{'Over' if self.resolved else 'Alert'}: {self.text}".replace("\n", " ").replace("\r", " ")

    def as_dict(self) -> dict[str, Any]:
        """For JSON. ``text`` also under the name that chat programs read."""
        found = asdict(self) | {"since": self.since.isoformat(), "state": "resolved" if self.resolved else "firing"}
        return found | {"text": self.subject}


def tell(channel: str, notice: Notification) -> None:
    """Tell it by a channel."""
    {"signal": _signal, "mail": _mail, "webhook": _webhook}[channel](notice)


def why(error: BaseException) -> str:
    """What kept it, without the address: that is often a secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"


def _signal(notice: Notification) -> None:
    # A receiver that raises is logged; it was told.
    signals.send_alert(notice)


def _mail(notice: Notification) -> None:
    options: dict[str, Any] = {}
    if django_settings.EMAIL_BACKEND.endswith("smtp.EmailBackend") and django_settings.EMAIL_TIMEOUT is None:
        options["timeout"] = TIMEOUT
    told = json.dumps(notice.as_dict(), indent=2)
    mail = EmailMessage(
        f"{django_settings.EMAIL_SUBJECT_PREFIX}{notice.subject}",
        f"{notice.subject}\n\n{told}\n",
        to=list(settings.ALERTS["mail"]),
        connection=get_connection(**options),
    )
    mail.send(fail_silently=False)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # an error then: a POST is not to become a GET somewhere else


_opener = urllib.request.build_opener(_NoRedirect)


def _webhook(notice: Notification) -> None:
    request = urllib.request.Request(  # noqa: S310  the scheme is checked with the settings
        settings.ALERTS["webhook"],
        data=json.dumps(notice.as_dict()).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "queueapp"},
        method="POST",
    )
    failed: list[Exception] = [TimeoutError(f"no answer in {TIMEOUT:g} s")]

    def post() -> None:
        try:
            with _opener.open(request, timeout=TIMEOUT):
                failed.clear()
        except Exception as error:
            failed[:] = [error]

    # On a thread: the timeout is one for each read, and one that sends its answer byte by byte, or a name server that is silent, would
    # be waited for without end.
    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if failed:
        raise failed[0]
