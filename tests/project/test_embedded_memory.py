"""The embedded server's share of the memory."""

from pathlib import Path

import pytest

from project.embedded_postgres.memory import shared_buffers_mb


@pytest.mark.parametrize(("limit", "expected"), [("500000000\n", 128), ("1\n", 128)])
def test_small_container_has_the_smallest_share(tmp_path: Path, limit: str, expected: int) -> None:
    file = tmp_path / "memory.max"
    file.write_text(limit)

    assert shared_buffers_mb(file) == expected


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    unlimited = tmp_path / "memory.max"
    unlimited.write_text("max\n")

    assert shared_buffers_mb(unlimited) == shared_buffers_mb(tmp_path / "absent")
    assert 128 <= shared_buffers_mb(unlimited) <= 2048
