"""The messages of the crash suite: each says how its handler is to behave, then leaves an effect under its key."""

import msgspec


class Act(msgspec.Struct):
    """``key`` is the ledger's. The other fields make the handler misbehave, in this order."""

    key: str
    #: How the process dies: "exit", "SIGKILL", "SIGSEGV" (a real one), or "tree" for the supervisor and all of its
    #: children.
    die: str = ""
    #: It dies in so many attempts, and is a good message after that.
    deaths: int = 1_000_000
    #: It takes so long to die.
    die_after_ms: int = 0
    sleep_ms: int = 0
    #: Sleep in the database, so that the connection is busy.
    query_ms: int = 0
    #: Use the thread's session on the second alias too.
    elsewhere: bool = False
    #: Two accounts that the handler adds 1 to, in this order: "ab" and "ba" deadlock.
    lock: str = ""
    #: Raise in the first so many attempts.
    fail: int = 0
    #: Sleep after the effect, before the commit or the ack.
    linger_ms: int = 0
    #: Key of a message that the handler sends on, to the queue of this label.
    send_key: str = ""
    send_to: str = ""


class Rude(msgspec.Struct):
    """Its handler leaves behind what no handler should (``rudeness``): ``rude`` names it, and is what the ledger judges
    by."""

    key: str
    rude: str


class HastyRude(Rude):
    """The same, for a consumer with a short time limit."""


class Unheard(msgspec.Struct):
    """A type that only "version N+1" of the workers has a consumer for (``CRASH_VERSION`` 2)."""

    key: str
