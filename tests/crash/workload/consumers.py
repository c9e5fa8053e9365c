"""The handlers of the crash suite: they do what the message says, and leave an effect under its key. Those of rude
messages leave other things behind as well (``rudeness``).

`CRASH_ATTEMPTS` is how often each is tried (3); with `CRASH_VERSION` 2 there is a consumer more.

Each start of a handler is noted before anything else (``starts``): that survives the death of the process, the rollback
of the transaction and the loss of the database.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import time

import psutil
from django.db import connections, transaction

from queueapp import Context, consumer, registry
from queueapp.failures.recoverability import Failure, Verdict, default_policy
from tests.testapp.models import AtMostOnce, Leased, Transactional

from . import ledger, starts
from .messages import Act, HastyRude, Rude, Unheard
from .rudeness import ELSEWHERE, HASTE, RUDENESSES, Asked


class Failed(Exception):
    """What a handler raises on request."""


def act(message: Act, context: Context) -> None:
    """Misbehave as the message says, then leave the effect."""
    label, attempt = context.queue._meta.label, context.attempt
    starts.note(message.key, label, attempt)
    if message.die and attempt <= message.deaths:
        time.sleep(message.die_after_ms / 1000)
        _die(message)
    if message.sleep_ms:
        time.sleep(message.sleep_ms / 1000)
    if message.query_ms:
        ledger.sleep(context.alias, message.query_ms / 1000)
    if message.elsewhere:
        with connections[ELSEWHERE].cursor() as cursor:
            cursor.execute("SELECT 1")
    for name in message.lock:
        with connections[context.alias].cursor() as cursor:
            cursor.execute("UPDATE accounts SET amount = amount + 1 WHERE name = %s", [name])
        time.sleep(0.02)
    if attempt <= message.fail:
        raise Failed(f"attempt {attempt} of {message.key}")
    ledger.effect(context.alias, message.key, label, attempt)
    if message.send_key:
        with transaction.atomic(using=context.alias):
            if ledger.sent(context.alias, message.send_key, message.send_to, "chained"):
                registry.queues.find(message.send_to).send(Act(message.send_key))
    if message.linger_ms:
        time.sleep(message.linger_ms / 1000)


def misbehave(message: Rude, context: Context) -> None:
    """Be rude as the message says, and leave the effect before or after it."""
    label, attempt = context.queue._meta.label, context.attempt
    starts.note(message.key, label, attempt)
    RUDENESSES[message.rude].act(lambda: ledger.effect(context.alias, message.key, label, attempt), context)


def misbehave_in_haste(message: HastyRude, context: Context) -> None:
    """The same within a time limit."""
    misbehave(message, context)


def decide(failure: Failure) -> Verdict:
    """The policy of rude messages: some of them say what it answers."""
    return failure.exception.answer() if isinstance(failure.exception, Asked) else default_policy(failure)


def _die(message: Act) -> None:
    how = message.die
    if how == "exit":
        os._exit(3)
    if how == "SIGSEGV":
        faulthandler.disable()  # neither the trace nor the core of a crash on purpose is useful
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    if how == "tree":
        for process in _others_of_the_tree():
            starts.note(ledger.VICTIM, message.key, 0, process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        how = "SIGKILL"
    os.kill(os.getpid(), signal.Signals[how])


def _others_of_the_tree() -> list[psutil.Process]:
    """The supervisor and its other children. None, where it is dead already: the parent is the process that adopts
    orphans then, and its children are everybody's (seen: a run of faults that killed the shell it was started from)."""
    supervisor = psutil.Process(os.getppid())
    try:
        if supervisor.environ().get("CRASH_NAME") != os.environ["CRASH_NAME"]:
            return []
        return [supervisor, *(child for child in supervisor.children() if child.pid != os.getpid())]
    except psutil.Error:
        return []


_ATTEMPTS = int(os.environ.get("CRASH_ATTEMPTS", "3"))

for _queue in (Leased, Transactional, AtMostOnce):
    _name = _queue.__name__.lower()
    _options = {"attempts": _ATTEMPTS, "immediate_retries": 1, "retry_delay": 0.3}
    consumer(_queue, name=f"crash.{_name}", **_options)(act)
    consumer(_queue, name=f"crash.{_name}.rude", policy=decide, **_options)(misbehave)
    consumer(_queue, name=f"crash.{_name}.hasty", policy=decide, timeout=HASTE, **_options)(misbehave_in_haste)
    if os.environ.get("CRASH_VERSION") == "2":

        @consumer(_queue, name=f"crash.{_name}.unheard")
        def unheard(message: Unheard, context: Context) -> None:
            """Only the newer version knows this type."""
            ledger.effect(context.alias, message.key, context.queue._meta.label, context.attempt)
