"""An app that fails in version 1 and is mended, in part, in version 2 (``QUEUEAPP_WORKER_VERSION``)."""
