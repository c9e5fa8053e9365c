"""A task that nobody imports before a worker does."""

from .compat import task


@task
def unimported() -> str:
    return "found"
