"""The models: the table of a queue, and the tables that belong to all queues of a database."""

from .alert import Alert, SparkCommit, SubjectKey
from .delivery import Delivery, Semantics
from .fields import (
    BytesField,
    FairKeyField,
    GuidField,
    NaiveUtcField,
    Now,
    OrderingKeyField,
    UtcField,
    distinct_values,
)
from .group import GroupAddition, GroupMember, GroupMessage, MessageGroup
from .journal import CreateJournal, JournalCopied, JournalCursor, JournalEntry
from .ledger import LedgerCheck, LedgerEntry
from .message_records import DeferredAck, MessageKey, MessageResult, ProcessedMessage
from .operations import BulkOperation, QueueSnapshot
from .queue import QueueBase, QueueModel
from .schedule import Misfire, Schedule
from .stored_message import BarrierDelivery, DelayedMessage, ForwardedMessage, PoisonMessage, PoisonNote, StoredMessage
from .subscribers import (
    DISPATCHER,
    MAINTENANCE,
    NO_QUEUES,
    ClaimRecord,
    FairTurn,
    KeyTokenBucket,
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
    "FairKeyField",
    "FairTurn",
    "ForwardedMessage",
    "GroupAddition",
    "GroupMember",
    "GroupMessage",
    "GuidField",
    "JournalCopied",
    "JournalCursor",
    "JournalEntry",
    "KeyTokenBucket",
    "Leader",
    "LedgerCheck",
    "LedgerEntry",
    "MessageGroup",
    "MessageKey",
    "MessageResult",
    "Misfire",
    "NaiveUtcField",
    "Now",
    "OrderingKeyField",
    "PoisonMessage",
    "PoisonNote",
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
