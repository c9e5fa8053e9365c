"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .alert import Alert
from .barrier import BarrierDelivery
from .claim_record import ClaimRecord
from .deferred_ack import DeferredAck
from .delayed import DelayedMessage
from .delivery import Delivery, Semantics
from .distinct_values import each_value
from .fields import BytesField, GuidField, Now, UtcField
from .foreign import NaiveUtcField
from .forwarded_message import Arrival
from .journal import JournalCopied, JournalCursor, JournalEntry
from .journal_partitions import CreateJournal
from .leader import Leader
from .message_key import MessageKey, ProcessedMessage
from .poison import PoisonMessage
from .priority64_index import RankIndex
from .queue import QueueBase, QueueModel
from .row_version import RowVersionIndex
from .spark_commit import SparkCommit
from .stored_message import StoredMessage
from .subject_key import SubjectKey
from .subscribers import DISPATCHER, MAINTENANCE, NO_QUEUES, FairTurn, QueueControl, Subscriber
from .subscription import Subscription
from .table_options import TableOptions

__all__ = [
    "DISPATCHER",
    "MAINTENANCE",
    "NO_QUEUES",
    "Alert",
    "Arrival",
    "BarrierDelivery",
    "BytesField",
    "ClaimRecord",
    "CreateJournal",
    "DeferredAck",
    "DelayedMessage",
    "Delivery",
    "FairTurn",
    "GuidField",
    "JournalCopied",
    "JournalCursor",
    "JournalEntry",
    "Leader",
    "MessageKey",
    "NaiveUtcField",
    "Now",
    "PoisonMessage",
    "ProcessedMessage",
    "QueueBase",
    "QueueControl",
    "QueueModel",
    "RankIndex",
    "RowVersionIndex",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "SubjectKey",
    "Subscriber",
    "Subscription",
    "TableOptions",
    "UtcField",
    "each_value",
]
