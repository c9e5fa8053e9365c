"""Registers the pages on Django's default admin site."""

from __future__ import annotations

from django.contrib import admin

from .. import registry
from ..models import (
    Alert,
    BulkOperation,
    DelayedMessage,
    JournalEntry,
    MessageGroup,
    MessageResult,
    PoisonMessage,
    QueueControl,
    Schedule,
    SubjectKey,
    Subscriber,
    Subscription,
)
from .alerts import AlertAdmin
from .bulk_operations import BulkOperationAdmin
from .delayed import DelayedAdmin
from .groups import GroupAdmin
from .journal import JournalAdmin
from .message_results import MessageResultAdmin
from .overview import OverviewAdmin
from .poison import PoisonAdmin
from .queues import QueueAdmin
from .schedules import ScheduleAdmin
from .subject_keys import SubjectKeyAdmin
from .subscribers import SubscriberAdmin
from .subscriptions import SubscriptionAdmin


def register() -> None:
    """Register the models that are not registered yet; a project's own ModelAdmin takes precedence."""
    pages = {
        QueueControl: OverviewAdmin,
        Alert: AlertAdmin,
        BulkOperation: BulkOperationAdmin,
        DelayedMessage: DelayedAdmin,
        JournalEntry: JournalAdmin,
        MessageGroup: GroupAdmin,
        MessageResult: MessageResultAdmin,
        PoisonMessage: PoisonAdmin,
        Schedule: ScheduleAdmin,
        SubjectKey: SubjectKeyAdmin,
        Subscriber: SubscriberAdmin,
        Subscription: SubscriptionAdmin,
        **dict.fromkeys(registry.queues, QueueAdmin),
    }
    for model, page in pages.items():
        if not model._meta.abstract and not admin.site.is_registered(model):
            admin.site.register(model, page)
