"""The delayed store: messages wait here until they are due, then go to their queue."""

from .dispatch import (
    Agenda,
    Dispatched,
    DispatchFailed,
    FetchFailed,
    RecoveryFailed,
    StepFailed,
    agenda,
    dispatch_due,
    dispatch_next,
    is_idle,
    next_due_in,
    step,
    undeliverable,
)
from .forward import KEPT, can_tell, forget_arrivals, forward_due, next_forward_in
from .operations import (
    address_in,
    addressed,
    can_count,
    cancel,
    kept_in,
    make_due,
    name_of_other_store,
    readdress,
    reschedule,
    waiting,
)
from .store import (
    Delayed,
    DelayedStore,
    DelayedStoreWithInfrastructure,
    SqlDelayedStore,
    addresses,
    endpoint_of,
    is_built_in,
    open_for_any,
    open_for_dispatch,
    open_store,
    store_breaker,
    store_breakers,
    store_class,
    store_of,
    stores_of,
    storing,
)

__all__ = [
    "KEPT", "Agenda", "Delayed", "DelayedStore", "DelayedStoreWithInfrastructure", "DispatchFailed", "Dispatched",
    "FetchFailed", "RecoveryFailed", "SqlDelayedStore", "StepFailed", "address_in", "addressed", "addresses",
    "agenda", "can_count", "can_tell", "cancel", "dispatch_due", "dispatch_next", "endpoint_of", "forget_arrivals",
    "forward_due", "is_built_in", "is_idle", "kept_in", "make_due", "name_of_other_store", "next_due_in",
    "next_forward_in", "open_for_any", "open_for_dispatch", "open_store", "readdress", "reschedule", "step",
    "store_breaker", "store_breakers", "store_class", "store_of", "stores_of", "storing", "undeliverable", "waiting",
]  # fmt: skip
