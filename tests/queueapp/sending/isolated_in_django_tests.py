"""Run by Django's own test runner, in a child process of ``test_connections``: tests that send isolated."""

from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from tests.testapp.models import Leased


class Alone(TestCase):
    def test_an_isolated_send_in_the_transaction_of_a_test(self) -> None:
        Leased.send({"of": "a transaction that is rolled back"})
        Leased.send({"of": "TestCase"}, isolated=True)
        self.addClassCleanup(Leased.objects.all().delete)


class Committing(TransactionTestCase):
    available_apps = ["queueapp", "tests.testapp"]

    def test_an_isolated_send_is_there_whatever_becomes_of_the_transaction(self) -> None:
        with transaction.atomic():
            Leased.send({"of": "TransactionTestCase"}, isolated=True)
            transaction.set_rollback(True)
        assert Leased.objects.count() == 1

    def test_the_tables_were_emptied_in_between(self) -> None:
        assert Leased.objects.count() == 0
        Leased.send({}, isolated=True)
        assert connection.is_usable()
