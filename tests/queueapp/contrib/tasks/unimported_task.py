"""A task that is imported by workers only."""

from .compat import task


@task
def unimported() -> str:
    return "found"
