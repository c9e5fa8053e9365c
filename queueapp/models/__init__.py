"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .alert import Alert, SparkCommit, SubjectKey
from .bulk_operation import BulkOperation
from .delivery import Delivery, Semantics
from .fields import BytesField, GuidField, NaiveUtcField, Now, OrderingKeyField, UtcField, distinct_values
from .group import GroupAddition, GroupMember, GroupMessage, MessageGroup
from .journal import CreateJournal, JournalCopied, JournalCursor, JournalEntry
from .message_key import DeferredAck, MessageKey, ProcessedMessage
from .queue import QueueBase, QueueModel
from .schedule import Misfire, Schedule
from .snapshot import QueueSnapshot
from .stored_message import BarrierDelivery, DelayedMessage, ForwardedMessage, PoisonMessage, StoredMessage
from .subscribers import (
    DISPATCHER,
    MAINTENANCE,
    NO_QUEUES,
    ClaimRecord,
    FairTurn,
    Leader,
    QueueControl,
    Subscriber,
    Subscription,
    TokenBucket,
)
from .table_options import Priority64Index, RowVersionIndex, TableOptions

__all__ = [
    "DISPATCHER",
    "MAINTENANCE",
    "NO_QUEUES",
    "Alert",
    "BarrierDelivery",
    "BulkOperation",
    "BytesField",
    "ClaimRecord",
    "CreateJournal",
    "DeferredAck",
    "DelayedMessage",
    "Delivery",
    "FairTurn",
    "ForwardedMessage",
    "GroupAddition",
    "GroupMember",
    "GroupMessage",
    "GuidField",
    "JournalCopied",
    "JournalCursor",
    "JournalEntry",
    "Leader",
    "MessageGroup",
    "MessageKey",
    "Misfire",
    "NaiveUtcField",
    "Now",
    "OrderingKeyField",
    "PoisonMessage",
    "Priority64Index",
    "ProcessedMessage",
    "QueueBase",
    "QueueControl",
    "QueueModel",
    "QueueSnapshot",
    "RowVersionIndex",
    "Schedule",
    "Semantics",
    "SparkCommit",
    "StoredMessage",
    "SubjectKey",
    "Subscriber",
    "Subscription",
    "TableOptions",
    "TokenBucket",
    "UtcField",
    "distinct_values",
]
