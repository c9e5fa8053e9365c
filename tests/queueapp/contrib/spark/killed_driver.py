"""A driver program that stands still at a moment of its commit, to be killed there.

``python -m tests.queueapp.contrib.spark.killed_driver KIND FOLDER PUBLISH_ID``: the folder gets a file "reached".
"""

from __future__ import annotations

import sys
from pathlib import Path

import django

ROWS = 300


def main(kind: str, folder: str, publish_id: str) -> None:
    django.setup()
    from project.java import find_java
    from queueapp.contrib.spark.targets import take_snapshot
    from tests.queueapp.contrib.spark.samples import failing_source
    from workers.spark.session import local_session

    java = find_java()
    assert java is not None
    spark = local_session("killed", java_home=java.home, log=Path(folder, "spark.log"))
    spark.dataSource.register(failing_source(take_snapshot(), kind, Path(folder)))
    frame = spark.range(0, ROWS, 1, 3).selectExpr("cast(id as string) as body")
    writer = frame.write.format("failing_queue").option("queue", "testapp.Leased").option("publish_id", publish_id)
    writer.mode("append").save()


if __name__ == "__main__":
    main(*sys.argv[1:])
