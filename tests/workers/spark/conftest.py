"""The session of the data source's tests."""

from tests.queueapp.contrib.spark.conftest import event_log, publish, spark, spark_log, spark_session

__all__ = ["event_log", "publish", "spark", "spark_log", "spark_session"]
