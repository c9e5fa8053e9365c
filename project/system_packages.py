"""Installs packages of the distribution where that is allowed without asking: as root, or with passwordless sudo."""

import os
import shutil
import subprocess
from collections.abc import Sequence


def may_install() -> bool:
    """Whether this process can install Debian packages without a question."""
    if shutil.which("apt-get") is None:
        return False
    return os.geteuid() == 0 or _succeeds(["sudo", "-n", "true"])


def install_first_available(candidates: Sequence[str]) -> str | None:
    """Install the first of `candidates` that the distribution has; its name, or None when none could be installed."""
    if not may_install():
        return None
    become = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt_get = [*become, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    _succeeds([*apt_get, "update"])
    for package in candidates:
        if _succeeds([*apt_get, "install", "-y", "--no-install-recommends", package]):
            return package
    return None


def _succeeds(command: list[str]) -> bool:
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return result.returncode == 0
