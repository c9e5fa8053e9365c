"""The people who work in the factory: nothing to do with the worker processes of queueapp."""


def wage(hours: int) -> int:
    """What so many hours are paid."""
    return 20 * hours
