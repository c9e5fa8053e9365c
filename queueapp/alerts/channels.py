"""The channels of notifications: the signal ``alerted``, mail, a webhook. A channel that fails raises within
seconds."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings as django_settings
from django.core.mail import EmailMessage, get_connection

from .. import signals
from ..conf import settings

#: Seconds that a mail server or a webhook may take to answer.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Notification:
    """What a channel sends. ``resolved``: the alert is resolved."""

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
        return f"{'Resolved' if self.resolved else 'Alert'}: {self.text}".replace("\n", " ").replace("\r", " ")

    def as_dict(self) -> dict[str, Any]:
        """For JSON. ``text`` is the subject: chat programs read that name."""
        found = asdict(self) | {"since": self.since.isoformat(), "state": "resolved" if self.resolved else "firing"}
        return found | {"text": self.subject}


def configured() -> list[str]:
    """The channels that the settings name. The signal is always one."""
    return ["signal", *(name for name in ("mail", "webhook") if settings.ALERTS.get(name))]


def send(channel: str, notification: Notification) -> None:
    """Send a notification by one channel. Raises what keeps it from being sent."""
    {"signal": _signal, "mail": _mail, "webhook": _webhook}[channel](notification)


def send_test() -> dict[str, str]:
    """Send a test alert by each channel; returns the error of each, '' where it was sent."""
    notification, errors = Notification("test", "", "", "this is a test", "", datetime.now(UTC)), {}
    for channel in configured():
        try:
            send(channel, notification)
            errors[channel] = ""
        except Exception as error:
            errors[channel] = error_text(error)
    return errors


def error_text(error: BaseException) -> str:
    """The error without the address of the channel, which is often a secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"


def _signal(notification: Notification) -> None:
    # A receiver that raises is logged; the notification counts as sent.
    signals.send_alert(notification)


def _mail(notification: Notification) -> None:
    options: dict[str, Any] = {}
    if django_settings.EMAIL_BACKEND.endswith("smtp.EmailBackend") and django_settings.EMAIL_TIMEOUT is None:
        options["timeout"] = TIMEOUT
    facts = json.dumps(notification.as_dict(), indent=2)
    mail = EmailMessage(
        f"{django_settings.EMAIL_SUBJECT_PREFIX}{notification.subject}",
        f"{notification.subject}\n\n{facts}\n",
        to=list(settings.ALERTS["mail"]),
        connection=get_connection(**options),
    )
    mail.send(fail_silently=False)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # raises: following it would turn the POST into a GET of another address


_opener = urllib.request.build_opener(_NoRedirect)


def _webhook(notification: Notification) -> None:
    request = urllib.request.Request(  # noqa: S310  the scheme is checked with the settings
        settings.ALERTS["webhook"],
        data=json.dumps(notification.as_dict()).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "queueapp"},
        method="POST",
    )
    failures: list[Exception] = [TimeoutError(f"no answer in {TIMEOUT:g} s")]

    def post() -> None:
        try:
            with _opener.open(request, timeout=TIMEOUT):
                failures.clear()
        except Exception as error:
            failures[:] = [error]

    # On a thread, because the timeout of urllib holds for each read: a server that answers byte by byte, or a silent
    # name server, would block without end.
    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if failures:
        raise failures[0]
