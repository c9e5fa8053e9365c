"""What the command line says of an HTTP server: ``--http``."""

from __future__ import annotations

from django.core.management.base import CommandError

from ..processes.http import Endpoint, address_of


def bind(text: str | None) -> Endpoint | None:
    """Bound, before anything else runs. Raises InvalidOption, and CommandError for an address that cannot be had."""
    if text is None:
        return None
    host, port = address_of(text)
    try:
        return Endpoint(host, port)
    except OSError as error:
        raise CommandError(f"--http {text}: the address cannot be had: {error.strerror or error}.") from error
