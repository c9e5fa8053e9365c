"""The members of chords are counted with their results, and the last one sends the body."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, chain, group, states
from celery.exceptions import ChordError
from celery.result import AsyncResult
from django.db import connections
from django.utils import timezone

from queueapp.contrib.celery.models import CeleryChordPart, CeleryGroup, CeleryResult
from queueapp.contrib.celery.results import ResultBackend
from tests.queueapp.contrib.celery.results.conftest import request_of


@pytest.fixture
def body(app: Celery) -> Any:
    """The task that is the body of chords here; like all of them it is sent and never run."""

    @app.task(name="body", shared=False)
    def body(values: list[Any]) -> None: ...

    return body


@pytest.fixture
def sent(app: Celery) -> Callable[[], list[tuple[str, Any]]]:
    """(name, first argument) of the tasks that were sent since the last call, on the broker in memory."""

    def sent() -> list[tuple[str, Any]]:
        found = []
        with app.connection_for_read() as connection:
            channel = connection.default_channel
            app.amqp.queues["results"].bind(channel).declare()
            while (message := channel.basic_get("results", no_ack=True)) is not None:
                args = message.decode()[0]
                found.append((message.headers["task"], args[0] if args else None))
        return found

    sent()
    return sent


def _member(backend: Any, task_id: str, signature: Any, index: int | None = 0, **given: Any) -> Any:
    signature = signature.clone()
    signature.options.setdefault("task_id", f"body of {given.get('group', 'g')}")
    return request_of(task_id, **{"group": "g", "group_index": index, "chord": signature, **given})


def test_the_last_member_sends_the_body_with_the_results_in_their_order(
    backend: Any, body: Any, sent: Any, alias: str
) -> None:
    backend.set_chord_size("g", 3)
    for index in (2, 0):
        backend.mark_as_done(f"m{index}", index, _member(backend, f"m{index}", body.s(), index))
    assert sent() == []
    backend.mark_as_done("m1", 1, _member(backend, "m1", body.s(), 1))

    assert sent() == [("body", [0, 1, 2])]
    assert not CeleryChordPart.objects.using(alias).exists()
    assert CeleryGroup.objects.using(alias).get().is_over


def test_members_may_end_before_their_number_is_known(backend: Any, body: Any, sent: Any) -> None:
    backend.mark_as_done("m0", 0, _member(backend, "m0", body.s(), 0))
    backend.set_chord_size("g", 2)
    assert sent() == []
    backend.mark_as_done("m1", 1, _member(backend, "m1", body.s(), 1))

    assert sent() == [("body", [0, 1])]


def test_a_member_that_comes_again_is_counted_once(backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 2)
    for value in ("first", "again"):
        backend.mark_as_done("m0", value, _member(backend, "m0", body.s(), 0))
    assert sent() == []
    for value in ("last", "late", "later"):
        backend.mark_as_done("m1", value, _member(backend, "m1", body.s(), 1))

    assert sent() == [("body", ["first", "last"])]


def test_one_task_may_be_two_members(backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 2)
    for index in (0, 1):
        backend.mark_as_done("same", 7, _member(backend, "same", body.s(), index))

    assert sent() == [("body", [7, 7])]


def test_a_member_without_a_place_comes_last(backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 2)
    backend.mark_as_done("m", "without", _member(backend, "m", body.s(), None))
    backend.mark_as_done("m0", "first", _member(backend, "m0", body.s(), 0))

    assert sent() == [("body", ["first", "without"])]


def test_a_chord_waits_for_members_that_were_added(app: Celery, backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 1)
    backend.add_to_chord("g", AsyncResult("m1", app=app))
    backend.mark_as_done("m0", 0, _member(backend, "m0", body.s(), 0))
    assert sent() == []
    backend.mark_as_done("m1", 1, _member(backend, "m1", body.s(), 1))

    assert sent() == [("body", [0, 1])]


def test_a_frozen_chord_can_be_sent_again(backend: Any, body: Any, sent: Any) -> None:
    for value in ("first", "second"):
        backend.set_chord_size("g", 1)
        backend.forget("m0")
        backend.mark_as_done("m0", value, _member(backend, "m0", body.s(), 0))
        assert sent() == [("body", [value])]


def test_members_that_end_at_the_same_time_send_it_once(backend: Any, body: Any, sent: Any, alias: str) -> None:
    for turn in range(5):
        name, members = f"g{turn}", 8
        backend.set_chord_size(name, members)
        start = threading.Barrier(members)

        def end(index: int, name: str = name, start: threading.Barrier = start) -> None:
            request = _member(backend, f"{name}-{index}", body.s(), index, group=name)
            start.wait(30)
            try:
                backend.mark_as_done(f"{name}-{index}", index, request)
            finally:
                connections[alias].close()

        threads = [threading.Thread(target=end, args=(index,)) for index in range(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sent() == [("body", list(range(members)))]


def test_a_header_with_groups_keeps_its_shape(app: Celery, backend: Any, body: Any, sent: Any) -> None:
    inner = app.GroupResult("inner", [AsyncResult("m1", app=app), AsyncResult("m2", app=app)])
    backend.apply_chord(("g", [AsyncResult("m0", app=app), inner]), body.s())
    backend.set_chord_size("g", 3)
    for index in (2, 0, 1):
        backend.mark_as_done(f"m{index}", index, _member(backend, f"m{index}", body.s(), index))

    assert sent() == [("body", [0, [1, 2]])]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_member_that_fails_fails_the_body_once_all_have_ended(
    app: Celery, backend: Any, body: Any, sent: Any
) -> None:
    backend.set_chord_size("g", 2)
    backend.mark_as_failure("m0", KeyError("pence"), request=_member(backend, "m0", body.s(), 0))
    assert AsyncResult("body of g", app=app).status == states.PENDING
    backend.mark_as_done("m1", 1, _member(backend, "m1", body.s(), 1))

    assert sent() == []
    with pytest.raises(ChordError, match=r"Dependency m0 raised KeyError\('pence'\)"):
        AsyncResult("body of g", app=app).get(timeout=0)
    # The member is run again, from the poison page say: the chord has failed for all that.
    backend.mark_as_done("m0", 1, _member(backend, "m0", body.s(), 0))
    assert sent() == []


def test_a_member_that_was_revoked_fails_the_body(app: Celery, backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 1)
    backend.mark_as_revoked("m0", "revoked", _member(backend, "m0", body.s(), 0))

    assert AsyncResult("body of g", app=app).status == states.FAILURE


def test_callbacks_for_errors_are_sent_in_the_transaction_or_called_after_it(
    app: Celery, backend: Any, body: Any, sent: Any, alias: str
) -> None:
    called: list[Any] = []

    @app.task(name="sent", shared=False)
    def is_sent(task_id: str) -> None: ...

    @app.task(name="called", shared=False)
    def is_called(request: Any, exc: BaseException, traceback: Any) -> None:
        called.append((request.id, type(exc), connections[alias].in_atomic_block))
        connections[alias].close()  # may do what it likes
        raise RuntimeError("a bad one")

    signature = body.s()
    signature.options["link_error"] = [is_sent.s(), is_called.s()]
    backend.set_chord_size("g", 1)
    backend.mark_as_failure("m0", KeyError(), request=_member(backend, "m0", signature, 0))

    assert called == [("body of g", ChordError, False)]
    assert sent() == [("sent", "body of g")]
    assert AsyncResult("body of g", app=app).status == states.FAILURE


def test_a_chain_in_a_header_that_fails_early_fails_the_chord(app: Celery, backend: Any, body: Any, sent: Any) -> None:
    backend.set_chord_size("g", 1)
    step = body.s().set(task_id="second", group_id="g", group_index=0, chord=body.s().set(task_id="the body"))
    backend.mark_as_failure("first", KeyError(), request=request_of("first", chain=[dict(step)]))

    assert AsyncResult("second", app=app).status == states.FAILURE
    assert AsyncResult("the body", app=app).status == states.FAILURE


def test_a_body_that_cannot_be_sent_fails_the_chord(app: Celery, backend: Any, body: Any, sent: Any) -> None:
    signature = body.s(object())  # is no JSON
    backend.set_chord_size("g", 1)
    backend.mark_as_done("m0", 1, _member(backend, "m0", signature, 0))

    assert sent() == []
    assert AsyncResult("m0", app=app).get(timeout=0) == 1
    with pytest.raises(ChordError, match="Callback error"):
        AsyncResult("body of g", app=app).get(timeout=0)


def test_a_database_error_repeats_the_whole_end_of_a_member(
    backend: Any, body: Any, sent: Any, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from queueapp.contrib.celery import result_rows
    from tests.kill_session import kill_this

    killed = []
    end_chord = result_rows.end_chord

    def killing(*given: Any) -> None:
        if not killed:
            killed.append(1)
            kill_this(connections[alias])  # the count of the last member is not committed yet
        end_chord(*given)

    monkeypatch.setattr(result_rows, "end_chord", killing)
    backend.set_chord_size("g", 1)
    backend.mark_as_done("m0", 1, _member(backend, "m0", body.s(), 0))

    assert killed
    assert sent() == [("body", [1])]
    assert CeleryResult.objects.using(alias).filter(task_id="m0", status="SUCCESS").exists()


def test_a_chain_with_a_group_is_a_chord(app: Celery, body: Any, sent: Any, alias: str) -> None:
    chain(group(body.s(1), body.s(2), app=app), body.s(), app=app).apply_async()

    assert len(sent()) == 2
    assert CeleryGroup.objects.using(alias).get().size == 2


# -- expiry ------------------------------------------------------------------------------------------------------------


def _past() -> Any:
    return timezone.now() - timedelta(days=1)


def test_a_chord_that_outlives_result_expires_is_finished(app: Celery, backend: Any, alias: str, body: Any) -> None:
    app.conf.result_expires = 60
    backend.set_chord_size("g", 2)
    backend.mark_as_done("m0", 1, _member(backend, "m0", body.s(), 0))
    groups = CeleryGroup.objects.using(alias)
    assert groups.get().expires_at is None

    backend.cleanup()
    backend.mark_as_done("m1", 2, _member(backend, "m1", body.s(), 1))

    assert groups.get().is_over
    assert groups.get().expires_at is not None


def test_a_chord_that_expires_is_an_error_and_its_next_member_fails_it(
    app: Celery, backend: Any, alias: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.result_chord_expires = 60
    backend = ResultBackend(app=app, url=f"queueapp://{alias}")
    backend.set_chord_size("g", 3)
    signature = body.s().set(task_id="the body")
    backend.mark_as_done("m0", 1, _member(backend, "m0", signature, 0))
    CeleryGroup.objects.using(alias).update(expires_at=_past())

    backend.cleanup()
    for index in (1, 2):
        backend.mark_as_done(f"m{index}", 2, _member(backend, f"m{index}", signature, index))

    assert "Chord g expired: 1 of 3 members have ended." in caplog.text
    assert app.AsyncResult("the body").status == "FAILURE"
    assert "result_chord_expires" in str(app.AsyncResult("the body").result)
    assert not CeleryChordPart.objects.using(alias).exists()


def test_a_part_without_its_chord_is_an_error(
    app: Celery, backend: Any, alias: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend.mark_as_done("m0", 1, _member(backend, "m0", body.s(), 0))
    groups = CeleryGroup.objects.using(alias)
    assert groups.get().expires_at is not None
    groups.update(expires_at=_past())

    backend.cleanup()

    assert "Chord g: 1 member was counted, but the chord does not exist" in caplog.text
    assert not groups.exists()
    assert not CeleryChordPart.objects.using(alias).exists()
