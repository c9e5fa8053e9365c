"""Three kinds of messages: version 2 handles all of the first, the first eight of the second, none of the third."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from queueapp import consumer
from queueapp.models.delivery import Delivery
from queueapp.operations import requeue_after_deploy
from queueapp.services import maintenance
from tests.testapp.models import Effect, Transactional

from .kinds import BROKEN, HALF, HANDLED, MENDED

Transactional.delivery = Delivery(Transactional.delivery.given | {"requeue_after_deploy": 5}, "a test's ")
requeue_after_deploy.FIRST_LOOK = timedelta(milliseconds=100)
requeue_after_deploy.LONGEST_LOOK = timedelta(milliseconds=400)
requeue_after_deploy.DEPLOY_WAIT = timedelta(milliseconds=400)
maintenance.DEPLOY_INTERVAL = 0.5


class Mended(Exception):
    """What version 2 does not raise."""


class Half(Exception):
    """What version 2 raises for some messages."""


class Broken(Exception):
    """What both raise."""


RAISED: dict[str, type[Exception]] = {MENDED: Mended, HALF: Half, BROKEN: Broken}


@consumer(Transactional, name="deployed.act", attempts=3, retry_delay=0)
def act(message: dict[str, Any]) -> None:
    kind, number = message["kind"], message["number"]
    handles = kind == MENDED or (kind == HALF and number < HANDLED)
    if os.environ["QUEUEAPP_WORKER_VERSION"] == "1" or not handles:
        raise RAISED[kind](f"{kind} {number}")
    Effect.objects.create(name=f"{kind} {number}")
