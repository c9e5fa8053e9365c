"""How much of a queue is out at a time, who gets it, and what an operator has set in place of what is declared.

Workers and ``receive()`` claim through here on queues that have a limit or a fairness model, and on no others.
"""
