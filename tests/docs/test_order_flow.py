"""The example app of the documentation: its own tests are run, and then the same flow by real workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.apps import apps
from django.db import connection

from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.testing import Kit
from tests.in_process_worker import Worker, eventually

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "howto" / "order-flow.md"
TESTS = 9


@pytest.fixture
def shop() -> Iterator[ModuleType]:
    """The app of the page, with its tables."""
    with run_blocks(PAGE) as module:
        models = [module.Order, module.Parcel, module.Invoice, module.Article, module.Report]
        with connection.schema_editor() as editor:
            for model in models:
                editor.create_model(model)
        try:
            yield module
        finally:
            with connection.schema_editor() as editor:
                for model in reversed(models):
                    editor.delete_model(model)
            for model in models:
                apps.all_models["shop"].pop(model._meta.model_name, None)
            apps.clear_cache()


@pytest.mark.django_db(transaction=True)
def test_the_tests_of_the_page_pass(shop: ModuleType) -> None:
    names = [name for name in vars(shop) if name.startswith("test_")]
    assert len(names) == TESTS
    for name in names:
        kit, test = Kit(), getattr(shop, name)
        test(*([kit] if inspect.signature(test).parameters else []))
        kit.close()
        for model in (
            shop.Parcel,
            shop.Invoice,
            shop.Order,
            shop.Article,
            shop.Report,
            shop.OrderEvents,
            shop.Deadlines,
            shop.Stock,
            shop.Days,
            shop.Mails,
            PoisonMessage,
            DelayedMessage,
        ):
            model.objects.all().delete()


@pytest.mark.django_db(transaction=True)
def test_the_flow_runs_with_real_workers(shop: ModuleType, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.1}
    workers = [Worker(queue).start() for queue in (shop.OrderEvents, shop.Stock)]
    workers.append(Worker(shop.Deadlines, dispatcher=True).start())
    try:
        orders = [shop.place_order("pepper", 100 + number) for number in range(10)]
        eventually(lambda: shop.Parcel.objects.count() == shop.Invoice.objects.count() == 10)
        eventually(lambda: shop.Article.objects.filter(left=-10).exists())
        for order in orders[:5]:
            assert shop.pay(order.pk)
        assert DelayedMessage.objects.count() == 10

        DelayedMessage.objects.update(due=Now() - timedelta(seconds=1))

        eventually(lambda: shop.Order.objects.filter(status="cancelled").count() == 5)
        eventually(lambda: not shop.Deadlines.objects.exists() and not DelayedMessage.objects.exists())
        assert shop.Order.objects.filter(status="paid").count() == shop.Parcel.objects.count() == 5
        assert sorted(shop.Invoice.objects.values_list("cents", flat=True)) == list(range(100, 110))
    finally:
        for worker in workers:
            worker.stop()
