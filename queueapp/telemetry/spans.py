"""Spans and metrics of sends, claims, handlers and endings.

A message carries the context of its send in its headers, under the names of the propagator that the project has set;
W3C's ``traceparent`` and ``tracestate`` if it has set none, which are NServiceBus' names as well. They stay with the
message: in the delayed store, through retries, in poison and out of it. So each attempt is a child of the send. A claim
takes messages of many traces, so its span belongs to none and has links to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, time_ns
from typing import Any, TypeVar, cast

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from .. import messages, signals
from ..errors import InvalidMessage, UndecodableMessage
from ..failures.history import one_line
from ..sql.claims import HEADERS, Claimed
from ..version import VERSION
from . import tracing

log = logging.getLogger("queueapp")
_T = TypeVar("_T")

#: Links that a span of a claim has at most: as many as the SDK keeps.
MOST_LINKS = 128
#: Seconds that the end of a process waits for its spans to be exported.
FLUSH = 5.0


class OpenTelemetry:
    """The tracer that ``tracing`` asks."""

    def __init__(self) -> None:
        # Both follow whatever provider the project sets, also later.
        self._tracer = trace.get_tracer("queueapp", VERSION)
        meter = metrics.get_meter("queueapp", VERSION)
        self._sent = meter.create_counter(SENT, "{message}", "Messages that were sent.")
        self._consumed = meter.create_counter(CONSUMED, "{message}", "Messages that were received.")
        self._operation = meter.create_histogram(
            OPERATION_DURATION, "s", "How long a send, a receive that found something, or an ack took.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )  # fmt: skip
        self._process = meter.create_histogram(
            PROCESS_DURATION, "s", "How long a handler took.", explicit_bucket_boundaries_advisory=BUCKETS
        )
        for name, signal in _VERDICTS.items():
            signal.connect(self._signal_receiver(name), weak=False, dispatch_uid=f"queueapp.telemetry.{name}")

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, verb: str, function: Callable[..., _T], destination: str, given: dict[str, Any]) -> _T:
        """See ``tracing.Tracer``."""
        given.update(given.pop("carried", {}))
        try:
            headers = tracing.headers_of(given.get("headers"))
        except (TypeError, ValueError):
            refused = given["headers"]
            raise InvalidMessage(f"headers = {refused!r} is not accepted: it must be a dict of strings.") from None
        attributes = about(verb, "send", destination)
        parent = None if trace.get_current_span().get_span_context().is_valid else self._parent(headers)
        span = self._tracer.start_span(f"{verb} {destination}", parent, SpanKind.PRODUCER, attributes)
        started = perf_counter()
        token = attach(trace.set_span_in_context(span, parent))
        failed: BaseException | None = None
        count = 0
        try:
            propagate.inject(headers)
            given["headers"] = headers
            result = function(**given)
            count = 1
            if isinstance(result, int):
                count = result
                span.set_attribute(BATCH_COUNT, count)
            else:
                span.set_attribute(MESSAGE_ID, str(result))
            return result
        except BaseException as error:
            failed = error
            raise
        finally:
            detach(token)
            _end(span, failed, attributes)
            self._operation.record(perf_counter() - started, attributes)
            if count:
                self._sent.add(count, {n: v for n, v in attributes.items() if n != OPERATION_TYPE})

    # -- handlers -------------------------------------------------------------------------------------------------

    def handler(self, queue: Any, consumer: str, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """See ``tracing.Tracer``. What it makes current is so in the context variables of this handler alone."""
        label = queue._meta.label
        name = f"process {label}"
        figures = about("process", "process", label) | {CONSUMER: consumer}
        start_span, carried = self._tracer.start_span, _carried()

        def traced(message: Any, context: Any) -> None:
            claimed = context._claimed
            parent, links = None, None
            if carried(claimed[HEADERS]):
                parent, links = self._origin(lambda: context.headers)
            attributes = figures | {
                MESSAGE_ID: str(context.message_id),
                ATTEMPT: context.attempt,
                BODY_SIZE: len(context.body or b""),
            }
            span = start_span(name, parent, SpanKind.CONSUMER, attributes, links)
            with self._within(span, parent, attributes, figures):
                call(message, context)

        return traced

    def batch_handler(self, queue: Any, consumer: str, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """See ``tracing.Tracer``. The messages are of many traces: the span begins one, with links to their sends."""
        label = queue._meta.label
        figures = about("process", "process", label) | {CONSUMER: consumer}

        def traced(given: Any, context: Any) -> None:
            links = [Link(origin) for origin in self._origins([item._claimed for item in context])]
            attributes = figures | {BATCH_COUNT: len(context)}
            span = self._tracer.start_span(f"process {label}", Context(), SpanKind.CONSUMER, attributes, links)
            with self._within(span, None, attributes, figures):
                call(given, context)

        return traced

    @contextmanager
    def _within(self, span: Any, parent: Any, attributes: dict[str, Any], figures: dict[str, Any]) -> Iterator[None]:
        """A handler's work with its span as the current one, which ends with what became of it; how long it took is
        recorded."""
        token = attach(trace.set_span_in_context(span, parent))
        failed: BaseException | None = None
        started = perf_counter()
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            taken = perf_counter() - started
            detach(token)
            _end(span, failed, attributes)
            self._process.record(taken, figures if failed is None else figures | {ERROR_TYPE: error_type(failed)})

    @contextmanager
    def handling(self, message: Any, consumer: str) -> Iterator[Any]:
        """See ``tracing.Tracer``."""
        label = message._batch.queue._meta.label
        figures = about("process", "process", label) | ({CONSUMER: consumer} if consumer else {})
        parent, links = self._origin(lambda: message.headers)
        attributes = figures | {
            MESSAGE_ID: str(message.id),
            ATTEMPT: message.deliveries,
            BODY_SIZE: len(message.raw_body or b""),
        }
        # Where the headers say nothing, whatever the script is in the middle of.
        span = self._tracer.start_span(f"process {label}", parent, SpanKind.CONSUMER, attributes, links)
        with self._within(span, parent, attributes, figures):
            yield span

    # -- claims and endings ---------------------------------------------------------------------------------------

    def statements(self, queue: Any, sql: _T) -> _T:
        """See ``tracing.Tracer``."""
        return cast("_T", Statements(self, queue._meta.label, sql))

    def claim(self, destination: str, claim: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Record a claim. An empty one is not recorded: there are many, and they belong to no trace."""
        began, started = time_ns(), perf_counter()
        rows = claim(*given, **named)
        if rows:
            attributes = about("receive", "receive", destination)
            self._consumed.add(len(rows), {n: v for n, v in attributes.items() if n != OPERATION_TYPE})
            self._operation.record(perf_counter() - started, attributes)
            span = self._tracer.start_span(
                f"receive {destination}", None, SpanKind.CLIENT, attributes | {BATCH_COUNT: len(rows)},
                start_time=began,
            )  # fmt: skip
            if span.is_recording():
                for origin in self._origins(rows):
                    span.add_link(origin)
            span.end()
        return rows

    def ack(self, destination: str, ack: Callable[..., Any], connection: Any, seqs: Sequence[int], *given: Any) -> Any:
        """An ack of some messages. Where receive, handler and commit are one transaction there is none."""
        attributes = about("ack", "settle", destination)
        span = self._tracer.start_span(
            f"ack {destination}", None, SpanKind.CLIENT, attributes | {BATCH_COUNT: len(seqs)}
        )
        started = perf_counter()
        failed: BaseException | None = None
        try:
            return ack(connection, seqs, *given)
        except BaseException as error:
            failed = error
            raise
        finally:
            _end(span, failed, attributes)
            self._operation.record(perf_counter() - started, attributes)

    def _signal_receiver(self, verb: str) -> Callable[..., None]:
        """A receiver that records failed attempts. The handler's error is in its span; this covers failures without a
        handler too."""

        def record(sender: Any, failure: Any, verdict: Any, **_: Any) -> None:
            label = sender._meta.label if sender is not None else "(no such queue)"
            attributes = about(verb, "settle", label) | {
                MESSAGE_ID: str(failure.row.id),
                ATTEMPT: failure.attempt,
                VERDICT: str(verdict),
            }
            if failure.consumer is not None:
                attributes[CONSUMER] = failure.consumer.name
            parent, links = self._origin(lambda: messages.decode_headers(failure.row.headers))
            span = self._tracer.start_span(f"{verb} {label}", parent, SpanKind.CLIENT, attributes, links)
            _end(span, failure.exception, attributes)

        return record

    # -- contexts -------------------------------------------------------------------------------------------------

    def _parent(self, headers: Mapping[str, str]) -> Context | None:
        """The context that headers carry, if they do."""
        parent = propagate.extract(headers, Context())
        return parent if trace.get_current_span(parent).get_span_context().is_valid else None

    def _origin(self, read: Callable[[], Mapping[str, str]]) -> tuple[Context | None, list[Link] | None]:
        """(the context that a message is handled in, what it is linked to)."""
        try:
            headers = read()
        except UndecodableMessage:
            return None, None
        parent = self._parent(headers)
        if parent is not None and headers.get(NSB_START_NEW_TRACE, "").lower() == "true":
            return Context(), [Link(trace.get_current_span(parent).get_span_context())]
        return parent, None

    def _origins(self, rows: Sequence[Claimed]) -> Iterator[Any]:
        """The contexts of the sends of these messages; a bulk one has the same for many."""
        carried = _carried()
        seen: set[int] = set()
        for headers in dict.fromkeys(row[HEADERS] for row in rows):
            if len(seen) == MOST_LINKS:
                return
            if headers is None or not carried(headers):
                continue  # of a set no headers come here
            try:
                parent = self._parent(messages.decode_headers(headers))
            except UndecodableMessage:
                continue
            if parent is not None:
                origin = trace.get_current_span(parent).get_span_context()
                if origin.span_id not in seen:
                    seen.add(origin.span_id)
                    yield origin

    def flush(self) -> None:
        """Let the providers export what they have, for a few seconds: a worker ends without Python's own end."""

        def export() -> None:
            for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
                try:
                    getattr(provider, "force_flush", lambda _: None)(int(FLUSH * 1000))
                except Exception as error:
                    log.warning("Spans or metrics could not be exported at the end: %s", error)

        thread = threading.Thread(target=export, name="telemetry-flush", daemon=True)
        thread.start()
        thread.join(FLUSH)


class Statements:
    """The statements of a queue, with spans around claims and acks."""

    def __init__(self, telemetry: OpenTelemetry, label: str, sql: Any) -> None:
        self._sql = sql
        claim, ack = partial(telemetry.claim, label), partial(telemetry.ack, label)
        self.claims = _Traced(sql.claims, claim, ("claim_by_lease", "claim_by_delete", "commit_and_claim"))
        self.acks = _Traced(sql.acks, ack, ("ack",))
        self.ack_by_seq = _Traced(sql.ack_by_seq, ack, ("ack",))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sql, name)


class _Traced:
    """The verbs of one subject, of which those with these names are traced."""

    def __init__(self, verbs: Any, trace: Callable[..., Any], names: Sequence[str]) -> None:
        self._verbs, self._trace, self._names = verbs, trace, names

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._verbs, name)
        return partial(self._trace, verb) if name in self._names else verb


_VERDICTS = {
    "retry": signals.retry,
    "delay": signals.delayed_retry,
    "poison": signals.poisoned,
    "discard": signals.discarded,
}


def _carried() -> Callable[[str], bool]:
    """Whether stored headers contain a field of the propagator, without decoding them."""
    names = tuple(f'"{name}"' for name in propagate.get_global_textmap().fields if name != "baggage")

    def carried(headers: str) -> bool:
        return any(name in headers for name in names)

    return carried


def _end(span: Span, failed: BaseException | None, attributes: dict[str, Any]) -> None:
    """End a span. An error is recorded with its class, which is added to the attributes of the metrics."""
    if failed is not None:
        attributes[ERROR_TYPE] = error_type(failed)
        span.set_attribute(ERROR_TYPE, attributes[ERROR_TYPE])
        span.set_status(Status(StatusCode.ERROR, one_line(failed)))
        try:
            span.record_exception(failed)
        except Exception as error:  # one that cannot be shown
            log.debug("An exception could not be recorded: %r", error)
    span.end()


# -- names of the conventions ------------------------------------------------------------------------------------------
# The words of OpenTelemetry's messaging conventions that are used here.
#
# Written out: in the package of the conventions they are marked as incubating and move between its releases.


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
