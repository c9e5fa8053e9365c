"""Runnable Spark jobs on the data source of ``queueapp.contrib.spark``, and what they need to start."""
