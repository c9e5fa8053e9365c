"""``leasing``: who may end a message by naming it, and what becomes of a late ack. Ack by bookmark, by list and by
filter."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.db.models import F

from queueapp import InvalidOption, LeaseLost, Leasing, QueueError
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.operations.expiration import delete_expired
from queueapp.sql import queue_sql
from queueapp.sql.claims import SEQ, SeqRange
from tests.databases import DATABASES, marks_of
from tests.testapp.leases import Evicting, Forever
from tests.testapp.models import Capped, Leased, Transactional

ME, OTHER_OWNER = uuid.uuid4(), uuid.uuid4()
ALL = [Leasing.STRICT, Leasing.SUBLET, Leasing.FENCED]


@pytest.fixture(params=[pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ALL, ids=[item.value for item in ALL])
def leasing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Leasing:
    monkeypatch.setattr(Leased.delivery, "leasing", request.param)
    return request.param  # type: ignore[no-any-return]


def let(monkeypatch: pytest.MonkeyPatch, leasing: Leasing, **options: Any) -> None:
    for name, value in ({"leasing": leasing} | options).items():
        monkeypatch.setattr(Leased.delivery, name, value)


def hand_out(alias: str, count: int, client: uuid.UUID | None = ME) -> list[int]:
    """Messages that a client holds whose process is somewhere else: their seqs."""
    receive = Leased.receive(count, client=client, using=alias)
    receive.__enter__()
    return [message.seq for message in receive]


def expire_lease(alias: str) -> None:
    Leased.objects.using(alias).update(lease_expires=Now() - timedelta(seconds=1))


def rows(alias: str) -> Any:
    return Leased.objects.using(alias).order_by("seq")


def token_of(alias: str, seq: int) -> uuid.UUID:
    token: uuid.UUID = rows(alias).get(seq=seq).lease_token
    return token


# -- ack ------------------------------------------------------------------------------------------------------------


def test_leasing_the_holder_may_ack(alias: str, leasing: Leasing) -> None:
    Leased.send_many([{}] * 3, using=alias)
    first, second, _ = hand_out(alias, 3)
    client = token_of(alias, first) if leasing is Leasing.FENCED else ME

    assert Leased.ack([second, first], client=client, using=alias) == 2
    assert rows(alias).count() == 1
    assert Leased.ack([second, first], client=client, using=alias) == 0, "what is gone is no error"


def test_leasing_another_clients_lease(alias: str, leasing: Leasing) -> None:
    Leased.send({}, using=alias)
    (seq,) = hand_out(alias, 1)

    assert Leased.ack(seq, client=OTHER_OWNER, using=alias) == (leasing is Leasing.SUBLET)
    assert rows(alias).count() == (leasing is not Leasing.SUBLET)


def test_leasing_of_messages_without_an_owner(alias: str, leasing: Leasing) -> None:
    Leased.send({}, using=alias)
    seq = rows(alias).get().seq

    assert Leased.ack(seq, client=OTHER_OWNER, using=alias) == (leasing is not Leasing.FENCED)


def test_leasing_without_a_client(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Leased.send_many([{}] * 2, using=alias)
    (held,) = hand_out(alias, 1)
    both = [row.seq for row in rows(alias)]
    with pytest.raises(InvalidOption, match=r"client = None .* the token of the lease"):
        Leased.ack(both, using=alias)
    let(monkeypatch, Leasing.STRICT)
    assert Leased.ack(both, using=alias) == 1
    assert rows(alias).get().seq == held
    let(monkeypatch, Leasing.SUBLET)
    assert Leased.ack(both, using=alias) == 1


def test_leasing_a_late_ack_before_it_is_leased_anew(alias: str, leasing: Leasing) -> None:
    Leased.send({}, using=alias)
    with Leased.receive(client=ME, using=alias) as batch:
        (message,) = batch
        expire_lease(alias)
        message.ack()
    assert not rows(alias).exists()


def test_leasing_a_late_ack_by_bookmark_before_it_is_leased_anew(alias: str, leasing: Leasing) -> None:
    Leased.send({}, using=alias)
    (seq,) = hand_out(alias, 1)
    client = token_of(alias, seq) if leasing is Leasing.FENCED else OTHER_OWNER
    expire_lease(alias)

    assert Leased.ack(seq, client=client, using=alias) == 1


def test_leasing_a_late_ack_after_it_was_leased_anew(alias: str, leasing: Leasing) -> None:
    """Strict ignores it; sublet removes it under the new holder, whose own ack finds nothing and says nothing."""
    Leased.send({}, using=alias)
    with Leased.receive(client=ME, using=alias) as late:
        (old,) = late
        expire_lease(alias)
        with Leased.receive(client=OTHER_OWNER, using=alias) as batch:
            (new,) = batch
            if leasing is Leasing.FENCED:
                with pytest.raises(LeaseLost):
                    old.ack()
            else:
                old.ack()
            assert rows(alias).exists() == (leasing is not Leasing.SUBLET)
            new.ack()
    assert not rows(alias).exists()


def test_leasing_the_unit_is_the_client(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.STRICT)
    Leased.send_many([{}] * 2, using=alias)
    first, second = hand_out(alias, 1) + hand_out(alias, 1)

    assert token_of(alias, first) != token_of(alias, second)
    assert Leased.ack([first, second], client=ME, using=alias) == 2


# -- filter ---------------------------------------------------------------------------------------------------------


def test_ack_by_filter(alias: str, leasing: Leasing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.receiving.acks.ROWS_PER_QUERY", 3)
    Leased.send_many([{"price": n} for n in range(10)], using=alias)
    first, second = hand_out(alias, 2), hand_out(alias, 2, OTHER_OWNER)
    rows(alias).filter(seq=second[1]).update(body=b"not JSON")
    client = token_of(alias, first[0]) if leasing is Leasing.FENCED else ME

    acked = Leased.ack(where="/price >= 1 AND /price < 8", client=client, using=alias)

    # 1 of its own; 4 to 7 without an owner; 2 of the other's, whose 3 is no JSON and so matches nothing.
    assert acked == {Leasing.FENCED: 1, Leasing.STRICT: 5, Leasing.SUBLET: 6}[leasing]
    assert rows(alias).filter(seq=second[1]).exists()
    assert rows(alias).count() == 10 - acked


# -- cancel ---------------------------------------------------------------------------------------------------------


def test_ack_cancel(alias: str, leasing: Leasing) -> None:
    Leased.send_many([{}] * 3, using=alias)
    first, second = hand_out(alias, 1), hand_out(alias, 1, OTHER_OWNER)
    free = rows(alias).last().seq
    client = token_of(alias, first[0]) if leasing is Leasing.FENCED else ME

    ended = Leased.cancel([*first, *second, free], client=client, using=alias)

    assert ended == (2 if leasing is Leasing.SUBLET else 1)
    cancels = [row.cancels for row in rows(alias)]
    assert cancels == [1, int(leasing is Leasing.SUBLET), 0], "a message without a lease cannot be returned"
    with Leased.receive(3, using=alias) as batch:
        assert [message.seq for message in batch][:1] == first, "in its old place: the floor came down"


def test_ack_cancel_of_an_expired_lease_changes_nothing(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.STRICT)
    Leased.send({}, using=alias)
    seqs = hand_out(alias, 1)
    expire_lease(alias)

    assert Leased.cancel(seqs, client=ME, using=alias) == 0
    assert rows(alias).get().cancels == 0


def test_ack_cancel_with_a_delay(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.SUBLET)
    Leased.send({"n": 1}, using=alias)
    seqs = hand_out(alias, 1)

    assert Leased.cancel(seqs, delay=timedelta(minutes=5), using=alias) == 1

    assert not rows(alias).exists()
    kept = DelayedMessage.objects.using(alias).annotate(wait=F("due") - F("stored_at")).get()
    assert (kept.destination, kept.cancels, kept.deliveries) == (Leased._meta.label, 1, 1)
    assert bytes(kept.body) == b'{"n":1}'
    assert abs(kept.wait - timedelta(minutes=5)) < timedelta(seconds=5)


@pytest.mark.parametrize("delay", [None, timedelta(minutes=5)])
def test_max_cancels_by_bookmark(alias: str, delay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cancel with a limit of two: poison, and not back in its place nor put off."""
    let(monkeypatch, Leasing.SUBLET, max_cancels=2)
    Leased.send_many([{"n": 1}, {"n": 2}], using=alias)
    rows(alias).filter(seq=rows(alias).first().seq).update(cancels=1)
    first, second = hand_out(alias, 2)

    assert Leased.cancel([first, second], delay=delay, using=alias) == 2

    kept = PoisonMessage.objects.using(alias).get()
    assert (kept.reason, bytes(kept.body), kept.cancels) == ("max_cancels: given back 2 times", b'{"n":1}', 2)
    remaining = rows(alias) if delay is None else DelayedMessage.objects.using(alias)
    assert bytes(remaining.get().body) == b'{"n":2}'


def test_max_deliveries_and_max_cancels_by_bookmark(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.STRICT, max_cancels=1, max_deliveries=1)
    Leased.send({}, using=alias)
    seqs = hand_out(alias, 1)
    Leased.cancel(seqs, client=OTHER_OWNER, using=alias)
    assert rows(alias).exists()

    Leased.cancel(seqs, client=ME, using=alias)

    reason = "max_cancels, max_deliveries: given back 1 times and handed out 1 times"
    assert PoisonMessage.objects.using(alias).get().reason == reason


# -- expire and extend ----------------------------------------------------------------------------------------------


def test_ack_expire(alias: str, leasing: Leasing) -> None:
    Leased.send_many([{}] * 3, using=alias)
    first, second = hand_out(alias, 1), hand_out(alias, 1, OTHER_OWNER)
    client = token_of(alias, first[0]) if leasing is Leasing.FENCED else ME

    gone = Leased.expire([row.seq for row in rows(alias)], reason="recalled", client=client, using=alias)

    assert gone == {Leasing.FENCED: 1, Leasing.STRICT: 2, Leasing.SUBLET: 3}[leasing]
    assert rows(alias).filter(seq__in=second).exists() == (leasing is not Leasing.SUBLET)


def test_extend_by_bookmark(alias: str, leasing: Leasing) -> None:
    Leased.send_many([{}] * 2, using=alias)
    first, second = hand_out(alias, 1), hand_out(alias, 1, OTHER_OWNER)
    client = token_of(alias, first[0]) if leasing is Leasing.FENCED else ME

    extended = Leased.extend([*first, *second], timedelta(hours=1), client=client, using=alias)

    assert extended == (2 if leasing is Leasing.SUBLET else 1)
    remaining = rows(alias).annotate(left=F("lease_expires") - Now())
    assert remaining.get(seq=first[0]).left > timedelta(minutes=59)


def test_extend_by_bookmark_revives_nothing_whose_place_may_be_given_away(alias: str) -> None:
    connection, token = connections[alias], uuid.uuid4()
    Capped.send({}, using=alias)
    (row,) = (
        queue_sql(Capped, connection).limits.claim_within(connection, [SeqRange()], 1, token, ME, 3_600_000, 5).rows
    )
    assert Capped.extend([row[SEQ]], timedelta(hours=1), client=token, using=alias) == 1
    Capped.objects.using(alias).update(lease_expires=Now() - timedelta(minutes=1))
    assert Capped.extend([row[SEQ]], timedelta(hours=1), client=token, using=alias) == 0


def test_async_twins(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.SUBLET)
    Leased.send_many([{}] * 4, using=alias)
    seqs = hand_out(alias, 4)

    assert async_to_sync(Leased.aextend)(seqs, timedelta(hours=1), using=alias) == 4
    assert async_to_sync(Leased.acancel)(seqs[:1], using=alias) == 1
    assert async_to_sync(Leased.aexpire)(seqs[1:2], using=alias) == 1
    assert async_to_sync(Leased.aack)(seqs, using=alias) == 3


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_bad_bookmarks_and_clients_are_refused() -> None:
    for wrong in (["7"], [1.5], [True], [2**63], "7"):
        with pytest.raises(InvalidOption, match="bookmarks"):
            Leased.ack(wrong, client=ME)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="client = 'me'"):
        Leased.ack(1, client="me")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="client = 'me'"):
        Leased.receive(client="me")
    with pytest.raises(InvalidOption, match="where"):
        Leased.ack([1], where="/a = 1", client=ME)
    with pytest.raises(InvalidOption, match="ids"):
        Leased.ack(ids=[ME], client=ME)
    with pytest.raises(QueueError, match="transactional: nothing of it is leased"):
        Transactional.ack(1)


# -- leases that do not expire, and messages that expire under one -----------------------------------------------------


def test_lease_period_unset_needs_one_in_receive(alias: str) -> None:
    """No process would notice that a script has died."""
    with pytest.raises(InvalidOption, match=r"lease_period = None .* do not expire"), Forever.receive(using=alias):
        pass
    Forever.send({}, using=alias)
    with Forever.receive(lease_period=timedelta(minutes=1), using=alias) as batch:
        next(iter(batch)).ack()
    assert not Forever.objects.using(alias).exists()


def test_extend_does_not_shorten_a_lease_that_never_expires(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Leasing.SUBLET)
    Leased.send({}, using=alias)
    seqs = hand_out(alias, 1)
    rows(alias).update(lease_expires=Now() + timedelta(days=366 * 7000))

    assert Leased.extend(seqs, timedelta(minutes=1), using=alias) == 1
    assert rows(alias).get().lease_expires.year > 9000


def test_expire_leased_is_the_other_reading(alias: str) -> None:
    """It goes while its holder has it, whose ack removes nothing and says nothing."""
    Evicting.send({}, expires_in=timedelta(hours=1), using=alias)
    with Evicting.receive(using=alias) as batch:
        (message,) = batch
        Evicting.objects.using(alias).update(expires=Now() - timedelta(seconds=1))
        assert delete_expired(Evicting, alias, 10) == 1
        message.ack()
    assert not Evicting.objects.using(alias).exists()
