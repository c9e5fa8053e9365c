"""The speed of the queues against raw SQL, measured: ``make bench``, or ``python -m tests.benchmarks --help``.

A *measurement* is a generator that yields one sample per run for each of its *figures*; ``figures`` knows them all,
``report`` prints them. The rest is what they share: a database of their own, real worker processes, raw SQL loops.
"""
