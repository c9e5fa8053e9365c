"""Optional features, each a Django app of its own: Celery, Django's tasks, Spark, AMPS. Nothing of the core imports
them."""
