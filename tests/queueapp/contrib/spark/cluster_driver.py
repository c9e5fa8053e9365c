"""A driver program on a standalone cluster, whose master and two workers are in its JVM; their executors are processes.

The workers have different addresses, because Spark runs no speculative attempt on a host that has one of the task.

``python -m tests.queueapp.contrib.spark.cluster_driver FOLDER``: first the jobs of ``RUDE``, which end; then a batch
job and a streaming query for each of ``KINDS``, whose commits stand still, for the driver to be killed. The folder
gets a file for each that has come so far. ``FOLDER/in`` is what the queries read.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import django
from django.db import connection
from pyspark import SparkConf, SparkContext

from tests.queueapp.contrib.spark.samples import AFTER, BEFORE, EXECUTOR_KILLED, FIRST_ATTEMPT, MIDDLE, SPECULATED

ROWS = 60
RUDE = (FIRST_ATTEMPT, SPECULATED, EXECUTOR_KILLED)
KINDS = (BEFORE, MIDDLE, AFTER)
#: The files that show that a commit stands.
MARKS = [f"{way} {kind}" for way in ("batch", "stream") for kind in KINDS]

_SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_CLUSTER = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": _SMALL,
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "200ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.25",
}


def start_cluster(work: Path) -> str:
    """Start a master and two workers with one core each; returns the master's URL."""
    SparkContext._ensure_initialized(conf=SparkConf().set("spark.driver.extraJavaOptions", _SMALL))
    jvm, gateway = SparkContext._jvm, SparkContext._gateway
    assert jvm is not None
    assert gateway is not None
    conf, deploy = jvm.org.apache.spark.SparkConf(), jvm.org.apache.spark.deploy
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)
    urls = gateway.new_array(jvm.String, 1)
    urls[0] = f"spark://127.0.0.1:{master._1().address().port()}"
    for number in (2, 3):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            f"127.0.0.{number}", 0, 0, 1, 512, urls, str(work), jvm.scala.Option.apply(number), conf,
            jvm.scala.Option.empty(),
        )  # fmt: skip
    return str(urls[0])


def body_of(kind: str) -> str:
    """The bodies of a batch job, as an expression over the column id."""
    return f"concat('batch {kind} ', id) as body"


def main(folder: Path) -> None:
    django.setup()
    from project.java import find_java
    from queueapp.contrib.spark.targets import take_snapshot
    from tests.queueapp.contrib.spark.samples import failing_source
    from workers.spark.session import local_session

    java = find_java()
    assert java is not None
    os.environ |= {"JAVA_HOME": str(java.home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.getcwd()}
    spark = local_session("cluster", settings={**_CLUSTER, "spark.master": start_cluster(folder / "work")})
    snapshot = take_snapshot()
    with connection.cursor() as cursor:
        cursor.execute("SHOW max_prepared_transactions")
        prepares = cursor.fetchone() != ("0",)

    def write(kind: str) -> None:
        frame = spark.createDataFrame([(number,) for number in range(ROWS)], "id int").repartition(3)
        writer = frame.selectExpr(body_of(kind)).write.format(sources[kind]).option("queue", "testapp.Leased")
        writer.options(publish_id=kind, two_phase=kind == SPECULATED and prepares).mode("append").save()

    sources = {}
    for kind in (*RUDE, *KINDS):
        source = failing_source(snapshot, kind, folder)
        spark.dataSource.register(source)
        sources[kind] = source.name()
    for kind in RUDE:
        write(kind)
    for kind in KINDS:
        lines = spark.readStream.schema("body string").text(str(folder / "in"))
        query = lines.selectExpr(f"concat('stream {kind} ', body) as body").writeStream.format(sources[kind])
        query.options(queue="testapp.Leased", checkpointLocation=str(folder / kind)).trigger(availableNow=True).start()
        threading.Thread(target=write, args=(kind,)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
