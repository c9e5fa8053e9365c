"""Who needs what: the package works without Spark, and Spark's executors work without Django's settings."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_neither_the_package_nor_its_statements_import_spark() -> None:
    run(
        "import sys, queueapp, queueapp.sql, queueapp.sql.postgresql.spark, queueapp.sql.sqlserver.spark, "
        "queueapp.contrib.spark\n"
        "loaded = {'pyspark', 'pyarrow', 'adbc_driver_manager', 'mssql_python', 'pandas'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )


def test_executors_need_no_django_settings() -> None:
    run(
        "import queueapp.contrib.spark.source, queueapp.contrib.spark.postgresql, queueapp.contrib.spark.writers, sys\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
        "assert 'adbc_driver_manager.dbapi' not in sys.modules"
    )
