"""The speed of the queues against raw SQL, measured: ``make bench``, or ``python -m tests.benchmarks --help``.

A *measurement* is a generator that yields one sample per run for each of its *figures*; ``figures`` knows them all,
``report`` prints them. ``soak`` runs for long and looks for growth. The queues and their consumers are an app, this
one.
"""
