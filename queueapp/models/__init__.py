"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .arrival import Arrival
from .delayed import DelayedMessage
from .delivery import Delivery, Semantics
from .fields import BytesField, GuidField, Now, UtcField
from .foreign import NaiveUtcField
from .leader import Leader
from .poison import PoisonMessage
from .queue import QueueBase, QueueModel
from .row_version import RowVersionIndex
from .spark_commit import SparkCommit
from .stepping import each_value
from .stored import StoredMessage
from .subscribers import DISPATCHER, HOUSEKEEPING, NO_QUEUES, QueueControl, Subscriber
from .table_options import TableOptions

__all__ = [
    "DISPATCHER",
    "HOUSEKEEPING",
    "NO_QUEUES",
    "Arrival",
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
    "RowVersionIndex",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "Subscriber",
    "TableOptions",
    "UtcField",
    "each_value",
]
