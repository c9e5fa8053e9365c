"""Handles messages by means of the project's own `workers`, in a worker process of queueapp."""

import __main__
import queueapp
from queueapp import consumer
from workers import wage

from .models import Payment, Timesheets


@consumer(Timesheets)
def pay(message, context):
    spec = __main__.__spec__
    Payment.objects.create(
        amount=wage(message["hours"]), paid_by=spec.name if spec else "", queueapp_file=queueapp.__file__
    )
