"""What runs on the rig, as an app that is installed in worker processes only.

messages, consumers   what is sent, and the handlers that do what it says
rudeness              what handlers leave behind that no handler should
producers             programs that send until a stop request
ledger                what was sent and what it did, in tables of its own, and the oracle that compares them
settings              of all these processes
"""
