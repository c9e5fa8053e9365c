"""A task that nobody imports before a worker does."""

from .framework import task


@task
def late() -> str:
    return "found"
