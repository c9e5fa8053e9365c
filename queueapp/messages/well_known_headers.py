"""What the well-known headers of a message say, as properties."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from .header_names import CONVERSATION_ID, CORRELATION_ID, RELATED_TO, REPLY_TO, TYPE
from .headers import time_sent, well_known


class WellKnown:
    """For what has ``headers``: what the well-known ones of them say, whichever wire format the message came in."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def headers(self) -> Mapping[str, str]: ...

    @property
    def message_type(self) -> str:
        """The name of its type; '' for a message without one."""
        return well_known(self.headers, TYPE) or ""

    @property
    def correlation_id(self) -> str | None:
        """What it answers to or belongs to, whichever wire format it came in."""
        return well_known(self.headers, CORRELATION_ID)

    @property
    def reply_to(self) -> str | None:
        """Where its sender wants answers."""
        return well_known(self.headers, REPLY_TO)

    @property
    def related_to(self) -> str | None:
        """The id of the message whose handler sent it."""
        return well_known(self.headers, RELATED_TO)

    @property
    def conversation_id(self) -> str | None:
        """What NServiceBus endpoints give to all that came of one message."""
        return well_known(self.headers, CONVERSATION_ID)

    @property
    def sent_at(self) -> datetime | None:
        """When its sender sent it, if it said so (NServiceBus endpoints do)."""
        return time_sent(self.headers)
