"""``manage.py sparkjob``: files into queues, the journal into files, poison, and what is compared."""

from __future__ import annotations

import io
import json
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command

from queueapp import messages, publish_many
from queueapp.failures.poison_store import insert_poison
from queueapp.models import JournalEntry, PoisonMessage
from queueapp.sql.message_columns import Row
from tests.queueapp.contrib.spark.samples import Counted
from tests.testapp.models import Leased, Recovered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
COUNTED = "tests.queueapp.contrib.spark.samples.Counted"
TOPIC = "journaled.orders"


def run(*arguments: Any) -> dict[str, Any]:
    out = io.StringIO()
    call_command("sparkjob", "--json", *map(str, arguments), stdout=out)
    return json.loads(out.getvalue())  # type: ignore[no-any-return]


def bodies() -> list[bytes]:
    return sorted(bytes(body) for body in Leased.objects.values_list("body", flat=True))


def test_files_are_published_once_with_a_mapping(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("no,text,other\n1,a,x\n2,b,y\n")
    command = ("publish", tmp_path / "in.csv", "--queue", "testapp.Leased", "--message-type", COUNTED)
    mapped = (*command, "--map", "number=no", "--publish-id", "in.csv")
    assert run(*mapped) == {"published": 2}
    assert run(*mapped) == {"published": 0}
    assert bodies() == [messages.encode(Counted(1, "a"))[1], messages.encode(Counted(2, "b"))[1]]
    with pytest.raises(CommandError, match="have no columns number_of; they have no, text, other"):
        run(*command, "--map", "number=number_of")
    (tmp_path / "in.csv").write_text("no,text\none,a\n")
    with pytest.raises(CommandError, match="CAST_INVALID_INPUT"):
        run(*command, "--map", "number=no")
    assert len(bodies()) == 2


def test_columns_without_a_class_become_an_object(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"n": 1, "s": null}\n{"n": 2, "s": "x"}\n')
    assert run("publish", tmp_path / "in.jsonl", "--topic", TOPIC) == {"published": 2}
    published = [json.loads(bytes(body)) for body in JournalEntry.objects.values_list("body", flat=True)]
    assert sorted(published, key=lambda body: body["n"]) == [{"n": 1, "s": None}, {"n": 2, "s": "x"}]


def test_the_journal_is_archived_day_by_day_and_compared(spark: SparkSession, tmp_path: Path) -> None:
    days = [datetime(2026, 11, day, 23, 59, tzinfo=UTC) for day in (3, 4, 6)]
    for day in days:
        publish_many(TOPIC, ({"n": n} for n in range(10)))
        JournalEntry.objects.filter(published_at__gt=days[-1] + timedelta(days=1)).update(published_at=day)
    folder = tmp_path / "archive"
    first = run("archive", TOPIC, folder, "--until", "2026-11-05")["days"]
    assert [(day["day"], day["rows"], day["new"]) for day in first] == [
        ("2026-11-03", 10, True),
        ("2026-11-04", 10, True),
    ]
    # Killed before the second day was verified: half of its files are there, and no row of the manifest.
    spark.createDataFrame(
        [(first[0]["day"], 10, first[0]["checksum"])], "day string, rows long, checksum string"
    ).write.mode("overwrite").parquet(f"{folder}/manifest")
    next((folder / "entries" / "day=2026-11-04").glob("*.parquet")).unlink()
    again = run("archive", TOPIC, folder, "--until", "2026-11-08")["days"]
    assert listed(again) == [
        ("2026-11-03", 10, False), ("2026-11-04", 10, True), ("2026-11-05", 0, True), ("2026-11-06", 10, True),
        ("2026-11-07", 0, True),
    ]  # fmt: skip
    archived = spark.read.parquet(f"{folder}/entries").select("seq", "body").collect()
    stored = JournalEntry.objects.values_list("seq", "body")
    assert sorted((row[0], bytes(row[1])) for row in archived) == sorted((seq, bytes(body)) for seq, body in stored)

    queue = Recovered._meta.label
    assert run("reconcile", f"topic:{TOPIC}", queue) == {
        "both": 30, "only_left": 0, "only_right": 0, "examples": [], "agree": True
    }  # fmt: skip
    gone = Recovered.objects.order_by("seq")[0]
    gone.delete()
    with pytest.raises(CommandError, match="They differ"):
        run("reconcile", queue, f"{folder}/entries/day=2026-11-03/")


def listed(days: list[dict[str, Any]]) -> list[tuple[str, int, bool]]:
    return [(day["day"], day["rows"], day["new"]) for day in days]


def test_poison_is_analysed_and_requeued_by_a_condition(spark: SparkSession) -> None:
    for error in (ConnectionError, ConnectionError, ValueError):
        row = Row(0, uuid.uuid4(), "{}", b"{}")
        insert_poison("default", "testapp.Leased", row, "no", attempts=3, exception=error("no"))
    groups = run("poison", "testapp.Leased")["groups"]
    assert [(group["exception_type"], group["messages"]) for group in groups] == [
        ("ConnectionError", 2),
        ("ValueError", 1),
    ]
    assert run("requeue", "testapp.Leased", "--where", "exception_type = 'ConnectionError'") == {"requeued": 2}
    assert (Leased.objects.count(), PoisonMessage.objects.count()) == (2, 1)


def test_python_workers_import_the_installed_packages(spark: SparkSession) -> None:
    """Not those of Spark's zips, which each process would compile anew."""

    def files(number: int) -> list[str]:
        import py4j
        import pyspark

        return [str(package.__file__) for package in (py4j, pyspark)]

    assert spark.sparkContext.range(1).map(files).collect() == [files(0)]
