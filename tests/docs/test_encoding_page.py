"""The examples of docs/reference/encoding.md run under the settings that the page shows."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.encryption import keyring

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "reference" / "encoding.md"


@pytest.mark.django_db(transaction=True)
def test_the_examples_run_under_the_settings_of_the_page(settings: Any) -> None:
    keys = {"2026-11": b"k" * 32, "2026-05": b"o" * 32}
    settings.QUEUEAPP = {"KEYRING": lambda: keys}
    try:
        with run_blocks(PAGE) as module:
            assert module.QUEUEAPP["KEYRING"]() == keys
    finally:
        keyring.forget()
