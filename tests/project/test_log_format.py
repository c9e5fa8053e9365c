"""The log of the demo site: a line, or one object a line."""

from __future__ import annotations

import pytest

from tests.project.test_environment_errors import manage


@pytest.mark.parametrize(("value", "code"), [("json", 0), ("xml", 1)])
def test_the_format_is_read_from_the_environment(value: str, code: int) -> None:
    done = manage(
        "shell", "-c", "from django.conf import settings as s; print(s.LOGGING['handlers'])", LOG_FORMAT=value
    )
    assert done.returncode == code
    if code:
        assert "LOG_FORMAT = 'xml' is not accepted: it must be line or json." in done.stderr
    else:
        assert f"'formatter': '{value}'" in done.stdout
