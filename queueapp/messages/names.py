"""The names of the headers that mean something: ours, and those of the NServiceBus wire format for the same facts."""

from __future__ import annotations

JSON = "application/json"

BYTES = "application/octet-stream"

TYPE = "type"

CONTENT_TYPE = "content-type"

CORRELATION_ID = "correlation-id"

REPLY_TO = "reply-to"

#: In a message that was edited out of poison: the id of the one it replaces.
EDIT_OF = "edit-of"

#: The same facts under the names of the NServiceBus wire format, read from and written to foreign tables.
NSB_MESSAGE_ID = "NServiceBus.MessageId"

NSB_CORRELATION_ID = "NServiceBus.CorrelationId"

NSB_REPLY_TO = "NServiceBus.ReplyToAddress"

NSB_TYPES = "NServiceBus.EnclosedMessageTypes"

NSB_CONTENT_TYPE = "NServiceBus.ContentType"

NSB_TIME_SENT = "NServiceBus.TimeSent"

TO_NSB = {
    TYPE: NSB_TYPES,
    CONTENT_TYPE: NSB_CONTENT_TYPE,
    CORRELATION_ID: NSB_CORRELATION_ID,
    REPLY_TO: NSB_REPLY_TO,
}

MAX_RECIPIENT = 200

MAX_ADDRESS = 255

#: Where the failed attempts of a message are counted in a table that has no column for it.
ATTEMPTS = "queueapp.Attempts"
#: There as well: one of them ended with the process that made it.
DIED = "queueapp.Died"

NSB_TIME = "%Y-%m-%d %H:%M:%S:%f Z"
