"""Leases that expire while their holder is not dead, only unreachable: stopped, swapped out, cut off."""

from __future__ import annotations

import signal

from tests.testapp.models import Leased

from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import wait_until


@on_both
def test_the_late_ack_of_an_expired_lease_changes_nothing_and_is_logged(scene: Scene) -> None:
    sleeper = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
    scene.send(Leased, "contested", sleep_ms=1000)
    wait_until(lambda: scene.starts("contested"), "the first worker has it in flight")
    process = sleeper.worker()
    process.send_signal(signal.SIGSTOP)
    try:
        first_token = Leased.objects.get().lease_token
        # The second attempt takes longer than the first one's holder is away.
        scene.rewrite(Leased, b"1000", b"4000")
        second_workers = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
        wait_until(lambda: scene.starts("contested") == [1, 2], "the lease expired and another worker has it")
    finally:
        process.send_signal(signal.SIGCONT)

    wait_until(lambda: "1 of 1 leases were lost before the ack" in sleeper.log_text(), "the late ack is logged")
    message = Leased.objects.get()  # the late ack deleted nothing
    assert message.lease_token not in (None, first_token)

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.duplicates["at_least_once"] == 1  # the explained one
    assert "were lost" not in second_workers.log_text()
    assert (sleeper.stop(), second_workers.stop()) == (0, 0)


@on_both
def test_a_slow_handler_keeps_its_lease_beyond_the_lease_period(scene: Scene) -> None:
    for _ in range(2):
        scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance", dead_after=60)
    scene.send(Leased, "slow", sleep_ms=7000)  # the lease period is 5 s

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert scene.starts("slow") == [1]
