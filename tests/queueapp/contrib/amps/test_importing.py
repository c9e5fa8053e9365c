"""The classes that are printed are queues: they are imported, have tables, and take the options that they say."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.checks import run_checks

from queueapp.contrib.amps.convert import as_python
from queueapp.registry import queues
from tests.docs.running import run_blocks

from .importing import configuration, import_text, queue
from .test_elements import OPTIONS

#: One queue for what does not go together; each element is in one of them.
QUEUES = [
    queue(
        """<UnderlyingTopic>^orders/</UnderlyingTopic><DefaultPublishTarget>orders/new</DefaultPublishTarget>
        <Filter>/side = 'buy' AND /n &gt; 0</Filter><Semantics>at-least-once</Semantics><LeasePeriod>30s</LeasePeriod>
        <Leasing>strict</Leasing><MaxDeliveries>5</MaxDeliveries><MaxCancels>2</MaxCancels><Expiration>1h</Expiration>
        <ExpirationModel>earliest</ExpirationModel><DeferredAckExpiration>2h</DeferredAckExpiration>
        <MaxBacklog>1k</MaxBacklog><MaxPerSubscriptionBacklog>10</MaxPerSubscriptionBacklog>
        <FairnessModel>round-robin</FairnessModel><Priority>/priority</Priority>
        <FileBackedMetadata>enabled</FileBackedMetadata>""",
        name="orders/bought",
    ),
    queue("<BarrierExpression>/isSyncPoint IS NOT NULL</BarrierExpression>", name="end of day"),
    queue(
        "<TargetQueueDepth>12500</TargetQueueDepth><RecoveryPoint>20141031T140000.25Z</RecoveryPoint>",
        name="deep queue",
    ),
    queue("<Semantics>at-most-once</Semantics><MaxBacklog>50</MaxBacklog>", name="ticks"),
    queue(name="plain"),
]
LOGGED = "".join(
    f"<Topic><Name>{name}</Name><MessageType>json</MessageType></Topic>" for name in ("^orders/", "deep queue", "plain")
)


def source(directory: Path) -> str:
    imported = import_text(configuration(*QUEUES, logged=LOGGED), directory)
    assert imported.unmapped == []
    return as_python(imported, "shop")


def test_every_option_is_written_in_one_of_the_classes(tmp_path: Path) -> None:
    written = set(re.findall(r"^        (\w+) = ", source(tmp_path), re.MULTILINE))
    assert written == OPTIONS | {"app_label", "db_table", "attempts", "on_expired"}


@pytest.mark.django_db(transaction=True)
def test_the_classes_are_queues_that_pass_the_checks(tmp_path: Path, settings: object) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^orders/": None, "deep queue": None, "plain": None}}  # type: ignore[attr-defined]
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{source(tmp_path)}```\n")
    with run_blocks(page) as module:
        made = [queues.find(f"shop.{name}") for name in ("OrdersBought", "EndOfDay", "DeepQueue", "Ticks", "Plain")]
        for queue in made:
            assert getattr(module, queue.__name__) is queue
            assert queue.objects.count() == 0
            assert [found for found in run_checks() if found.obj is queue] == []
        module.Plain.send({"n": 1})
        with module.Plain.receive(lease_period=timedelta(minutes=1)) as batch:
            for message in batch:
                assert message.body == {"n": 1}
                message.ack()
        assert module.Plain.objects.count() == 0
