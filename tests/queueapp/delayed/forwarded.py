"""What the tests of forwarding share: messages for a queue of the warehouse, kept in the default database."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from queueapp import delayed
from queueapp.models import ForwardedMessage, Now
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.workload.routes import WAREHOUSE
from tests.testapp.models import Transactional

ADDRESS = "testapp.Transactional@warehouse"
NOW, HOUR = timedelta(0), timedelta(hours=1)


def keep(body: Any = None, delay: timedelta = NOW, **options: Any) -> uuid.UUID:
    return Transactional.send(body or {"n": 1}, delay=delay, delayed_in="default", **options)


def forward(**options: Any) -> delayed.Dispatched:
    return delayed.forward_due("default", WAREHOUSE, 500, **options)


def there() -> list[Any]:
    return list(Transactional.objects.order_by("seq"))


def old_notes() -> None:
    ForwardedMessage.objects.using(WAREHOUSE).update(arrived_at=Now() - HOUR)


def failing(two: TwoDatabases, table: str, code: str, on: str = "true") -> None:
    """Whatever is put into a table there is refused with this SQLSTATE."""
    two.there.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN RAISE EXCEPTION 'refused here' USING ERRCODE = '{code}'; END$$"
    )
    two.there.execute(f"CREATE TRIGGER fail BEFORE INSERT ON {table} FOR EACH ROW WHEN ({on}) EXECUTE FUNCTION fail()")


def healthy(two: TwoDatabases) -> None:
    two.there.execute("DROP FUNCTION fail() CASCADE")
