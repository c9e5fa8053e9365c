"""What ``import queueapp`` offers, though it loads none of it before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import queueapp

CHECKOUT = Path(__file__).parents[2]


def test_dir_lists_every_public_name_once() -> None:
    names = dir(queueapp)
    assert set(queueapp.__all__) <= set(names)
    assert len(names) == len(set(names))


def test_dir_lists_them_before_anything_is_loaded_and_loads_nothing() -> None:
    code = "import queueapp, sys; print(*dir(queueapp)); print(*(name for name in sys.modules if 'django' in name))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    listed, loaded = done.stdout.split("\n")[:2]
    assert set(queueapp.__all__) <= set(listed.split())
    assert loaded == ""


@pytest.mark.parametrize("name", queueapp.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(queueapp, name) is not None


def test_every_public_name_is_one_that_can_be_loaded() -> None:
    assert sorted(queueapp.__all__) == sorted(queueapp._PUBLIC)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Kueue"):
        queueapp.Kueue  # noqa: B018
