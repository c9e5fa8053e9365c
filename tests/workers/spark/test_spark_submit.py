"""A job by ``spark-submit``, as docs/howto/spark-jobs.md has it: its JVM and its settings, not a session of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from project.java import find_java
from queueapp.models import SparkCommit
from tests.testapp.models import Leased

CHECKOUT = Path(__file__).parents[3]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_a_job_runs_by_spark_submit(transactional_db: None, child_environment: dict[str, str], tmp_path: Path) -> None:
    java = find_java()
    if java is None:
        pytest.skip("Spark needs Java 17 or newer, and none was found")
    (tmp_path / "in.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    submit = [
        Path(pyspark.__file__).parent / "bin" / "spark-submit", "--master", "local[1]", "--name", "nightly",
        "--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "--conf", "spark.ui.enabled=false",
    ]  # fmt: skip
    job = [CHECKOUT / "manage.py", "sparkjob", "--json", "publish", tmp_path / "in.jsonl", "--queue", "testapp.Leased"]
    environment = child_environment | {"JAVA_HOME": str(java.home), "PYSPARK_PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [*map(str, submit), *map(str, job), "--publish-id", "nightly"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Spark writes what the program writes to stderr to its own stdout.
    assert json.loads(done.stdout.splitlines()[-1]) == {"published": 2}
    assert sorted(bytes(body) for body in Leased.objects.values_list("body", flat=True)) == [b"one", b"two"]
    assert SparkCommit.objects.get().publish_id == "nightly"
