"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .alert import Alert
from .barrier import BarrierDelivery
from .claim_record import ClaimRecord
from .deferred_ack import DeferredAck
from .delayed import DelayedMessage
from .delivery import Delivery, Semantics
from .fields import BytesField, GuidField, NaiveUtcField, Now, UtcField
from .forwarded_message import ForwardedMessage
from .journal import CreateJournal, JournalCopied, JournalCursor, JournalEntry
from .leader import Leader
from .loose_index_scan import distinct_values
from .message_key import MessageKey, ProcessedMessage
from .poison import PoisonMessage
from .priority64_index import Priority64Index
from .queue import QueueBase, QueueModel
from .spark_commit import SparkCommit
from .stored_message import StoredMessage
from .subject_key import SubjectKey
from .subscribers import DISPATCHER, MAINTENANCE, NO_QUEUES, FairTurn, QueueControl, Subscriber
from .subscription import Subscription
from .table_options import RowVersionIndex, TableOptions

__all__ = [
    "DISPATCHER",
    "MAINTENANCE",
    "NO_QUEUES",
    "Alert",
    "BarrierDelivery",
    "BytesField",
    "ClaimRecord",
    "CreateJournal",
    "DeferredAck",
    "DelayedMessage",
    "Delivery",
    "FairTurn",
    "ForwardedMessage",
    "GuidField",
    "JournalCopied",
    "JournalCursor",
    "JournalEntry",
    "Leader",
    "MessageKey",
    "NaiveUtcField",
    "Now",
    "PoisonMessage",
    "Priority64Index",
    "ProcessedMessage",
    "QueueBase",
    "QueueControl",
    "QueueModel",
    "RowVersionIndex",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "SubjectKey",
    "Subscriber",
    "Subscription",
    "TableOptions",
    "UtcField",
    "distinct_values",
]
