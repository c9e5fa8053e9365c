"""Django's task framework, of Django or of the backport, as the tests need it."""

from importlib.util import find_spec

if find_spec("django.tasks") is not None:
    from django.tasks import task
    from django.tasks.exceptions import TaskResultMismatch
else:
    from django_tasks import task
    from django_tasks.exceptions import TaskResultMismatch

__all__ = ["TaskResultMismatch", "task"]
