"""The superuser of a development checkout: made once, with a random password that is kept beside the development key.

A fixed password would be public, and a new one at each start would log the developer out. A password that the developer
changed is left alone.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from django.contrib.auth import get_user_model

USERNAME = "admin"


@dataclass(frozen=True, slots=True)
class DevelopmentUser:
    """The user that may log in; ``password`` is None if it was changed."""

    name: str
    password: str | None


def ensure_development_user(folder: Path) -> DevelopmentUser:
    """The superuser of this database, created if it is not there, with its password from ``folder``."""
    path = folder / "admin_password"
    password = path.read_text().strip() if path.exists() else ""
    users = get_user_model()
    user = users.objects.filter(**{users.USERNAME_FIELD: USERNAME}).first()
    if user is not None:
        return DevelopmentUser(USERNAME, password if password and user.check_password(password) else None)
    if not password:
        password = secrets.token_urlsafe(12)
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(password)
    users.objects.create_superuser(**{users.USERNAME_FIELD: USERNAME, "password": password})
    return DevelopmentUser(USERNAME, password)
