"""The task of the benchmarks."""

from importlib.util import find_spec

if find_spec("django.tasks") is not None:
    from django.tasks import task
else:
    from django_tasks import task


@task
def nop_task(text: str) -> None:
    """A task."""
