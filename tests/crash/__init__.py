"""The crash suite: real worker processes, a PostgreSQL of its own, a network that fails, and a ledger that judges.

server       a private PostgreSQL that may be stopped, killed and filled up without hurting anybody else
proxy        a TCP proxy that forwards, stalls, loses packets and cuts
processes    worker trees and producers as an init system would run them, and how to kill each part of them
messages, consumers, settings   what the workers of this suite handle
ledger       what was sent and what it did, in tables of its own, and the oracle that compares them
schedule, chaos   the seeded run: `python -m tests.crash.chaos --duration 1800 --seed 7`
"""
