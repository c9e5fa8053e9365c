"""Source distributions of others, whose tests run against ours: fetched at the pinned version when they are needed,
with the hash of requirements.txt, and kept in pytest's cache. None of it is copied into this repository."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def pinned(name: str) -> tuple[str, set[str]]:
    """(version, sha256 of its files) of a package in requirements.txt."""
    text = (CHECKOUT / "requirements.txt").read_text()
    found = re.search(rf"^{re.escape(name)}==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]+(?: \\)?\n)+)", text, re.M)
    assert found is not None, f"{name} is not in requirements.txt"
    return found[1], set(re.findall(r"sha256:([0-9a-f]+)", found[2]))


def sources(name: str, config: pytest.Config) -> Path:
    """The unpacked source distribution of a pinned package; skips the tests, by name, where there is no network."""
    version, hashes = pinned(name)
    assert config.cache is not None
    folder = Path(config.cache.mkdir(f"sdist-{name}-{version}"))
    unpacked = folder / f"{name}-{version}"
    archive = folder / f"{name}-{version}.tar.gz"
    if not archive.exists():
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{name}=={version} {' '.join(f'--hash=sha256:{item}' for item in sorted(hashes))}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--require-hashes",
        ]
        command += ["--no-build-isolation", "--dest", str(folder), "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if not archive.exists():
            pytest.skip(f"the sources of {name} {version} cannot be fetched: {done.stderr.strip()[-200:]}")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in hashes, f"{archive} is not the pinned one"
    if not unpacked.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return unpacked
