"""The words of OpenTelemetry's messaging conventions that are used here.

Written out: in the package of the conventions they are marked as incubating and move between its releases.
"""

from __future__ import annotations

from typing import Any

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
CONSUMER = "messaging.consumer.group.name"
MESSAGE_ID = "messaging.message.id"
CONVERSATION_ID = "messaging.message.conversation_id"
BODY_SIZE = "messaging.message.body.size"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
#: Ours: 1 for the first attempt.
ATTEMPT = "queueapp.attempt"
VERDICT = "queueapp.verdict"

SENT = "messaging.client.sent.messages"
CONSUMED = "messaging.client.consumed.messages"
OPERATION_DURATION = "messaging.client.operation.duration"
PROCESS_DURATION = "messaging.process.duration"
#: What the conventions ask for, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)

#: With this header an NServiceBus endpoint asks the handling endpoint to start a new trace.
NSB_START_NEW_TRACE = "NServiceBus.OpenTelemetry.StartNewTrace"


def about(operation: str, kind: str, destination: str) -> dict[str, Any]:
    """The attributes that every span and figure of an operation has."""
    return {SYSTEM: "queueapp", OPERATION: operation, OPERATION_TYPE: kind, DESTINATION: destination}


def error_type(error: BaseException) -> str:
    """The class of an error by its full name, as ``Span.record_exception`` names it."""
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
