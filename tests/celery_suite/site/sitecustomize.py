"""For the processes that Celery's tests start: their apps do not import ``queueapp.contrib.celery``, as those of a
project do, and they find modules of Celery's sources behind the installed Celery."""

import os
import sys

if "TEST_BROKER" in os.environ:
    import queueapp.contrib.celery  # noqa: F401 - makes the URL known

    sys.path.append(os.environ["CELERY_SOURCES"])
