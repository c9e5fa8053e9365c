"""Every element of a queue of AMPS: what it is here, what it is when it is missing, and which values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from queueapp.contrib.amps.elements import DISTRIBUTED, ELEMENTS, QUEUES

from .importing import configuration, import_text, options, queue, said

#: Every element of AMPS' page on queues.
OF_THE_PAGE = {
    "Name", "MessageType", "UnderlyingTopic", "DefaultPublishTarget", "LeasePeriod", "Semantics", "MaxBacklog",
    "MaxPerSubscriptionBacklog", "Expiration", "ExpirationModel", "Filter", "RecoveryPoint", "FairnessModel", "Leasing",
    "MaxDeliveries", "MaxCancels", "Priority", "BarrierExpression", "FileBackedMetadata", "TargetQueueDepth",
    "DeferredAckExpiration", "InitialOwner", "GroupLocalQueueDomain",
}  # fmt: skip
#: What ``class Delivery`` calls them.
OPTIONS = {
    "name",
    "message_type",
    "underlying_topic",
    "default_publish_target",
    "lease_period",
    "semantics",
    "max_backlog",
    "max_per_subscription_backlog",
    "expiration",
    "expiration_model",
    "filter",
    "recovery_point",
    "fairness_model",
    "leasing",
    "max_deliveries",
    "max_cancels",
    "priority",
    "barrier_expression",
    "file_backed_metadata",
    "target_queue_depth",
    "deferred_ack_expiration",
}


def test_every_element_of_the_page_is_known_and_no_other() -> None:
    assert {*ELEMENTS, *DISTRIBUTED} == OF_THE_PAGE
    assert {known.option for known in ELEMENTS.values()} == OPTIONS
    assert set(QUEUES) == {"Queue", "QueueDefinition", "LocalQueue", "GroupLocalQueue"}


@pytest.mark.parametrize(
    ("element", "text", "option", "source"),
    [
        ("UnderlyingTopic", "orders_new", "underlying_topic", '"orders_new"'),
        ("Filter", "/price &gt; 10 AND /side = 'buy'", "filter", "\"/price > 10 AND /side = 'buy'\""),
        ("Semantics", "at-least-once", "semantics", "Semantics.AT_LEAST_ONCE"),
        ("Semantics", "at-most-once", "semantics", "Semantics.AT_MOST_ONCE"),
        ("LeasePeriod", "30s", "lease_period", "timedelta(seconds=30)"),
        ("LeasePeriod", "1500ms", "lease_period", "timedelta(milliseconds=1500)"),
        ("Leasing", "strict", "leasing", "Leasing.STRICT"),
        ("Leasing", "sublet", "leasing", "Leasing.SUBLET"),
        ("MaxDeliveries", "5", "max_deliveries", "5"),
        ("MaxDeliveries", "0", "max_deliveries", "0"),
        ("MaxCancels", "2", "max_cancels", "2"),
        ("Expiration", "2h", "expiration", "timedelta(hours=2)"),
        ("ExpirationModel", "default", "expiration_model", "ExpirationModel.DEFAULT"),
        ("ExpirationModel", "queue", "expiration_model", "ExpirationModel.QUEUE"),
        ("ExpirationModel", "latest", "expiration_model", "ExpirationModel.LATEST"),
        ("ExpirationModel", "earliest", "expiration_model", "ExpirationModel.EARLIEST"),
        ("DeferredAckExpiration", "15m", "deferred_ack_expiration", "timedelta(minutes=15)"),
        ("MaxBacklog", "10k", "max_backlog", "10000"),
        ("MaxPerSubscriptionBacklog", "12", "max_per_subscription_backlog", "12"),
        ("FairnessModel", "fast", "fairness_model", "FairnessModel.FAST"),
        ("FairnessModel", "round-robin", "fairness_model", "FairnessModel.ROUND_ROBIN"),
        ("FairnessModel", "proportional", "fairness_model", "FairnessModel.PROPORTIONAL"),
        ("Priority", "/priority", "priority", '"/priority"'),
        ("Priority", "/price * /quantity", "priority", '"/price * /quantity"'),
        ("BarrierExpression", "/isSyncPoint IS NOT NULL", "barrier_expression", '"/isSyncPoint IS NOT NULL"'),
        ("TargetQueueDepth", "12500", "target_queue_depth", "12500"),
        ("FileBackedMetadata", "enabled", "file_backed_metadata", "True"),
        ("RecoveryPoint", "epoch", "recovery_point", '"epoch"'),
        ("RecoveryPoint", "now", "recovery_point", '"now"'),
        ("RecoveryPoint", "creation", "recovery_point", '"creation"'),
        ("RecoveryPoint", "20141031T140000Z", "recovery_point", '"2014-10-31T14:00:00Z"'),
        ("RecoveryPoint", "2014-10-31T14:00:00.25Z", "recovery_point", '"2014-10-31T14:00:00.250000Z"'),
    ],
)
def test_an_element_becomes_its_option(element: str, text: str, option: str, source: str, tmp_path: Path) -> None:
    imported = import_text(queue(f"<{element}> {text}\n</{element}>"), tmp_path)
    assert options(imported)[option] == source
    assert said(imported) == []


def test_name_and_its_synonym_topic(tmp_path: Path) -> None:
    named = import_text(queue(name="orders/new"), tmp_path)
    synonym = import_text(queue(name="orders/new").replace("Name>", "Topic>"), tmp_path)
    assert options(named) == options(synonym)
    assert options(named)["name"] == '"orders/new"'
    assert said(synonym) == []


def test_topic_beside_a_name_is_reported(tmp_path: Path) -> None:
    imported = import_text(queue("<Topic>other</Topic>"), tmp_path)
    assert options(imported)["name"] == '"orders"'
    assert said(imported) == [(4, "Topic", "stands for Name where that is missing; that of line 2 counts")]


@pytest.mark.parametrize("text", ["json", "msgpack", "binary", "JSON"])
def test_message_type(text: str, tmp_path: Path) -> None:
    imported = import_text(queue().replace("json", text), tmp_path)
    assert options(imported)["message_type"] == f'"{text.lower()}"'


@pytest.mark.parametrize("text", ["fix", "nvfix", "xml", "bson", "bflat", "protobuf"])
def test_message_type_that_is_not_read_here_is_written_and_reported(text: str, tmp_path: Path) -> None:
    imported = import_text(queue().replace("json", text), tmp_path)
    assert options(imported)["message_type"] == f'"{text}"', "and not left to be JSON"
    ((line, name, why),) = said(imported)
    assert (line, name) == (3, "MessageType")
    assert why.startswith(f"'{text}' is not read here: it must be one of binary, json, msgpack")


def test_message_type_is_required(tmp_path: Path) -> None:
    imported = import_text(queue().replace("<MessageType>json</MessageType>", ""), tmp_path)
    assert said(imported) == [(1, "LocalQueue", "it has no MessageType, which AMPS requires")]


def test_default_publish_target_of_a_regular_expression(tmp_path: Path) -> None:
    topics = "<UnderlyingTopic>^ORDERS$|^X_DIRECT$</UnderlyingTopic>"
    imported = import_text(queue(f"{topics}\n<DefaultPublishTarget>X_DIRECT</DefaultPublishTarget>"), tmp_path)
    assert options(imported)["default_publish_target"] == '"X_DIRECT"'
    assert said(imported) == []
    without = import_text(queue(topics), tmp_path)
    assert said(without) == [
        (
            4,
            "UnderlyingTopic",
            "'^ORDERS$|^X_DIRECT$' is a regular expression, with which AMPS requires a DefaultPublishTarget",
        )
    ]
    outside = import_text(queue(f"{topics}\n<DefaultPublishTarget>ORDERS_2</DefaultPublishTarget>"), tmp_path)
    assert said(outside) == [
        (5, "DefaultPublishTarget", "'ORDERS_2' is none of the queue's topics, '^ORDERS$|^X_DIRECT$'")
    ]


@pytest.mark.parametrize("broken", ["(a", "a{99999999999}", "(" * 5000, "*", "[[a", "[a--b]("])
def test_a_broken_regular_expression_names_no_topic(broken: str, tmp_path: Path) -> None:
    imported = import_text(
        queue(f"<UnderlyingTopic>{broken}</UnderlyingTopic><DefaultPublishTarget>a</DefaultPublishTarget>"), tmp_path
    )
    ((_, name, why),) = said(imported)[-1:]
    assert (name, why[:34]) == ("DefaultPublishTarget", "'a' is none of the queue's topics,")


# -- what AMPS does where nothing is said --------------------------------------------------------------------------


def test_defaults_of_amps_are_written_out(tmp_path: Path) -> None:
    assert options(import_text(queue(), tmp_path)) == {
        "name": '"orders"',
        "message_type": '"json"',
        "lease_period": "None",
        "leasing": "Leasing.SUBLET",
        "max_per_subscription_backlog": "1",
        "fairness_model": "FairnessModel.PROPORTIONAL",
        "attempts": "1000",
        "on_expired": 'Drop(("time_limit", "forced_expire", "max_cancels", "max_deliveries"))',
    }


def test_defaults_of_amps_at_most_once(tmp_path: Path) -> None:
    assert options(import_text(queue("<Semantics>at-most-once</Semantics>"), tmp_path)) == {
        "name": '"orders"',
        "message_type": '"json"',
        "semantics": "Semantics.AT_MOST_ONCE",
        "max_per_subscription_backlog": "1",
        "fairness_model": "FairnessModel.ROUND_ROBIN",
        "on_expired": 'Drop(("time_limit", "forced_expire", "max_cancels", "max_deliveries"))',
    }


def test_deferred_acks_are_kept_for_a_day_where_a_journal_is(tmp_path: Path) -> None:
    logged = "<Topic><Name>orders</Name><MessageType>json</MessageType></Topic>"
    assert "deferred_ack_expiration" not in options(import_text(configuration(queue()), tmp_path))
    imported = import_text(configuration(queue(), logged=logged), tmp_path)
    assert options(imported)["deferred_ack_expiration"] == "timedelta(days=1)"
    given = queue("<DeferredAckExpiration>2h</DeferredAckExpiration>")
    imported = import_text(configuration(given, logged=logged), tmp_path)
    assert options(imported)["deferred_ack_expiration"] == "timedelta(hours=2)"


# -- at-most-once --------------------------------------------------------------------------------------------------


def test_at_most_once_has_round_robin_alone(tmp_path: Path) -> None:
    text = "<Semantics>at-most-once</Semantics>\n<FairnessModel>fast</FairnessModel>"
    imported = import_text(queue(text), tmp_path)
    assert options(imported)["fairness_model"] == "FairnessModel.ROUND_ROBIN"
    assert said(imported) == [
        (5, "FairnessModel", "a queue that is at-most-once has round-robin alone, which is taken")
    ]


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ("LeasePeriod", "1m"),
        ("Leasing", "strict"),
        ("MaxDeliveries", "2"),
        ("MaxCancels", "2"),
        ("DeferredAckExpiration", "1d"),
    ],
)
def test_what_has_no_effect_at_most_once_is_left_out_with_a_note(element: str, text: str, tmp_path: Path) -> None:
    imported = import_text(queue(f"<Semantics>at-most-once</Semantics>\n<{element}>{text}</{element}>"), tmp_path)
    assert ELEMENTS[element].option not in options(imported)
    assert said(imported) == []
    assert [(note.line, note.element) for note in imported.notes] == [(5, element)]


# -- what does not go together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("<Priority>/p</Priority>", "<BarrierExpression>/b = 1</BarrierExpression>"),
        ("<Priority>/p</Priority>", "<TargetQueueDepth>2000</TargetQueueDepth>"),
        ("<BarrierExpression>/b = 1</BarrierExpression>", "<TargetQueueDepth>2000</TargetQueueDepth>"),
    ],
)
def test_priority_barrier_and_target_depth_exclude_each_other(first: str, second: str, tmp_path: Path) -> None:
    imported = import_text(queue(f"{first}\n{second}"), tmp_path)
    kept, left_out = (item[1 : item.index(">")] for item in (first, second))
    assert ELEMENTS[kept].option in options(imported)
    assert ELEMENTS[left_out].option not in options(imported)
    assert said(imported) == [(5, left_out, f"does not go with {kept} (line 4); left out")]


# -- values that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "text", "why"),
    [
        ("LeasePeriod", "5000", "'5000' is no interval: a number with a unit, one of ns, us, ms, s, m, h, d, w"),
        ("LeasePeriod", "-1s", "'-1s' is no interval"),
        ("Expiration", "soon", "'soon' is no interval"),
        ("Expiration", "500ns", "'500ns' is finer than a microsecond"),
        ("Expiration", "99999999999w", "'99999999999w' is longer than"),
        ("LeasePeriod", "1us", "is not accepted here: lease_period must be a timedelta from 0:00:00.1"),
        ("MaxDeliveries", "2M", "is not accepted here: max_deliveries must be a whole number from 0 to 1000000"),
        ("MaxBacklog", "many", "'many' is no whole number"),
        ("MaxBacklog", "1.5", "'1.5' is no whole number"),
        ("MaxBacklog", "1kb", "'1kb' counts bytes, and this counts messages"),
        ("MaxBacklog", "", "it is empty"),
        ("MaxBacklog", "1<x/>", "it holds <x>, and is a text"),
        ("Semantics", "exactly-once", "'exactly-once' is none of at-least-once, at-most-once"),
        ("Leasing", "fenced", "'fenced' is none of strict, sublet"),
        ("ExpirationModel", "never", "'never' is none of default, queue, latest, earliest"),
        ("FairnessModel", "fair", "'fair' is none of fast, round-robin, proportional"),
        ("FileBackedMetadata", "disabled", "'disabled' is not 'enabled', the only value that it has"),
        ("RecoveryPoint", "13948331409347523872|1490191489|", "a bookmark names a message of AMPS' transaction log"),
        ("RecoveryPoint", "20141331T140000Z", "'20141331T140000Z' is no time: month must be in 1..12"),
        ("RecoveryPoint", "yesterday", "'yesterday' is none of epoch, now, creation"),
        ("Filter", "/a = ", "'/a =' is no expression here: "),
        ("Filter", "UNIX_TIMESTAMP() &gt; 5", "is no expression here: "),
        ("Priority", "/a +* 2", "is no expression here: "),
        ("BarrierExpression", "(", "is no expression here: "),
    ],
)
def test_a_value_that_is_none_is_reported_and_left_out(element: str, text: str, why: str, tmp_path: Path) -> None:
    imported = import_text(queue(f"<{element}>{text}</{element}>"), tmp_path)
    ((line, name, reason),) = said(imported)
    assert (line, name) == (4, element)
    assert why in reason
    assert ELEMENTS[element].option not in options(imported)


@pytest.mark.parametrize(
    ("element", "text"), [("MaxBacklog", "5"), ("Filter", "/a = 1"), ("UnderlyingTopic", "a"), ("Name", "b")]
)
def test_an_element_that_is_there_twice(element: str, text: str, tmp_path: Path) -> None:
    twice = f"<{element}>{text}</{element}>\n<{element}>{text}</{element}>"
    imported = import_text(queue(twice) if element != "Name" else queue(f"<Name>{text}</Name>"), tmp_path)
    ((_, name, reason),) = said(imported)
    assert name == element
    assert reason.startswith("it is there twice; that of line ")


def test_an_unknown_element_and_what_may_be_meant(tmp_path: Path) -> None:
    imported = import_text(queue("<MaxBacklogs>5</MaxBacklogs>\n<Colour>red</Colour>"), tmp_path)
    assert said(imported) == [
        (4, "MaxBacklogs", "it is unknown; MaxBacklog may be meant"),
        (5, "Colour", "it is unknown"),
    ]


def test_an_attribute_is_unknown(tmp_path: Path) -> None:
    imported = import_text(queue().replace("<LocalQueue>", '<LocalQueue size="5">'), tmp_path)
    assert said(imported) == [(1, "LocalQueue", "its attribute 'size' is unknown")]


# -- several instances ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["Queue", "QueueDefinition"])
def test_distributed_queues_are_made_as_local_ones_and_reported(element: str, tmp_path: Path) -> None:
    imported = import_text(queue(element=element), tmp_path)
    assert options(imported) == options(import_text(queue(), tmp_path))
    ((line, name, reason),) = said(imported)
    assert (line, name) == (1, element)
    assert "not built yet" in reason


def test_group_local_queues_with_initial_owner_and_domain(tmp_path: Path) -> None:
    text = "<InitialOwner>one</InitialOwner>\n<GroupLocalQueueDomain>both</GroupLocalQueueDomain>"
    imported = import_text(queue(text, element="GroupLocalQueue"), tmp_path)
    assert [(line, name) for line, name, _ in said(imported)] == [
        (1, "GroupLocalQueue"),
        (4, "InitialOwner"),
        (5, "GroupLocalQueueDomain"),
    ]
    assert all("not built yet" in reason for _, _, reason in said(imported))
    assert not {"initial_owner", "group_local_queue_domain"} & set(options(imported))


def test_initial_owner_is_required_of_a_group_local_queue(tmp_path: Path) -> None:
    imported = import_text(queue(element="GroupLocalQueue"), tmp_path)
    assert (1, "GroupLocalQueue", "it has no InitialOwner, which AMPS requires") in said(imported)


@pytest.mark.parametrize("element", DISTRIBUTED)
def test_what_goes_with_group_local_queues_alone(element: str, tmp_path: Path) -> None:
    imported = import_text(queue(f"<{element}>one</{element}>"), tmp_path)
    assert said(imported) == [(4, element, "goes with a GroupLocalQueue alone, and this is a LocalQueue")]


def test_an_attribute_of_an_option_is_unknown(tmp_path: Path) -> None:
    imported = import_text(queue('<LeasePeriod unit="minutes">5s</LeasePeriod>'), tmp_path)
    assert said(imported) == [(4, "LeasePeriod", "its attribute 'unit' is unknown")]


def test_queues_of_an_unknown_section_are_reported(tmp_path: Path) -> None:
    imported = import_text(configuration(more=f"<Sow>{queue()}</Sow>"), tmp_path)
    assert imported.queues == []
    assert said(imported) == [(6, "Sow", "it is unknown, and its queues are left out: AMPS reads those in <SOW>")]


def test_a_backlog_of_a_subscription_above_that_of_the_queue_is_lowered_and_said(tmp_path: Path) -> None:
    both = "<MaxBacklog>10</MaxBacklog><MaxPerSubscriptionBacklog>20</MaxPerSubscriptionBacklog>"
    imported = import_text(queue(both), tmp_path)
    assert options(imported)["max_per_subscription_backlog"] == "10"
    assert [note.reason for note in imported.notes] == ["is more than MaxBacklog, which it never exceeds: 10"]
