"""Runnable Spark jobs on the data source of ``queueapp.spark``, and what they need to start."""
