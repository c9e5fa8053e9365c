"""As docs/guide.md says for a project whose own app has the label "workers"."""

from queueapp.workers.apps import WorkersConfig


class QueueWorkersConfig(WorkersConfig):
    label = "queue_workers"
