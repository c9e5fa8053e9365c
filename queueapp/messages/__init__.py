"""What is inside a message: its id, its headers and its typed body. No database here.

Headers are a JSON object of strings; two of them are ours: ``type`` (which class the body is) and ``content-type``.
A message of an NServiceBus endpoint carries the same facts under that system's names, and both are read. A body is
JSON by ``msgspec`` (structs, dataclasses, dicts), or raw bytes. What does not parse raises UndecodableMessage, and the
caller moves the row to poison with its bytes untouched.
"""

from .bodies import body_decoder, decode_body, encode, encode_alike
from .edited import edit_of, edited_headers
from .headers import (
    count_attempts,
    counted_attempts,
    counts_a_death,
    decode_headers,
    encode_headers,
    read_head,
    time_sent,
    well_known,
)
from .ids import as_uuid, id_sequence, new_id
from .names import (
    ATTEMPTS,
    BYTES,
    CONTENT_TYPE,
    CORRELATION_ID,
    EDIT_OF,
    JSON,
    MAX_ADDRESS,
    MAX_RECIPIENT,
    NSB_CONTENT_TYPE,
    NSB_CORRELATION_ID,
    NSB_MESSAGE_ID,
    NSB_REPLY_TO,
    NSB_TIME_SENT,
    NSB_TYPES,
    REPLY_TO,
    TYPE,
)
from .nservicebus import to_nservicebus
from .types import is_typed, message_type, type_name, type_name_of, unstorable

__all__ = [
    "ATTEMPTS", "BYTES", "CONTENT_TYPE", "CORRELATION_ID", "EDIT_OF", "JSON", "MAX_ADDRESS", "MAX_RECIPIENT",
    "NSB_CONTENT_TYPE", "NSB_CORRELATION_ID", "NSB_MESSAGE_ID", "NSB_REPLY_TO", "NSB_TIME_SENT", "NSB_TYPES",
    "REPLY_TO", "TYPE", "as_uuid", "body_decoder", "count_attempts", "counted_attempts", "counts_a_death", "decode_body", "decode_headers",
    "edit_of", "edited_headers", "encode", "encode_alike", "encode_headers", "id_sequence", "is_typed", "message_type",
    "new_id", "read_head", "time_sent", "to_nservicebus", "type_name", "type_name_of", "unstorable",
    "well_known",
]  # fmt: skip
