"""What is inside a message: its id, its headers and its typed body. No database here.

Headers are a JSON object of strings; two of them are ours: ``type`` (which class the body is) and ``content-type``.
A message of an NServiceBus endpoint carries the same facts under that system's names, and both are read. A body is
JSON by ``msgspec`` (structs, dataclasses, dicts), or raw bytes. What does not parse raises UndecodableMessage, and the
caller moves the row to poison with its bytes untouched.
"""

import uuid
from datetime import UTC, datetime

from .bodies import (
    Read,
    body_decoder,
    decode_body,
    encode,
    encode_alike,
    json_headers,
    read_as,
    read_stored,
    reader_of,
    type_headers,
)
from .codecs import codec_for, codec_of, register_codec
from .header_names import (
    ATTEMPTS,
    BASE_TYPES,
    BYTES,
    CONTENT_TYPE,
    CONVERSATION_ID,
    CORRELATION_ID,
    DEDUPE_KEY,
    EDIT_OF,
    ENCRYPT_FOR,
    ENCRYPTION_KEY,
    EXPIRED_FOR,
    EXPIRED_FROM,
    GROUP,
    GROUP_DONE,
    GROUP_FAILED,
    JSON,
    MAX_ADDRESS,
    MAX_RECIPIENT,
    MSGPACK,
    NSB_CONTENT_TYPE,
    NSB_CORRELATION_ID,
    NSB_INTENT,
    NSB_MESSAGE_ID,
    NSB_REPLY_TO,
    NSB_TIME,
    NSB_TIME_SENT,
    NSB_TYPES,
    ORDERING_KEY,
    RELATED_TO,
    REPLY_TO,
    SCHEDULE,
    SCHEDULED_FOR,
    TO_NSB,
    TOPIC,
    TYPE,
    TYPE_VERSION,
)
from .headers import (
    Kind,
    count_attempts,
    counted_attempts,
    counts_a_death,
    decode_headers,
    edit_of,
    edited_headers,
    encode_headers,
    read_head,
    read_kind,
    readable_headers,
    time_sent,
    type_label,
    versioned_name,
    well_known,
)
from .ids import as_uuid, first_of_many, id_sequence, new_id
from .types import (
    class_named,
    is_typed,
    known_as,
    message_type,
    missing_steps,
    type_name,
    type_name_of,
    type_names,
    type_version,
    unstorable,
    upcast,
)

__all__ = [
    "ATTEMPTS",
    "BASE_TYPES",
    "BYTES",
    "CONTENT_TYPE",
    "CONVERSATION_ID",
    "CORRELATION_ID",
    "DEDUPE_KEY",
    "EDIT_OF",
    "ENCRYPTION_KEY",
    "ENCRYPT_FOR",
    "EXPIRED_FOR",
    "EXPIRED_FROM",
    "GROUP",
    "GROUP_DONE",
    "GROUP_FAILED",
    "JSON",
    "MAX_ADDRESS",
    "MAX_RECIPIENT",
    "MSGPACK",
    "NSB_CONTENT_TYPE",
    "NSB_CORRELATION_ID",
    "NSB_INTENT",
    "NSB_MESSAGE_ID",
    "NSB_REPLY_TO",
    "NSB_TIME_SENT",
    "NSB_TYPES",
    "ORDERING_KEY",
    "RELATED_TO",
    "REPLY_TO",
    "SCHEDULE",
    "SCHEDULED_FOR",
    "TOPIC",
    "TYPE",
    "TYPE_VERSION",
    "Kind",
    "Read",
    "as_uuid",
    "body_decoder",
    "class_named",
    "codec_for",
    "codec_of",
    "count_attempts",
    "counted_attempts",
    "counts_a_death",
    "decode_body",
    "decode_headers",
    "edit_of",
    "edited_headers",
    "encode",
    "encode_alike",
    "encode_headers",
    "first_of_many",
    "id_sequence",
    "is_typed",
    "json_headers",
    "known_as",
    "message_type",
    "missing_steps",
    "new_id",
    "read_as",
    "read_head",
    "read_kind",
    "read_stored",
    "readable_headers",
    "reader_of",
    "register_codec",
    "time_sent",
    "to_nservicebus",
    "type_headers",
    "type_label",
    "type_name",
    "type_name_of",
    "type_names",
    "type_version",
    "unstorable",
    "upcast",
    "versioned_name",
    "well_known",
]


def to_nservicebus(headers: str, identity: uuid.UUID) -> str:
    """Stored headers under the names of NServiceBus' wire format, with its message id and time sent."""
    decoded = decode_headers(headers)
    bases = decoded.pop(BASE_TYPES, "")
    if bases and TYPE in decoded:
        decoded[TYPE] += f"; {bases}"
    nservicebus = {TO_NSB.get(name, name): value for name, value in decoded.items()}
    nservicebus.setdefault(NSB_MESSAGE_ID, str(identity))
    nservicebus.setdefault(NSB_CORRELATION_ID, nservicebus[NSB_MESSAGE_ID])
    nservicebus.setdefault(NSB_TIME_SENT, datetime.now(UTC).strftime(NSB_TIME))
    return encode_headers(nservicebus)
