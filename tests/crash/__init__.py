"""The crash suite: real worker processes, a PostgreSQL of its own, a network that fails, and a ledger that judges.
What a server need not be stopped for runs on a SQL Server too (`rig/servers.py`).

rig/         what runs, and what happens to it: private server, proxy, process trees, faults and their schedule
workload/    what runs on it: messages, consumers and producers, and the ledger of what was sent and what it did
chaos        the seeded run: `python -m tests.crash.chaos --duration 1800 --seed 7`
"""
