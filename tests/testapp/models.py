"""One queue per semantics and per table shape, and the ledger that crash tests compare with."""

from datetime import timedelta

from django.db import models

from queueapp import ForeignQueue, ForeignSqlServerQueue, Queue, Semantics

from . import leases  # noqa: F401
from .batched import InSets as InSets
from .batched import Several as Several
from .batched import SeveralTransactional as SeveralTransactional
from .batched import Together as Together
from .encoded import Secret as Secret
from .encoded import SecretExpiring as SecretExpiring
from .encoded import SecretOnce as SecretOnce
from .encoded import SecretTransactional as SecretTransactional
from .encoded import Smaller as Smaller
from .flow import Capped as Capped
from .flow import CappedEach as CappedEach
from .flow import CappedOnce as CappedOnce
from .flow import CappedTransactional as CappedTransactional
from .flow import CappedUrgent as CappedUrgent
from .flow import Followed as Followed
from .flow import FollowedTogether as FollowedTogether
from .flow import FollowedTransactional as FollowedTransactional
from .flow import Grouped as Grouped
from .flow import GroupedTogether as GroupedTogether
from .flow import GroupedTransactional as GroupedTransactional
from .flow import InProportion as InProportion
from .flow import InTurns as InTurns
from .flow import InTurnsOnce as InTurnsOnce
from .flow import Ledgered as Ledgered
from .flow import LedgeredOnce as LedgeredOnce
from .flow import LedgeredTogether as LedgeredTogether
from .flow import LedgeredTransactional as LedgeredTransactional
from .flow import LedgeredWholly as LedgeredWholly
from .flow import LimitedPerKey as LimitedPerKey
from .flow import LimitedPerKeyTransactional as LimitedPerKeyTransactional
from .flow import Ordered as Ordered
from .flow import OrderedPassing as OrderedPassing
from .flow import OrderedTransactional as OrderedTransactional
from .flow import Rated as Rated
from .flow import RatedOnce as RatedOnce
from .flow import RatedPerKey as RatedPerKey
from .flow import RatedPerKeyFast as RatedPerKeyFast
from .flow import RatedPerKeyTransactional as RatedPerKeyTransactional
from .flow import RatedTransactional as RatedTransactional
from .flow import Shared as Shared
from .flow import SharedTransactional as SharedTransactional
from .flow import Weighted as Weighted
from .keyed import Keyed as Keyed
from .keyed import KeyedOnce as KeyedOnce
from .keyed import KeyedTransactional as KeyedTransactional


class Leased(Queue):
    """AT_LEAST_ONCE, plain first in first out."""

    class Delivery:
        semantics = Semantics.AT_LEAST_ONCE
        lease_period = timedelta(seconds=5)


class Transactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        #: Of no account where it lies there itself, which is everywhere but in the tests with two databases.
        delayed_in = ("default",)


class AtMostOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE


class Urgent(Queue):
    """Three priority levels."""

    class Delivery:
        priorities = 3
        lease_period = timedelta(seconds=5)


class Addressed(Queue):
    """A copy per consumer."""

    class Delivery:
        recipients = True
        lease_period = timedelta(seconds=5)


class AddressedUrgent(Queue):
    """Recipients and levels together."""

    class Delivery:
        recipients = True
        priorities = 3
        semantics = Semantics.TRANSACTIONAL


class AddressedOnce(Queue):
    """Copies that are received at most once."""

    class Delivery:
        recipients = True
        semantics = Semantics.AT_MOST_ONCE


class Readable(Queue):
    """With the generated readable body, and a name that needs quoting."""

    class Meta:
        db_table = "odd 'name' [of a Tësch"  # a closing bracket is not quoted right by mssql-django

    class Delivery:
        body_string = True


class Short(Queue):
    """Messages expire by themselves."""

    class Delivery:
        expiration = timedelta(seconds=30)


class Interop(Queue):
    """A table of our own that endpoints of NServiceBus use as well."""

    wire_format = "nservicebus"

    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class Effect(models.Model):
    """One row per effect of a handler: what a message did, written in the handler's transaction."""

    name = models.CharField(max_length=100, db_index=True)
    detail = models.CharField(max_length=200, default="")
    at = models.DateTimeField(auto_now_add=True)


class ForeignPostgres(ForeignQueue):
    """A table as NServiceBus' PostgreSQL transport makes it; tests create it by hand."""

    class Meta:
        db_table = "foreign_postgres"


class ForeignSqlServer(ForeignSqlServerQueue):
    """A table as NServiceBus' SQL Server transport makes it."""

    class Meta:
        db_table = "foreign_sqlserver"


from . import ordering as ordering  # noqa: E402  queues with an order of their own
from .journaled import *  # noqa: E402, F403
from .task_queues import AtMostOnceTasks, TransactionalTasks  # noqa: E402, F401  models of this app
from .topics import *  # noqa: E402, F403  (queues of one subject, in a module of their own)
