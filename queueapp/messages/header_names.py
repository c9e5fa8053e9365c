"""The names of the headers that mean something: ours, and those of the NServiceBus wire format for the same facts."""

from __future__ import annotations

JSON = "application/json"

BYTES = "application/octet-stream"

MSGPACK = "application/msgpack"

TYPE = "type"

CONTENT_TYPE = "content-type"

#: Of a type with versions: which one the body is; without this header it is the first.
TYPE_VERSION = "type-version"

#: Of a type with typed bases: their names, the nearest first, as NServiceBus encloses them (``A; B``).
BASE_TYPES = "base-types"

#: Of an encrypted body: the id of the key it opens with.
ENCRYPTION_KEY = "encryption-key"
#: Given to a send, and never stored: the subject whose key it is to be encrypted with.
ENCRYPT_FOR = "encrypt-for"

CORRELATION_ID = "correlation-id"

REPLY_TO = "reply-to"

#: Of a message whose sender gave its dedupe key: the digest of that key.
DEDUPE_KEY = "dedupe-key"

#: Of a message of a queue with ``Delivery.ordering``: messages with one key are handled in order.
ORDERING_KEY = "ordering-key"

#: In what a handler sent: the id of the message that it was handling.
RELATED_TO = "related-to"

CONVERSATION_ID = "conversation-id"

#: Of a message that was published: the topic it was published to.
TOPIC = "topic"

#: Of a message that a schedule sent: its name, and the time that the run was for (ISO 8601, UTC).
SCHEDULE = "schedule"
SCHEDULED_FOR = "scheduled-for"

#: Of a member of a group, and of the group's completion message: the group's id. Of the latter also how many members
#: were handled, and how many have failed.
GROUP = "group-id"
GROUP_DONE = "group-done"
GROUP_FAILED = "group-failed"

#: In a message that was edited out of poison: the id of the one it replaces.
EDIT_OF = "edit-of"

#: In a message that was published because its queue gave it up: which queue, and for which reasons.
EXPIRED_FROM = "expired-from"
EXPIRED_FOR = "expired-for"

#: The same facts under the names of the NServiceBus wire format, read from and written to foreign tables.
NSB_MESSAGE_ID = "NServiceBus.MessageId"

NSB_CORRELATION_ID = "NServiceBus.CorrelationId"

NSB_REPLY_TO = "NServiceBus.ReplyToAddress"

NSB_RELATED_TO = "NServiceBus.RelatedTo"

NSB_CONVERSATION_ID = "NServiceBus.ConversationId"

#: What a message is for; "Reply" in an answer.
NSB_INTENT = "NServiceBus.MessageIntent"

NSB_TYPES = "NServiceBus.EnclosedMessageTypes"

NSB_CONTENT_TYPE = "NServiceBus.ContentType"

NSB_TIME_SENT = "NServiceBus.TimeSent"

TO_NSB = {
    TYPE: NSB_TYPES,
    CONTENT_TYPE: NSB_CONTENT_TYPE,
    CORRELATION_ID: NSB_CORRELATION_ID,
    REPLY_TO: NSB_REPLY_TO,
    RELATED_TO: NSB_RELATED_TO,
    CONVERSATION_ID: NSB_CONVERSATION_ID,
}

MAX_RECIPIENT = 200

MAX_ADDRESS = 255

#: Where the failed attempts of a message are counted in a table that has no column for it.
ATTEMPTS = "queueapp.Attempts"
#: There as well: one of them ended with the process that made it.
DIED = "queueapp.Died"

#: How far the attempts before have got.
CHECKPOINT = "queueapp.Checkpoint"

NSB_TIME = "%Y-%m-%d %H:%M:%S:%f Z"
