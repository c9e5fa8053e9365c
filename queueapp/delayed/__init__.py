"""The delayed store: messages wait here until they are due, then go to their queue."""

from .by_hand import cancel, make_due, reschedule
from .dispatching import Dispatched, dispatch_due, dispatch_next, next_due_in, undeliverable
from .sql_store import SqlDelayedStore
from .store import Delayed, DelayedStore, DelayedStoreWithInfrastructure, store_class, store_of

__all__ = [
    "Delayed", "DelayedStore", "DelayedStoreWithInfrastructure", "Dispatched", "SqlDelayedStore", "cancel", "dispatch_due",
    "dispatch_next", "make_due", "next_due_in", "reschedule", "store_class", "store_of", "undeliverable",
]  # fmt: skip
