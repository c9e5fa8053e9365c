"""What two other suites ask of a backend, and which of our tests fail where ours does not do it.

``OF_DJANGO_TASKS_DB``: the database backend ``django-tasks-db`` 0.13.0, whose tests are 95. ``OF_DJANGO``: Django's
``tests/tasks``, what of them is about a backend; the rest is about the framework's own classes. By name: the tests
here, or after a dash why there can be none.
"""

from __future__ import annotations

import re

import pytest

from tests.upstream import CHECKOUT

_IDS = "- ids are made by the queue, time-ordered: there is no id_function"
_SQLITE = "- SQLite, which queues are not on"
_NO_SUCH_OPTION = "- runqueueworker has no such option: "
_THEIR_COMMAND = "- maintenance prunes by OPTIONS['retention']: there is no command for it, with such an option"
_SUCCEEDS = "test_the_return_value_of_a_task_is_stored "
_UNKNOWN = "test_an_unknown_task_is_poison_with_its_bytes"
_NO_ID = "test_an_id_that_is_none_is_of_no_result"
_LOCKED = "test_claim_passes_over_what_is_locked_and_never_waits"
_OLD = "test_old_results_are_deleted"

OF_DJANGO_TASKS_DB = {
    "DatabaseBackendTestCase": {
        "using_correct_backend": "test_the_backend_is_the_one_of_settings",
        "enqueue_task": "test_an_enqueued_task_is_ready test_enqueueing_is_one_statement "
        "test_signals_of_a_task_that_succeeds",
        "enqueue_task_async": "test_aenqueue_is_the_same test_signals_of_a_task_that_succeeds",
        "get_result": "test_a_result_is_found_by_its_id",
        "get_result_async": "test_aenqueue_is_the_same",
        "refresh_result": _SUCCEEDS,
        "refresh_result_async": "test_async_tasks_run_as_well",
        "get_missing_result": _NO_ID,
        "async_get_missing_result": _NO_ID,
        "invalid_uuid": _NO_ID,
        "async_invalid_uuid": _NO_ID,
        "invalid_task_path": _UNKNOWN,
        "missing_task_path": _UNKNOWN + " test_the_result_of_a_task_that_is_no_more_can_be_read",
        "task_name": "- a property of their model: our admin shows the path, "
        "test_results_are_listed_with_their_current_status",
        "check": "test_what_is_wrong_with_a_backend_is_reported",
        "database_backend_app_missing": "test_the_app_that_has_the_tables_is_asked_for",
        "priority_range_check": "- a constraint of their table: levels are a queue's, and what a header says is read "
        "with care, "
        "test_malformed_headers_do_not_repeat_a_task",
        "doesnt_wait_until_transaction_commit": "test_a_task_is_enqueued_with_the_callers_transaction_or_not_at_all",
        "enqueue_logs": "test_signals_of_a_task_that_succeeds",
        "index_scan_for_ready": "test_its_statements_and_their_plans_are_those_that_one_would_write "
        "test_a_result_is_looked_for_by_indexes",
        "run_after_tz": "test_without_time_zones_run_after_is_naive",
        "run_after_null_0016_migration": "- a migration of theirs",
        "validate_on_enqueue": "test_a_task_is_validated_again_when_it_is_enqueued",
        "validate_on_aenqueue": "test_a_task_is_validated_again_when_it_is_enqueued",
        "custom_id_function": _IDS,
        "unknown_id_function": _IDS,
        "postgres_db_id_function": _IDS,
        "postgres_id_function_expression": _IDS,
    },
    "DatabaseBackendWorkerTestCase": {
        "run_enqueued_task": _SUCCEEDS,
        "batch_processes_all_tasks": "test_until_empty_runs_everything_and_ends",
        "no_tasks": "test_a_tree_works_until_the_queues_and_their_delayed_messages_are_gone",
        "doesnt_process_different_queue": "test_workers_consume_the_configured_queue_names",
        "process_all_queues": "test_workers_consume_the_configured_queue_names",
        "process_all_queues_excluding_one_queue": "test_workers_consume_the_configured_queue_names",
        "exclude_queues_requires_processing_all_queues": "- OPTIONS['work'] names what is taken, and nothing is "
        "excluded",
        "excluding_unknown_queue_processes_selected_queues": "- the same; a name that QUEUES has not is a check, "
        "test_what_is_wrong_with_a_backend_is_reported",
        "failing_task": "test_a_task_that_raises_has_failed",
        "complex_exception": "test_an_exception_with_any_content_is_stored",
        "complex_return_value": "test_a_return_value_that_no_json_is_fails_the_task",
        "doesnt_process_different_backend": "test_a_task_is_tried_as_the_backend_states_that_it_was_enqueued_with",
        "unknown_backend": _NO_SUCH_OPTION + "it takes queues, test_a_tree_that_cannot_work_gives_the_reason",
        "incorrect_backend": _NO_SUCH_OPTION + "it takes queues, test_a_tree_that_cannot_work_gives_the_reason",
        "negative_interval": _NO_SUCH_OPTION + "PEEK_DELAY is a setting",
        "infinite_interval": _NO_SUCH_OPTION + "PEEK_DELAY is a setting",
        "fractional_interval": _NO_SUCH_OPTION + "PEEK_DELAY is a setting",
        "zero_interval": _NO_SUCH_OPTION + "PEEK_DELAY is a setting",
        "negative_max_tasks": _NO_SUCH_OPTION + "a worker ends by a signal, or --until-empty",
        "zero_max_tasks": _NO_SUCH_OPTION + "a worker ends by a signal, or --until-empty",
        "max_tasks": _NO_SUCH_OPTION + "a worker ends by a signal, or --until-empty",
        "too_long_worker_id": _NO_SUCH_OPTION + "a worker is its host and process, "
        "test_a_task_is_running_while_it_runs",
        "empty_worker_id": _NO_SUCH_OPTION + "a worker is its host and process, test_a_task_is_running_while_it_runs",
        "run_after": "test_a_task_of_later_waits_with_the_delayed_ones",
        "run_after_priority": "test_tasks_of_a_higher_priority_run_first "
        "test_a_task_whose_time_has_come_does_not_wait_with_the_delayed_ones",
        "verbose_logging": "- theirs prints each task on stdout, which is the framework's log here, "
        "test_signals_of_a_task_that_succeeds",
        "invalid_task_path": _UNKNOWN,
        "missing_task_path": _UNKNOWN,
        "worker_doesnt_exit_on_failure": "test_whatever_a_task_raises_ends_neither_worker_nor_queue",
        "worker_with_locked_rows": _LOCKED,
        "takes_context": "test_a_task_receives_its_context",
        "context": "test_a_task_receives_its_context",
        "task_import_string": _UNKNOWN,
    },
    "DatabaseTaskResultTestCase": {
        "cross_connection": "test_a_task_is_enqueued_with_the_callers_transaction_or_not_at_all",
        "locks_tasks": "test_concurrent_claims_take_every_message_once " + _LOCKED,
        "locks_tasks_sqlite": _SQLITE,
        "locks_tasks_filtered": "test_recipient_gets_what_is_addressed_to_it " + _LOCKED,
        "locks_tasks_filtered_sqlite": _SQLITE,
        "lock_no_rows": "test_empty_queue",
        "get_locked_with_locked_rows": _LOCKED,
    },
    "ConnectionExclusiveTranscationTestCase": {"exclusive_transaction": _SQLITE},
    "DatabaseBackendPruneTaskResultsTestCase": {
        "prunes_tasks": _OLD,
        "doesnt_prune_new_tasks": _OLD
        + " test_a_task_that_was_purged_between_two_attempts_is_not_to_be_tried_for_ever",
        "doesnt_prune_running_tasks": "- nothing is kept of a task that runs but its message",
        "only_prunes_specified_queue": "- retention is a backend's: " + _OLD,
        "prune_all_queues": _OLD,
        "min_age": _OLD,
        "failed_min_age": "- what has failed is poison until an operator resolves it: " + _OLD,
        "failed_min_age_zero": "- what has failed is poison until an operator resolves it: " + _OLD,
        "dry_run": _THEIR_COMMAND,
        "unknown_backend": _THEIR_COMMAND,
        "incorrect_backend": _THEIR_COMMAND,
        "negative_age": "test_what_is_wrong_with_a_backend_is_reported",
    },
    "DatabaseWorkerProcessTestCase": {
        "run_subprocess": "test_until_empty_runs_everything_and_ends",
        "interrupt_no_tasks": "test_a_signal_in_the_middle_of_the_wait_for_it_stops_the_process",
        "interrupt_signals": "test_a_worker_that_is_asked_to_stop_ends_its_task_first",
        "repeat_ctrl_c": "test_the_first_request_stops_and_the_second_one_hurries",
        "kill": "test_the_death_of_a_whole_tree_leaves_no_task_running test_workers_that_are_killed_lose_nothing",
        "system_exit_task": "test_whatever_a_task_raises_ends_neither_worker_nor_queue",
        "keyboard_interrupt_task": "test_whatever_a_task_raises_ends_neither_worker_nor_queue",
        "multiple_workers": "test_workers_that_are_killed_lose_nothing",
    },
    "CompatTestCase": {"compat_has_django_task": "test_options_of_a_task_are_arguments_or_a_decorator"},
    "DBTaskResultOrderingTestCase": {
        "higher_priority_tasks_come_first": "test_tasks_of_a_higher_priority_run_first",
        "earlier_run_after_comes_first_given_same_priority": "test_due_messages_are_locked_in_due_order_and_the_others_are_not",  # noqa: E501
        "earlier_enqueued_at_comes_first_given_same_priority_and_run_after": "test_tasks_of_a_higher_priority_run_first",  # noqa: E501
    },
    "AdminTestCase": {
        "display_run_after_returns_empty_for_date_max_or_none": "- a column of theirs: when is on the page of delayed "
        "messages",
        "display_run_after_returns_db_value": "- a column of theirs: when is on the page of delayed messages",
    },
}

OF_DJANGO = {
    "using_correct_backend": "test_the_backend_is_the_one_of_settings",
    "enqueue_task": "test_an_enqueued_task_is_ready",
    "enqueue_task_async": "test_aenqueue_is_the_same",
    "enqueue_with_invalid_argument": "test_arguments_that_no_json_holds_are_refused",
    "aenqueue_with_invalid_argument": "test_arguments_that_no_json_holds_are_refused",
    "using_priority": "test_the_options_of_an_enqueued_task_are_in_its_result",
    "using_queue_name": "test_the_options_of_an_enqueued_task_are_in_its_result",
    "using_run_after": "test_a_task_of_later_waits_with_the_delayed_ones",
    "refresh_result": "test_async_tasks_run_as_well",
    "naive_datetime": "test_a_naive_run_after_is_refused",
    "invalid_priority": "test_a_priority_out_of_its_bounds_is_refused",
    "unknown_queue_name": "test_an_unknown_queue_name_is_refused test_any_queue_name_will_do_where_none_is_named",
    "get_result": "test_a_result_is_found_by_its_id",
    "get_result_async": "test_aenqueue_is_the_same",
    "get_missing_result": _NO_ID,
    "get_incorrect_result": "test_a_result_of_another_task_is_a_mismatch",
    "get_incorrect_result_async": "test_a_result_of_another_task_is_a_mismatch",
    "invalid_function": "test_a_task_that_is_not_a_module_function_is_refused",
    "takes_context_without_taking_context": "test_a_task_that_takes_a_context_has_an_argument_for_it",
    "catches_exception": "test_a_task_that_raises_has_failed test_whatever_a_task_raises_ends_neither_worker_nor_queue",
    "throws_keyboard_interrupt": "- of a backend that runs a task where it is enqueued",
    "complex_exception": "test_an_exception_with_any_content_is_stored",
    "complex_return_value": "test_a_return_value_that_no_json_is_fails_the_task",
    "result": _SUCCEEDS,
    "result_async": "test_async_tasks_run_as_well",
    "cannot_get_result": "test_results_may_not_be_kept_at_all",
    "cannot_refresh_result": "test_results_may_not_be_kept_at_all",
    "enqueue_logs": "test_signals_of_a_task_that_succeeds",
    "failed_logs": "test_signals_of_a_failed_task_are_sent_while_its_exception_is_current",
    "successful_task_no_none_type_in_logs": "test_signals_of_a_task_that_succeeds",
    "takes_context": "test_a_task_receives_its_context",
    "context": "test_a_task_receives_its_context",
    "validate_on_enqueue": "test_a_task_is_validated_again_when_it_is_enqueued",
    "validate_on_aenqueue": "test_a_task_is_validated_again_when_it_is_enqueued",
    "doesnt_wait_until_transaction_commit_by_default": "test_a_task_is_enqueued_with_the_callers_transaction_or_not_at_all",  # noqa: E501
    "wait_until_transaction_commit": "test_a_task_may_be_enqueued_after_the_commit",
    "options": "test_attempts_of_the_backend_are_those_of_tasks_that_set_nothing",
}


@pytest.fixture(scope="module")
def there() -> set[str]:
    """The names of all tests."""
    files = (CHECKOUT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("suite", [*OF_DJANGO_TASKS_DB.values(), OF_DJANGO], ids=[*OF_DJANGO_TASKS_DB, "django"])
def test_each_has_its_tests_here_or_a_reason(suite: dict[str, str], there: set[str]) -> None:
    named = {name: re.findall(r"\btest_\w+", said) for name, said in suite.items()}

    assert [test for tests in named.values() for test in tests if test not in there] == []
    assert [name for name, said in suite.items() if not named[name] and not said.startswith("- ")] == []


def test_they_are_as_many_as_theirs() -> None:
    assert sum(map(len, OF_DJANGO_TASKS_DB.values())) == 95
