"""A whole configuration: its parts, several queues, the transaction log, the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from queueapp.contrib.amps.convert import as_python

from .importing import configuration, import_text, options, queue, said


def logged(*topics: str, kind: str = "json") -> str:
    return "".join(f"<Topic><Name>{topic}</Name><MessageType>{kind}</MessageType></Topic>" for topic in topics)


@pytest.mark.parametrize("frame", ["<AMPSConfig><SOW>{}</SOW></AMPSConfig>", "<SOW>{}</SOW>", "{}"])
def test_a_part_of_a_configuration_is_read_as_well(frame: str, tmp_path: Path) -> None:
    imported = import_text(frame.format(queue("<MaxBacklog>5</MaxBacklog>")), tmp_path)
    assert options(imported)["max_backlog"] == "5"
    assert said(imported) == []


def test_queues_come_in_their_order_with_their_lines(tmp_path: Path) -> None:
    imported = import_text(configuration(*(queue(name=name) for name in "abc")), tmp_path)
    assert [(queue.name, queue.line) for queue in imported.queues] == [("a", 4), ("b", 9), ("c", 14)]


def test_several_sow_sections(tmp_path: Path) -> None:
    imported = import_text(configuration(queue(name="a"), more=f"<SOW>{queue(name='b')}</SOW>"), tmp_path)
    assert [queue.name for queue in imported.queues] == ["a", "b"]


def test_what_is_no_queue_is_none_of_our_business(tmp_path: Path) -> None:
    topic = "<Topic><Name>t</Name><MessageType>json</MessageType><Key>/id</Key></Topic>"
    imported = import_text(configuration(topic, "<View/>", "<ConflatedTopic/>", more="<Transports/>"), tmp_path)
    assert (imported.queues, imported.unmapped, imported.notes) == ([], [], [])


def test_an_unknown_element_of_the_sow_and_what_may_be_meant(tmp_path: Path) -> None:
    imported = import_text(configuration("<LocalQeue/>", "<Colour/>"), tmp_path)
    assert said(imported) == [
        (4, "LocalQeue", "it is unknown; LocalQueue may be meant"),
        (5, "Colour", "it is unknown"),
    ]


def test_a_queue_outside_the_sow(tmp_path: Path) -> None:
    imported = import_text(configuration(more=queue()), tmp_path)
    assert imported.queues == []
    ((_, name, why),) = said(imported)
    assert (name, why) == ("LocalQueue", "a queue is defined in <SOW>, and AMPS does not see this one")


def test_replication_is_a_note(tmp_path: Path) -> None:
    imported = import_text(configuration(queue(), more="<Replication><Destination/></Replication>"), tmp_path)
    assert [(note.element, note.queue) for note in imported.notes if "replicated" in note.reason] == [
        ("Replication", "")
    ]


def test_actions_are_a_note(tmp_path: Path) -> None:
    imported = import_text(configuration(queue(), more="<Actions><Action/></Actions>"), tmp_path)
    assert [(note.element, note.queue) for note in imported.notes if "on_expired" in note.reason] == [("Actions", "")]


@pytest.mark.parametrize("name", ["", " ", "<x/>"])
def test_a_queue_without_a_name_is_not_made(name: str, tmp_path: Path) -> None:
    imported = import_text(configuration(queue(name=name)), tmp_path)
    ((line, element, why),) = said(imported)
    assert (imported.queues, line, element) == ([], 4, "LocalQueue")
    assert why.startswith("its Name: it is empty" if name != "<x/>" else "its Name holds <x>")
    assert why.endswith("; the queue is left out")


def test_a_queue_without_any_name_is_not_made(tmp_path: Path) -> None:
    imported = import_text("<SOW><LocalQueue/></SOW>", tmp_path)
    assert said(imported) == [(1, "LocalQueue", "it has no Name; the queue is left out")]


def test_a_name_that_is_there_twice_makes_one_queue(tmp_path: Path) -> None:
    imported = import_text(configuration(queue(), queue("<MaxBacklog>5</MaxBacklog>")), tmp_path)
    assert "max_backlog" not in options(imported)
    assert said(imported) == [(9, "LocalQueue", "a queue 'orders' is there already, at line 4; the queue is left out")]


# -- the transaction log -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topics", "underlying", "journal"),
    [
        (["orders"], "", ["orders"]),
        (["other", "orders"], "", ["orders"]),
        ([".*"], "", ["orders"]),
        (["^ord"], "", ["orders"]),
        (["a", "b", "ab"], "^a", ["a", "ab"]),
        ([".*", "b"], "^a", [".*"]),
    ],
)
def test_topics_of_the_log_that_a_queue_collects(
    topics: list[str], underlying: str, journal: list[str], tmp_path: Path
) -> None:
    inside = (
        f"<UnderlyingTopic>{underlying}</UnderlyingTopic><DefaultPublishTarget>a</DefaultPublishTarget>"
        if underlying
        else ""
    )
    imported = import_text(configuration(queue(inside), logged=logged(*topics)), tmp_path)
    assert (imported.journal, imported.notes) == (journal, [])


@pytest.mark.parametrize(
    "log", ["", logged("other"), logged("orders", kind="fix"), "<JournalDirectory>./j</JournalDirectory>"]
)
def test_a_queue_whose_topic_is_not_logged_is_a_note(log: str, tmp_path: Path) -> None:
    imported = import_text(configuration(queue(), logged=log), tmp_path)
    assert imported.journal == []
    assert [(note.line, note.reason) for note in imported.notes] == [
        (4, "no topic of the TransactionLog is its topic 'orders', which AMPS requires")
    ]


def test_a_topic_of_two_queues_is_in_the_journal_once(tmp_path: Path) -> None:
    queues = [queue("<UnderlyingTopic>t</UnderlyingTopic>", name=name) for name in "ab"]
    assert import_text(configuration(*queues, logged=logged("t")), tmp_path).journal == ["t"]


def test_a_logged_topic_without_a_name_is_reported(tmp_path: Path) -> None:
    imported = import_text(configuration(queue(), logged="<Topic/>" + logged("${NONE}", "orders")), tmp_path)
    assert [name for _, name, _ in said(imported)] == ["TransactionLog/Topic"] * 2


# -- the environment -----------------------------------------------------------------------------------------------


def test_variables_come_from_the_environment(tmp_path: Path) -> None:
    text = queue("<MaxBacklog>${MOST}k</MaxBacklog>", name="${PLACE}/${WHAT}")
    imported = import_text(text, tmp_path, {"MOST": "2", "PLACE": "eu", "WHAT": "${MOST}"})
    assert options(imported)["max_backlog"] == "2000"
    assert options(imported)["name"] == '"eu/${MOST}"', "what is put in is not read again"


def test_what_a_variable_holds_is_no_xml(tmp_path: Path) -> None:
    imported = import_text(queue(name="${X}"), tmp_path, {"X": "<a>&b;"})
    assert options(imported)["name"] == '"<a>&b;"'


def test_a_variable_that_is_not_set(tmp_path: Path) -> None:
    imported = import_text(queue("<MaxBacklog>${MOST}</MaxBacklog>"), tmp_path)
    why = "the variable ${MOST} is not set in the environment of this command"
    assert said(imported) == [(4, "MaxBacklog", why)]
    assert said(import_text(queue(name="${A}"), tmp_path))[0][2].startswith("its Name: the variable ${A} is not set")


def test_a_variable_that_holds_no_text(tmp_path: Path) -> None:
    imported = import_text(queue("<Filter>${X}</Filter>"), tmp_path, {"X": "\udcff"})
    assert said(imported) == [(4, "Filter", "what the variable ${X} holds is no text")]


def test_a_publish_target_that_is_not_logged_is_a_note(tmp_path: Path) -> None:
    inside = "<UnderlyingTopic>^orders</UnderlyingTopic>\n<DefaultPublishTarget>orders/new</DefaultPublishTarget>"
    logged = "<Topic><Name>orders/old</Name><MessageType>json</MessageType></Topic>"
    imported = import_text(configuration(queue(inside), logged=logged), tmp_path)
    text = "no topic of the TransactionLog is 'orders/new', which AMPS requires of a publish target"
    assert [(note.line, note.element, note.reason) for note in imported.notes] == [(8, "DefaultPublishTarget", text)]

    logged += "<Topic><Name>orders/new</Name><MessageType>json</MessageType></Topic>"
    assert import_text(configuration(queue(inside), logged=logged), tmp_path).notes == []


def test_the_price_of_a_backlog_of_1_is_a_comment_of_its_class(tmp_path: Path) -> None:
    source = as_python(import_text(queue(), tmp_path))
    assert "# max_per_subscription_backlog = 1 is AMPS' default. A worker with one message at a time" in source
    source = as_python(import_text(queue("<MaxPerSubscriptionBacklog>1</MaxPerSubscriptionBacklog>"), tmp_path))
    assert "is AMPS' default" not in source, "it was chosen"
