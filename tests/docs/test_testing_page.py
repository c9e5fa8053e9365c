"""The tests on the page about testing are run, by pytest's fixture and by Django's runner."""

from __future__ import annotations

import unittest

import pytest
from django.apps import apps
from django.db import connection

from queueapp.testing import Kit

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "howto" / "testing.md"
FUNCTIONS = ("test_a_paid_order_gets_a_letter_an_hour_later", "test_a_refused_card_is_tried_twice")
CASES = ("PaymentTests", "CheckoutTests")


@pytest.mark.django_db(transaction=True)
def test_the_tests_of_the_page_pass() -> None:
    with run_blocks(PAGE) as module:
        assert {name for name in vars(module) if name.startswith("test_")} == set(FUNCTIONS)
        with connection.schema_editor() as editor:
            editor.create_model(module.Order)
        try:
            for name in FUNCTIONS:
                kit = Kit()
                getattr(module, name)(kit)
                kit.close()
                module.Order.objects.all().delete()
                for queue in (module.Payments, module.Letters):
                    queue.objects.all().delete()
            for name in CASES:
                suite = unittest.defaultTestLoader.loadTestsFromTestCase(getattr(module, name))
                result = unittest.TestResult()
                suite.run(result)
                assert (result.errors, result.failures) == ([], [])
                assert result.testsRun
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(module.Order)
            apps.all_models["shop"].pop("order", None)
            apps.clear_cache()
