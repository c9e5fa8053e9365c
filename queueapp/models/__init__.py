"""The models: the abstract ``Queue`` that users subclass, and the tables that belong to all queues of a database."""

from .delayed import DelayedMessage
from .delivery import Delivery, Semantics
from .fields import BytesField, GuidField, Now, UtcField
from .foreign import ForeignQueue, ForeignSqlServerQueue, NaiveUtcField
from .leader import Leader
from .poison import PoisonMessage
from .queue import Queue, QueueBase
from .spark_commit import SparkCommit
from .stored import StoredMessage
from .subscribers import QueueControl, Subscriber
from .table_options import TableOptions

__all__ = [
    "BytesField",
    "DelayedMessage",
    "Delivery",
    "ForeignQueue",
    "ForeignSqlServerQueue",
    "GuidField",
    "Leader",
    "NaiveUtcField",
    "Now",
    "PoisonMessage",
    "Queue",
    "QueueBase",
    "QueueControl",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "Subscriber",
    "TableOptions",
    "UtcField",
]
