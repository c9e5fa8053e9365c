"""Messages that Celery itself would fail at, and that they are kept with the reason and their bytes."""

from __future__ import annotations

import json
from typing import Any

import kombu

from queueapp.contrib.celery.chords import is_id
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.contrib.celery.serialization import KOMBU
from queueapp.messages import CONTENT_TYPE, encode_headers
from queueapp.models import PoisonMessage

from . import celeryapp

RECORD = celeryapp.record.name
#: What Celery itself would fail at -> a part of the reason why it is kept.
MALFORMED: list[tuple[dict[str, Any], Any, str]] = [
    ({"task": 5, "id": "3"}, [["s"], {}, {}], "This worker has no task 5."),
    ({"task": "tests.nowhere.unknown", "id": "1\0"}, [["s"], {}, {}], "This worker has no task"),
    ({"task": []}, [["s"], {}, {}], "TypeError: unhashable type"),
    ({"task": RECORD}, [["s"], {}, {}], "KeyError: 'id'"),
    ({"task": RECORD, "id": []}, [["s"], {}, {}], "unhashable"),
    ({"task": RECORD, "id": "x" * 300, "eta": "yesterday"}, [["s"], {}, {}], "invalid ETA value 'yesterday'"),
    (
        {"task": RECORD, "id": "s", "eta": "0001-01-01T00:00:00+14:00"},
        [["s"], {}, {}],
        "The worker cannot wait for the eta '0001-01-01T00:00:00+14:00': date value out of range",
    ),
    ({"task": RECORD, "id": "s", "eta": ""}, [["s"], {}, {}], "AttributeError"),
    ({"task": RECORD, "id": "s", "expires": "never"}, [["s"], {}, {}], "invalid expires value 'never'"),
    ({"task": RECORD, "id": "s", "expires": {}}, [["s"], {}, {}], "AttributeError"),
    ({"task": RECORD, "id": "s", "retries": "x"}, [["s"], {}, {}], "the header 'retries' is 'x'"),
    ({"task": RECORD, "id": "s", "timelimit": 1}, [["s"], {}, {}], "'timelimit' is not a pair of seconds: 1"),
    ({"task": RECORD, "id": "s", "timelimit": [1, 2, 3]}, [["s"], {}, {}], "not a pair of seconds: [1, 2, 3]"),
    ({"task": RECORD, "id": "s", "timelimit": ["x", 1]}, [["s"], {}, {}], "not a pair of seconds: ['x', 1]"),
    ({"task": RECORD, "id": "s", "shadow": {"a": 1}}, [["s"], {}, {}], "the header 'shadow' is {'a': 1}"),
    ({"task": RECORD, "id": "s", "stamped_headers": 5}, [["s"], {}, {}], "the header 'stamped_headers' is 5"),
    ({"task": RECORD, "id": "s", "stamped_headers": [[]]}, [["s"], {}, {}], "not a list of names: [[]]"),
    ({"task": RECORD, "id": "s", "compression": "zlib"}, [["s"], {}, {}], "The body does not decode: error"),
    ({"task": RECORD, "id": "s"}, 5, "TypeError: argument of type 'int'"),
    ({"task": RECORD, "id": "s"}, {"args": [], "kwargs": 5}, "Task keyword arguments must be a mapping"),
    ({"task": RECORD, "id": "s"}, [["s"], {}], "not enough values to unpack"),
    ({"task": RECORD, "id": "s"}, [5, {}, {}], "the arguments are not a list: 5"),
    ({"task": RECORD, "id": "s"}, [["s"], 7, {}], "the keyword arguments are not a mapping: 7"),
    ({"task": RECORD, "id": "s"}, [["s"], {}, 5], "the third part of the body is not a mapping: 5"),
    (
        {"task": RECORD, "id": "s"},
        [["s"], {}, {"callbacks": 5}],
        "'callbacks' in the body is not a list of signatures: 5",
    ),
    ({"task": RECORD, "id": "s"}, [["s"], {}, {"errbacks": [5]}], "'errbacks' in the body is not a list of signatures"),
    ({"task": RECORD, "id": "s"}, [["s"], {}, {"chord": 5}], "'chord' in the body is not a signature: 5"),
    ({}, {"task": "tests.nowhere.unknown"}, "KeyError: 'id'"),
    ({}, {"task": RECORD, "id": "s", "args": ["s"], "timelimit": 4}, "not a pair of seconds: 4"),
    ({}, ["task"], "Rejected by its consumer."),
    ({"task": RECORD, "id": "s"}, b"pickled", "The body does not decode: ContentDisallowed"),
]


def send_malformed() -> None:
    """Each of them, into the queue of the workers. Ids that a publish refuses are written by SQL, as another program
    would."""
    with kombu.Connection("queueapp://") as conn:
        for headers, body, _ in MALFORMED:
            if not is_id(headers.get("id", "")) and isinstance(headers["id"], str):
                fields = json.dumps({"headers": headers, "properties": {}, "content-encoding": "utf-8"})
                stored = encode_headers({KOMBU: fields, CONTENT_TYPE: "application/json"})
                BrokerQueue.objects.create(recipient="celery", headers=stored, body=_bytes(body))
                continue
            conn.Producer().publish(
                _bytes(body),
                routing_key="celery",
                content_type="application/x-python-serialize" if isinstance(body, bytes) else "application/json",
                content_encoding="utf-8",
                headers=headers,
            )


def assert_kept() -> None:
    """Each of them is poison, with its bytes and why."""
    rows = PoisonMessage.objects.filter(queue=BrokerQueue._meta.label)
    kept = [(row.reason, _bytes(row.body)) for row in rows]
    for _, body, reason in MALFORMED:
        assert any(reason in found and _bytes(body) == there for found, there in kept), (reason, kept)


def _bytes(body: Any) -> bytes:
    return bytes(body) if isinstance(body, bytes | memoryview) else json.dumps(body).encode()
