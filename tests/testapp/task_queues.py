"""Queues of one's own for tasks, in the semantics that ``TaskQueue`` has not."""

from queueapp import Semantics
from queueapp.contrib.tasks.models import TaskQueueBase


class TransactionalTasks(TaskQueueBase):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class AtMostOnceTasks(TaskQueueBase):
    """Without recipients and levels: every worker takes the tasks of every queue name."""

    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        recipients = False
        priorities = 1
