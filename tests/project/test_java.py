"""Which Java is found: JAVA_HOME first, then PATH, never one that is too old or broken."""

import os
from pathlib import Path

import pytest

from project import java


def make_java(directory: Path, output: str, exit_code: int = 0) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{output}' >&2\nexit {exit_code}\n")
    program.chmod(0o755)
    return directory


@pytest.fixture(autouse=True)
def no_java_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java, "INSTALLATIONS", tmp_path / "jvm")


def environment(java_home: Path | None = None, path: Path | None = None) -> dict[str, str]:
    values = {"PATH": str(path / "bin") if path else "/nowhere"}
    return values | ({"JAVA_HOME": str(java_home)} if java_home else {})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "24-ea" 2025-03-18', 24),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "17.0.2"', 17),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_version_is_read_from_what_java_prints(text: str, version: int | None) -> None:
    assert java.parse_version(text) == version


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    first = make_java(tmp_path / "first", 'openjdk version "21.0.1"')
    second = make_java(tmp_path / "second", 'openjdk version "17.0.1"')
    assert java.find_java(environment(first, second)) == java.Java(home=first, version=21)


def test_too_old_or_missing_java_home_gives_way_to_path(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", 'openjdk version "11.0.22"')
    good = make_java(tmp_path / "good", 'openjdk version "17.0.1"')
    assert java.find_java(environment(old, good)) == java.Java(home=good, version=17)
    assert java.find_java(environment(tmp_path / "missing", good)) == java.Java(home=good, version=17)


def test_newer_java_beside_the_default_one_is_found(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", 'openjdk version "11.0.22"')
    good = make_java(tmp_path / "jvm" / "java-17", 'openjdk version "17.0.1"')
    assert java.find_java(environment(path=old)) == java.Java(home=good, version=17)


def test_broken_java_is_no_java(tmp_path: Path) -> None:
    broken = make_java(tmp_path / "broken", 'openjdk version "17.0.1"', exit_code=1)
    assert java.find_java(environment(path=broken)) is None


def test_home_is_that_of_the_program_behind_the_links(tmp_path: Path) -> None:
    real = make_java(tmp_path / "real", 'openjdk version "17.0.1"')
    links = tmp_path / "links" / "bin"
    links.mkdir(parents=True)
    (links / "java").symlink_to(real / "bin" / "java")
    found = java.find_java(environment(path=tmp_path / "links"))
    assert found == java.Java(home=real, version=17)


def test_without_java_it_states_what_to_install_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    monkeypatch.setattr(java, "install_first_available", lambda packages: None)
    assert java.main() == 0
    assert "apt-get install openjdk-17-jre-headless" in capsys.readouterr().err
