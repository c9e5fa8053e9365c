"""As many messages are handled at once as the concurrency says, also while it is changed."""

from __future__ import annotations

from tests.conformance.endpoint import Endpoint, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import eventually


@modes("NRS")
def test_when_multiple_messages_are_available_should_handle_exactly_the_limit_at_once(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(20)
    endpoint.start(concurrency=10)

    eventually(lambda: gate.inside == 10)
    gate.let(20)

    eventually(lambda: gate.passed == 20)
    assert gate.max_inside == 10
    assert endpoint.numbers == list(range(20))
    endpoint.wait_until_empty()


@modes("NRS")
def test_when_concurrency_is_increased_after_pump_started_should_handle_more_at_once(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(30)
    worker = endpoint.start(concurrency=5)
    eventually(lambda: gate.inside == 5)

    worker.pump.set_concurrency(10)

    eventually(lambda: gate.inside == 10)
    gate.let(30)
    eventually(lambda: gate.passed == 30)
    assert gate.max_inside == 10
    assert endpoint.numbers == list(range(30))


@modes("NRS")
def test_when_concurrency_is_lowered_after_pump_started_should_handle_fewer_at_once(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(40)
    worker = endpoint.start(concurrency=10)
    eventually(lambda: gate.inside == 10)

    worker.pump.set_concurrency(5)
    gate.mark()
    gate.let(40)

    eventually(lambda: gate.passed == 40)
    assert 0 < gate.max_inside <= 5
    assert endpoint.numbers == list(range(40))


@modes("NRS")
def test_when_concurrency_is_increased_and_decreased_should_keep_to_the_last_value(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(40)
    worker = endpoint.start(concurrency=5)
    eventually(lambda: gate.inside == 5)

    worker.pump.set_concurrency(10)
    eventually(lambda: gate.inside == 10)
    worker.pump.set_concurrency(2)
    gate.mark()
    gate.let(40)

    eventually(lambda: gate.passed == 40)
    assert 0 < gate.max_inside <= 2
    assert endpoint.numbers == list(range(40))


@modes("NRS")
def test_when_concurrency_is_lowered_and_raised_again_should_handle_as_many_as_before(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(40)
    worker = endpoint.start(concurrency=6)
    eventually(lambda: gate.inside == 6)

    worker.pump.set_concurrency(1)
    gate.let(6)
    eventually(lambda: gate.passed == 6 and gate.inside == 1)
    worker.pump.set_concurrency(6)

    eventually(lambda: gate.inside == 6)
    gate.let(34)
    eventually(lambda: gate.passed == 40)
    assert gate.max_inside == 6
