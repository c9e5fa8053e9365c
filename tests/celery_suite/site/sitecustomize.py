"""For the processes that Celery's tests start: their apps do not import ``queueapp.contrib.celery``, as those of a project would, and those
that are told of a module in Celery's sources find it, behind the Celery that is installed."""

import os
import sys

if "TEST_BROKER" in os.environ:
    import queueapp.contrib.celery  # noqa: F401 - makes the URL known

    sys.path.append(os.environ["CELERY_SOURCES"])
