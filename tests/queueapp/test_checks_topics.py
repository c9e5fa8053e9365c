"""What is wrong with topics and expressions is said by a check, with an id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queueapp.checks import check_entering, check_topics
from queueapp.errors import InvalidOption
from queueapp.models.delivery import Delivery
from queueapp.models.delivery.options import Distribution, FileBackedMetadata
from queueapp.sending import preparation
from tests.testapp.models import Bookings, FlightAudit, ForeignPostgres, LateFlights

Change = Callable[..., None]


def about(found: list[Any], queue: Any) -> list[tuple[str, str]]:
    return [(record.id, record.msg) for record in found if record.obj is queue]


def test_nothing_is_wrong_with_the_project_as_it_is() -> None:
    assert check_topics() == check_entering() == []


def test_default_publish_target_is_required_by_a_regular_expression(delivery: Change) -> None:
    delivery(FlightAudit, default_publish_target=None)
    ((number, text),) = about(check_topics(), FlightAudit)
    assert number == "queueapp.E020"
    assert "is a regular expression, and there is no default_publish_target" in text


@pytest.mark.parametrize("queue", [FlightAudit, Bookings])
def test_default_publish_target_must_be_one_of_the_topics(delivery: Change, queue: Any) -> None:
    delivery(queue, default_publish_target="ELSEWHERE")
    ((number, text),) = about(check_topics(), queue)
    assert number == "queueapp.E021"
    assert "'ELSEWHERE' is none of the queue's topics" in text


def test_underlying_topic_that_is_no_regular_expression_is_an_error(delivery: Change) -> None:
    delivery(FlightAudit, underlying_topic="FLIGHTS(")
    ((number, text),) = about(check_topics(), FlightAudit)
    assert number == "queueapp.E022"
    assert "unterminated subpattern" in text


def test_message_type_must_be_one_for_a_topic(delivery: Change) -> None:
    delivery(FlightAudit, message_type="msgpack")
    (found,) = [finding for finding in check_topics() if finding.id == "queueapp.E023"]
    assert "'FLIGHTS' is collected by queues of several message types" in found.msg
    assert "testapp.FlightAudit (msgpack)" in found.msg


def test_unregistered_message_type_is_an_error(delivery: Change) -> None:
    delivery(Bookings, message_type="bson")
    ((number, text),) = about(check_entering(), Bookings)
    assert (number, "Bookings.Delivery.message_type = 'bson'" in text) == ("queueapp.E024", True)


@pytest.mark.parametrize(("text", "said"), [("/a > )", "Column 6"), ("/a > UNIX_TIMESTAMP()", "depends on more than")])
def test_filter_that_is_none_is_an_error(delivery: Change, text: str, said: str) -> None:
    delivery(LateFlights, filter=text)
    ((number, reported),) = about(check_entering(), LateFlights)
    assert (number, said in reported) == ("queueapp.E025", True)


def test_filter_without_the_extra_is_an_error(delivery: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(queue: Any) -> None:
        raise InvalidOption(f"{queue._meta.label}.Delivery.filter", queue.delivery.filter, preparation.NEEDS_EXTRA)

    monkeypatch.setattr("queueapp.checks.topics.rules_of", missing)
    ((number, reported),) = about(check_entering(), LateFlights)
    assert (number, "pip install 'queueapp[expressions]'" in reported) == ("queueapp.E025", True)


def test_filter_on_a_foreign_table_is_an_error(delivery: Change) -> None:
    delivery(ForeignPostgres, filter="/a = 1")
    ((number, reported),) = about(check_entering(), ForeignPostgres)
    assert (number, "has no lease columns" in reported) == ("queueapp.E026", True)


def assert_refused(**options: Any) -> None:
    (name,) = options
    with pytest.raises(InvalidOption, match=f"shop.Mails.Delivery.{name} = .* not built yet"):
        Delivery(options, "shop.Mails.Delivery.")


@pytest.mark.parametrize("distribution", [Distribution.QUEUE, "group-local"])
def test_distribution_is_refused_until_it_is_built(distribution: Any) -> None:
    assert_refused(distribution=distribution)


def test_initial_owner_is_refused_until_it_is_built() -> None:
    assert_refused(initial_owner="one")


def test_group_local_queue_domain_is_refused_until_it_is_built() -> None:
    assert_refused(group_local_queue_domain="d")


def test_distribution_local_is_accepted() -> None:
    assert Delivery({"distribution": "local"}, "").distribution is Distribution.LOCAL


def test_names_that_two_queues_have_are_a_warning(delivery: Change) -> None:
    delivery(LateFlights, name="bookings")
    (found,) = [finding for finding in check_topics() if finding.id == "queueapp.W020"]
    assert "Several queues have the name 'bookings'" in found.msg


def test_file_backed_metadata_is_accepted(delivery: Change) -> None:
    for given in ("enabled", True, FileBackedMetadata.ENABLED):
        assert Delivery({"file_backed_metadata": given}, "").file_backed_metadata is FileBackedMetadata.ENABLED
    assert Delivery({"file_backed_metadata": None}, "").file_backed_metadata is None
    for given in ("disabled", False, 1):
        with pytest.raises(InvalidOption, match="file_backed_metadata"):
            Delivery({"file_backed_metadata": given}, "")

    delivery(Bookings, file_backed_metadata=True)
    assert check_entering() == []
