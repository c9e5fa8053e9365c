"""A queue, and what its consumer writes."""

from django.db import models

from queueapp import Queue, Semantics


class Timesheets(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class Payment(models.Model):
    amount = models.IntegerField()
    #: The module that the process was started with, and where it has queueapp from.
    paid_by = models.CharField(max_length=200)
    queueapp_file = models.CharField(max_length=1000)
