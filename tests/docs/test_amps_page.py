"""The page on AMPS has every element of a queue, and its example is what the command prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from queueapp.contrib.amps.convert import IMPORTED, as_python, import_configuration
from queueapp.contrib.amps.elements import DISTRIBUTED, ELEMENTS, QUEUES

from .pages import CHECKOUT, DOCS, blocks

PAGE = DOCS / "reference" / "amps.md"
#: The cells of the tables with an element in each row.
ROWS = {
    match[1]: cells
    for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE.read_text(), re.MULTILINE)
    if len(cells := [cell.strip() for cell in re.split(r"(?<!\\)\|", match[0])[1:-1]]) == 6
}
#: Every element of AMPS' page on queues.
OF_THE_PAGE = (
    "Queue",
    "LocalQueue",
    "GroupLocalQueue",
    "Name",
    "MessageType",
    "UnderlyingTopic",
    "DefaultPublishTarget",
    "LeasePeriod",
    "Semantics",
    "MaxBacklog",
    "MaxPerSubscriptionBacklog",
    "Expiration",
    "ExpirationModel",
    "Filter",
    "RecoveryPoint",
    "FairnessModel",
    "Leasing",
    "MaxDeliveries",
    "MaxCancels",
    "Priority",
    "BarrierExpression",
    "FileBackedMetadata",
    "TargetQueueDepth",
    "DeferredAckExpiration",
    "InitialOwner",
    "GroupLocalQueueDomain",
)


@pytest.mark.parametrize("element", OF_THE_PAGE)
def test_every_element_has_its_row(element: str) -> None:
    assert element in ROWS
    assert all(ROWS[element]), "a cell is empty"


def test_no_row_is_of_anything_else() -> None:
    assert set(ROWS) == set(OF_THE_PAGE)


@pytest.mark.parametrize("synonym", ["QueueDefinition", "Topic"])
def test_the_synonyms_are_named(synonym: str) -> None:
    assert re.search(rf"`{synonym}` is a synonym", PAGE.read_text())


def test_every_row_names_the_option_that_the_command_writes() -> None:
    for known in ELEMENTS.values():
        assert ROWS[known.name][1] == f"`{known.option}`"


@pytest.mark.parametrize(
    "element", [*DISTRIBUTED, *(name for name in QUEUES if name not in ("LocalQueue", "QueueDefinition"))]
)
def test_unsupported_features_are_named(element: str) -> None:
    assert "Not built yet; refused at import" in ROWS[element][4]


def test_the_example_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (configuration,) = blocks(PAGE, "xml")
    (source,) = blocks(PAGE, "python")
    monkeypatch.chdir(tmp_path)
    Path("config.xml").write_text(configuration.code)
    assert as_python(import_configuration("config.xml", {}, IMPORTED), "shop") == source.code


#: What AMPS says of queues, by element or by what is done to a message -> the tests named after it. The first says what
#: it is for.
TESTS = {
    "Name": "test_underlying_topic_is_the_name_and_the_name_the_class_where_nothing_else_is_set",
    "MessageType": "test_message_type_msgpack_is_sent_filtered_and_handled test_message_type_binary_has_no_fields "
    "test_message_type_must_be_one_for_a_topic test_message_type_of_a_project_is_a_codec",
    "UnderlyingTopic": "test_underlying_topic_takes_what_is_published_to_it_into_every_queue_under_one_id "
    "test_underlying_topic_is_sought_anywhere_in_the_name "
    "test_underlying_topic_is_a_regular_expression_when_it_has_a_sign_of_one",
    "DefaultPublishTarget": "test_default_publish_target_is_the_topic_of_what_is_published_to_the_queues_name "
    "test_default_publish_target_is_required_by_a_regular_expression "
    "test_default_publish_target_must_be_one_of_the_topics",
    "Filter": "test_filter_leaves_the_queue_out_of_what_is_published "
    "test_filter_lets_what_matches_be_sent_and_refuses_the_rest "
    "test_filter_refuses_functions_that_change_with_time",
    "RecoveryPoint": "test_recovery_point_epoch_fills_a_new_queue_from_the_beginning "
    "test_recovery_point_now_takes_only_what_comes "
    "test_recovery_point_bookmark_begins_with_that_message test_recovery_point_timestamp_begins_at_that_time "
    "test_recovery_point_that_was_changed_lets_the_queue_be_filled_from_there",
    "FileBackedMetadata": "test_file_backed_metadata_is_accepted "
    "test_target_queue_depth_beside_file_backed_metadata_is_warned_of",
    "Semantics": "test_semantics_what_is_acked_is_gone_and_the_rest_is_back_in_its_place "
    "test_semantics_at_most_once_is_gone_when_it_is_received "
    "test_semantics_at_most_once_with_a_limit_frees_places_of_receive_as_they_are_acked "
    "test_semantics_at_most_once_with_a_limit_is_gone_with_the_subscriber_that_it_was_sent_to",
    "LeasePeriod": "test_lease_period_unset_should_never_expire_and_never_be_renewed "
    "test_lease_period_set_at_run_time_is_in_force_for_workers_and_receive",
    "disconnect": "test_disconnect_of_a_dead_subscriber_gives_its_leases_back "
    "test_disconnect_by_an_error_in_the_block_gives_leased_messages_back",
    "Leasing": "test_leasing_the_holder_may_ack test_leasing_another_clients_lease "
    "test_leasing_of_messages_without_an_owner "
    "test_leasing_the_unit_is_the_client test_leasing_a_late_ack_before_it_is_leased_anew "
    "test_leasing_a_late_ack_after_it_was_leased_anew",
    "ack by filter": "test_ack_by_filter",
    "ack cancel": "test_ack_cancel test_ack_cancel_of_an_expired_lease_changes_nothing",
    "ack expire": "test_ack_expire",
    "MaxDeliveries": "test_max_deliveries_the_one_that_reaches_it_is_the_last "
    "test_max_deliveries_should_end_as_the_queue_wants "
    "test_max_deliveries_when_a_dead_subscribers_leases_are_released test_max_deliveries_and_max_cancels_by_bookmark",
    "MaxCancels": "test_max_cancels_the_one_that_reaches_it_makes_it_poison test_max_cancels_by_bookmark",
    "Expiration": "test_expiration_can_be_changed_while_messages_wait "
    "test_expiration_holds_for_rows_of_foreign_producers "
    "test_expiration_set_at_run_time_is_in_force_for_a_running_worker",
    "ExpirationModel": "test_expiration_model",
    "reasons": "test_reasons_of_all_limits_that_are_reached_are_named test_reasons_time_limit_is_named_beside_a_limit "
    "test_reasons_forced_expire_and_time_limit_are_both_named",
    "DeferredAckExpiration": "test_deferred_ack_expiration test_deferred_ack_count",
    "MaxBacklog": "test_max_backlog_is_never_exceeded_by_16_claimers "
    "test_max_backlog_is_never_exceeded_by_16_tasks_of_4_processes test_max_backlog_wakes_who_waits_for_room",
    "MaxPerSubscriptionBacklog": "test_max_per_subscription_backlog_holds_for_each_process "
    "test_max_per_subscription_backlog_bounds_one_receive",
    "FairnessModel": "test_fairness_model_assigns_as_one_at_a_time test_fairness_model_round_robin_among_processes "
    "test_fairness_model_proportional_among_processes test_fairness_model_of_an_at_most_once_queue_is_round_robin",
    "Priority": "test_priority_of_64_bits_highest_first_and_within_one_oldest_first "
    "test_priority_is_a_field_or_an_expression "
    "test_priority_is_what_the_expression_gives_and_no_number_is_the_lowest",
    "BarrierExpression": "test_barrier_rule_1_waits_until_every_previous_message_is_acked "
    "test_barrier_rule_2_nothing_behind_it_is_delivered_before_it "
    "test_barrier_rule_3_goes_to_every_current_subscriber_once "
    "test_barrier_rule_4_is_removed_at_once_without_an_ack test_barrier_goes_to_a_worker_with_a_backlog_of_0 "
    "test_barrier_expression_is_true_or_the_message_is_none test_barrier_rules_hold_for_several_worker_processes "
    "test_barrier_rule_8_at_most_once_waits_for_acks_and_hands_nothing_out_twice",
    "TargetQueueDepth": "test_target_queue_depth_keeps_so_many_active_and_the_others_in_the_journal "
    "test_target_queue_depth_below_1000_is_refused test_target_queue_depth_excludes_priority_and_barrier "
    "test_target_queue_depth_set_at_run_time_is_in_force_for_who_tops_up",
    "Queue": "test_distribution_is_refused_until_it_is_built",
    "LocalQueue": "test_distribution_local_is_accepted",
    "GroupLocalQueue": "test_distribution_is_refused_until_it_is_built",
    "InitialOwner": "test_initial_owner_is_refused_until_it_is_built "
    "test_initial_owner_is_required_of_a_group_local_queue",
    "GroupLocalQueueDomain": "test_group_local_queue_domain_is_refused_until_it_is_built",
}


def functions() -> Iterator[str]:
    for file in (CHECKOUT / "tests").rglob("test_*.py"):
        yield from re.findall(r"^ *(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE)


def test_every_row_has_a_test_named_after_it() -> None:
    assert TESTS.keys() >= set(ROWS)
    there = set(functions())
    assert [test for tests in TESTS.values() for test in tests.split() if test not in there] == []


def test_the_last_column_selects_those_tests() -> None:
    words = {element: cells[5].strip("`") for element, cells in ROWS.items()}
    assert [
        test for test, tests in TESTS.items() if not all(words.get(test, test.split()[0]) in t for t in tests.split())
    ] == []
