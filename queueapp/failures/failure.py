"""One failed attempt, as recoverability policies and the receivers of signals see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import messages
from ..conf import settings
from ..consuming.registration import Registration
from ..errors import UndecodableMessage
from ..sql.message_columns import Row


@dataclass(slots=True)
class Failure:
    """One failed attempt as a policy sees it: ``policy(failure) -> verdict``. The row is as it is stored, so header
    changes of the failed handler are not here; its deliveries count this hand-out. ``attempt``: how many have failed by
    now, this one included. Where no handler was involved (a delayed message that could not be forwarded, one that was
    moved by hand) there is no consumer, and where the queue is unknown, no queue."""

    queue: Any
    consumer: Registration | None
    row: Row
    exception: BaseException
    attempt: int
    items: dict[str, Any] = field(default_factory=dict)
    #: The limits of its queue that it has reached with this attempt, if that is why it ends.
    reasons: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """The stored headers; empty when they do not parse."""
        try:
            return messages.decode_headers(self.row.headers)
        except UndecodableMessage:
            return {}

    @property
    def message_type(self) -> str:
        """The type that the headers name; '' where they name none, or do not parse."""
        try:
            return messages.read_head(self.row.headers)[0]
        except UndecodableMessage:
            return ""

    def option(self, name: str) -> Any:
        """An option of the consumer, or else of its queue, or else of the project (``attempts`` ->
        ``QUEUEAPP.ATTEMPTS``)."""
        value = self.consumer.option(name) if self.consumer is not None else getattr(self.queue.delivery, name)
        return value if value is not None else getattr(settings, name.upper())
