"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .delayed import DelayedMessage
from .delivery import Delivery, Semantics
from .fields import BytesField, GuidField, Now, UtcField
from .foreign import NaiveUtcField
from .leader import Leader
from .poison import PoisonMessage
from .queue import QueueBase, QueueModel
from .spark_commit import SparkCommit
from .stored import StoredMessage
from .subscribers import DISPATCHER, QueueControl, Subscriber
from .table_options import TableOptions

__all__ = [
    "DISPATCHER",
    "BytesField",
    "DelayedMessage",
    "Delivery",
    "GuidField",
    "Leader",
    "NaiveUtcField",
    "Now",
    "PoisonMessage",
    "QueueBase",
    "QueueControl",
    "QueueModel",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "Subscriber",
    "TableOptions",
    "UtcField",
]
