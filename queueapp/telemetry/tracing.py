"""Who follows messages from their sender through their handlers: one place to ask, and nothing else.

``tracer`` is None unless ``QUEUEAPP["OPENTELEMETRY"]`` is on. Code that reports to it checks that once: a send
when it is called, a worker when it starts. So what is not traced pays one comparison per send, and nothing per message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Traced(dict[str, str]):
    """Headers that a tracer has seen: a send that is given these does not ask it again."""


class Tracer(Protocol):
    """The events that are reported."""

    def send(self, verb: str, function: Callable[..., _T], destination: str, given: dict[str, Any]) -> _T:
        """Call a sending function with these arguments, its headers ``Traced``."""

    def handler(self, queue: Any, consumer: str, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """The same handler, traced; it is called with a message and its ``Context``."""

    def batch_handler(self, queue: Any, consumer: str, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """The same of one that takes several messages a call, with their ``BatchContext``."""

    def statements(self, queue: Any, sql: _T) -> _T:
        """The statements of a queue, of which claims and acks are traced."""

    def handling(self, message: Any, consumer: str) -> AbstractContextManager[Any]:
        """Around what is done with a message of ``receive()``."""

    def flush(self) -> None:
        """The process is about to end."""


tracer: Tracer | None = None


@contextmanager
def handling(message: Any, consumer: str = "") -> Iterator[None]:
    """Around what is done with a message of ``Queue.receive()``: a span that continues the trace of its sender, with
    what is sent in it. A worker does that automatically. Without ``QUEUEAPP["OPENTELEMETRY"]`` it does nothing.

    >>> with Orders.receive() as batch:
    ...     for message in batch:
    ...         with tracing.handling(message, "nightly"):
    ...             ...
    """
    if tracer is None:
        yield
        return
    with tracer.handling(message, consumer):
        yield


def statements(queue: Any, sql: _T) -> _T:
    """The statements of a queue as they are to be used."""
    return sql if tracer is None else tracer.statements(queue, sql)


def flush() -> None:
    """The process is about to end: what was traced is to leave it."""
    if tracer is not None:
        tracer.flush()


def headers_of(given: Mapping[str, str] | None) -> Traced:
    """A copy of a sender's headers. Raises TypeError or ValueError where they are none."""
    return Traced(given or {})
