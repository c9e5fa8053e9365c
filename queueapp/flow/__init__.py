"""Flow control: how many messages of a queue are in flight, and which subscriber gets them.

Workers and ``receive()`` claim through this package on queues with a limit or a fairness model, and on no others.
"""
