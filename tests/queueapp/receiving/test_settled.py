"""What lies behind a floor and need not be walked over again: when that is so, and for how long it is believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import pytest

from queueapp.receiving import settled as module
from queueapp.receiving.low_water_marks import Floors
from queueapp.receiving.scan_window import FIRST_WINDOW, LOOKS_OF_A_CYCLE, WINDOW_TARGET
from queueapp.receiving.settled import ASK_EVERY, ASK_SELDOM, BRIEF, REST_OF_ASKING, REST_OF_SETTLED, Question, Settled
from queueapp.sql.claimed import MAX_SEQ, Claimed, Peek, Range

NOTHING = Peek(0, 0, 0)
FLOOR = 100_001
TRIP = 0.001


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def row(seq: int) -> Claimed:
    return (seq, b"", "", b"", 1, 0, None)


def floors_at(floor: int) -> Floors:
    """Whose walk has taken long once; the way to the server takes a millisecond."""
    floors = Floors()
    floors.passed([row(floor - 1)], floors.returns)
    floors.rescanned(TRIP)
    while not floors.rescanned(0.011):
        pass
    floors._walk.span = FIRST_WINDOW
    return floors


@pytest.fixture
def floors(clock: Clock) -> Floors:
    """100,000 were handled, and walking over them takes long."""
    return floors_at(FLOOR)


def tell(floors: Floors, writers: Set[str], floor: int) -> None:
    """These write, it was told at once, while the floor was there."""
    floors.settled.told(Question(floor, floors.settled._mark, module.monotonic()), writers)


def asks(floors: Floors) -> bool:
    """Whether somebody is to ask now, who does not."""
    before = floors.settled._ask_at
    question = floors.question()
    floors.settled._ask_at = before
    return question is not None


def close(floors: Floors, clock: Clock) -> None:
    """All transactions are over that wrote when the floor got where it is."""
    for _ in range(2):
        clock.now += ASK_EVERY
        question = floors.question()
        assert question is not None
        floors.settled.told(question, set())


def look(floors: Floors, seen: Peek = NOTHING, seconds: float = 0.008) -> Range:
    """One look behind the floor, and the next one is elsewhere; as ``Claiming`` does it."""
    before = floors.before
    (window,) = floors.behind()
    if not seen.behind:
        floors.rescanned(seconds, seen.reached)
    floors.settled.seen(window, seen, before)
    return window


def cycle(floors: Floors, seconds: float = 0.008) -> list[Range]:
    """A cycle of looks that see nothing."""
    windows = [look(floors, seconds=seconds)]
    while floors.rescanning:
        windows.append(look(floors, seconds=seconds))
    return windows


# -- when it is so ------------------------------------------------------------------------------------------------


def test_where_no_message_is_and_none_can_come_the_next_cycle_begins_above(floors: Floors, clock: Clock) -> None:
    close(floors, clock)

    windows = [look(floors), look(floors), look(floors)]

    assert [one.low for one in windows] == [0, FIRST_WINDOW, 2 * FIRST_WINDOW]
    assert windows[-1].high == FLOOR - 1
    assert floors.settled.to == FLOOR
    floors.passed([row(FLOOR + 5)], floors.returns)
    look(floors)  # of what is settled, which is due
    assert floors.behind() == [Range(FLOOR, FLOOR + 5)]


def test_it_is_known_once_those_have_ended_that_wrote_then(floors: Floors, clock: Clock) -> None:
    settled = floors.settled
    tell(floors, {"3/1", "4/1"}, FLOOR)
    assert settled.over == 0
    tell(floors, {"4/1", "5/1"}, FLOOR)
    assert settled.over == 0, "one of them is open"
    tell(floors, {"3/2", "5/1"}, FLOOR)
    assert settled.over == FLOOR


def test_the_next_ones_are_those_that_write_when_that_is_known(floors: Floors, clock: Clock) -> None:
    settled = floors.settled
    tell(floors, {"3/1"}, FLOOR)
    tell(floors, {"3/1", "4/1"}, FLOOR + 50)
    tell(floors, {"4/1"}, FLOOR + 99)
    assert settled.over == FLOOR
    tell(floors, {"4/1"}, FLOOR + 200)
    assert settled.over == FLOOR, "it wrote when the floor was there"
    tell(floors, set(), FLOOR + 300)
    assert settled.over == FLOOR + 99


def test_a_mark_is_of_its_own_floor(floors: Floors, clock: Clock) -> None:
    tell(floors, set(), FLOOR)
    floors.lower(7, told=False)
    tell(floors, set(), 7)
    assert floors.settled.over == FLOOR


def test_what_was_over_stays_so_when_the_floor_comes_down(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.lower(7, told=False)
    clock.now += ASK_EVERY
    tell(floors, set(), floors.lowest)
    clock.now += ASK_EVERY
    tell(floors, set(), floors.lowest)
    assert floors.settled.over == FLOOR


def test_a_look_that_began_before_that_settles_nothing(floors: Floors, clock: Clock) -> None:
    before = floors.before
    close(floors, clock)

    floors.settled.seen(Range(0, 99), NOTHING, before)

    assert floors.settled.to == 0


def test_what_follows_a_floor_of_then_is_not_settled(floors: Floors, clock: Clock) -> None:
    tell(floors, set(), FLOOR)
    floors.passed([row(FLOOR + 999)], floors.returns)
    tell(floors, set(), floors.lowest)

    floors.settled.seen(Range(0, FLOOR + 999), NOTHING, floors.before)

    assert floors.settled.to == FLOOR


@pytest.mark.parametrize(
    ("seen", "to"),
    [
        (Peek(0, 0, 0, present=7), 7),
        (Peek(0, 0, 0, present=0), 0),
        (Peek(0, 1, 7, present=5), 5),
        (Peek(0, 0, 0, reached=40, present=30), 30),
        (Peek(0, 0, 0, reached=40), 41),
        (Peek(0, 0, 0), FIRST_WINDOW),
    ],
    ids=[
        "a message",
        "the very first",
        "a free one above it",
        "before the end of the look",
        "the end",
        "of the window",
    ],
)
def test_it_ends_at_the_first_message_or_where_the_look_ended(
    floors: Floors, clock: Clock, seen: Peek, to: int
) -> None:
    close(floors, clock)

    look(floors, seen)

    assert floors.settled.to == to


def test_a_look_that_leaves_a_gap_settles_nothing(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    settled = floors.settled

    settled.seen(Range(1, 999), NOTHING, floors.before)
    assert settled.to == 0

    settled.seen(Range(0, 4), NOTHING, floors.before)
    settled.seen(Range(6, 999), NOTHING, floors.before)
    assert settled.to == 5
    settled.seen(Range(5, 999), NOTHING, floors.before)
    settled.seen(Range(0, 9), NOTHING, floors.before)
    assert settled.to == 1000


def test_a_look_that_ended_above_its_first_range_settles_no_more_than_that(floors: Floors, clock: Clock) -> None:
    """What a handler has in hand is left out, so a look may have several."""
    close(floors, clock)
    floors.settled.seen(Range(0, 4), Peek(0, 0, 0, reached=40), floors.before)
    assert floors.settled.to == 5


def test_what_came_back_meanwhile_is_a_gap(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.settled.seen(Range(0, 59), NOTHING, floors.before)
    before = floors.before
    floors.settled.lower(30)
    floors.settled.seen(Range(50, 99), NOTHING, before)
    assert floors.settled.to == 30


def test_after_a_reconnect_it_is_settled_as_before(floors: Floors, clock: Clock) -> None:
    floors.connected_anew()
    floors.settled.walked(1.0)
    close(floors, clock)
    floors.settled.seen(Range(0, 99), NOTHING, floors.before)
    assert floors.settled.to == 100


def test_what_was_settled_stays_so_after_a_look_that_knew_less(floors: Floors, clock: Clock) -> None:
    early = floors.before
    close(floors, clock)
    floors.settled.seen(Range(0, 99), NOTHING, floors.before)
    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, early)
    assert floors.settled.to == 100


def test_what_came_back_is_not_settled(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, floors.before)

    floors.lower(70)

    assert floors.settled.to == 70
    assert floors.settled.over == FLOOR
    floors.lower(MAX_SEQ)
    assert floors.settled.to == 70


def test_what_came_back_is_looked_for_from_there_on(floors: Floors, clock: Clock) -> None:
    """A claim that had begun before that may have raised the floor above it again."""
    close(floors, clock)
    cycle(floors)
    floors.passed([row(FLOOR + 5)], floors.returns)
    assert floors.behind()[0].low == FLOOR
    began = floors.returns

    floors.lower(70, told=False)
    floors.passed([row(FLOOR + 6)], began)

    assert floors.behind()[0].low == 70


def test_it_goes_on_where_a_cycle_under_way_has_got_to(floors: Floors, clock: Clock) -> None:
    """What is settled of a window meanwhile is not passed over a second time."""
    close(floors, clock)

    assert look(floors) == Range(0, FIRST_WINDOW - 1)
    floors.settled.seen(Range(0, FIRST_WINDOW + 10), NOTHING, floors.before)

    assert floors.settled.to == FIRST_WINDOW + 11
    assert floors.behind()[0].low == FIRST_WINDOW


# -- whether it is asked for --------------------------------------------------------------------------------------


def test_where_a_walk_takes_no_time_nobody_is_asked(clock: Clock) -> None:
    floors = floors_at(FLOOR)
    assert asks(floors)
    while not floors.rescanned(TRIP + BRIEF):
        pass
    while not floors.rescanned(TRIP + BRIEF / 8):
        pass

    assert not asks(floors)


def test_it_is_what_all_windows_of_a_cycle_have_taken(clock: Clock) -> None:
    floors = Floors()
    floors.passed([row(10 * FIRST_WINDOW)], floors.returns)
    floors.rescanned(TRIP)
    while not floors.rescanned(TRIP + BRIEF / 2):
        pass

    assert asks(floors)


def test_it_is_asked_now_and_then(floors: Floors, clock: Clock) -> None:
    assert asks(floors)
    tell(floors, set(), FLOOR)
    assert not asks(floors)
    clock.now += ASK_EVERY
    assert asks(floors)


def test_where_the_answer_takes_long_it_is_asked_seldom(floors: Floors, clock: Clock) -> None:
    question = floors.question()
    assert question is not None
    clock.now += 0.5
    floors.settled.told(question, set())
    clock.now += REST_OF_ASKING * 0.5 - 0.1
    assert not asks(floors)
    clock.now += 0.1
    assert asks(floors)


def test_a_database_that_does_not_tell_is_not_asked_again(floors: Floors, clock: Clock) -> None:
    floors.settled.told(Question(FLOOR, floors.settled._mark, clock.now), None)
    clock.now += 1e9
    assert not asks(floors)

    floors.connected_anew()
    while not floors.rescanned(0.011):
        pass
    floors.rescanned(TRIP)
    while not floors.rescanned(0.011):
        pass
    assert asks(floors), "it may be another one"


def test_of_levels_nothing_is_asked(clock: Clock) -> None:
    floors = Floors([("", 1), ("", 0)], leveled=True)
    floors.passed([(FLOOR, b"", "", b"", 1, 0, None, "", 0)], floors.returns)
    floors.settled.walked(1.0)
    assert floors.settled.question(FLOOR) is not None
    floors.settled._ask_at = 0.0
    assert not asks(floors)


def test_behind_a_message_that_is_there_nothing_is_asked(floors: Floors, clock: Clock) -> None:
    """A million that are leased, and none of those above the first can be settled."""
    close(floors, clock)
    clock.now += ASK_EVERY
    floors.passed([row(FLOOR + 9)], floors.returns)
    look(floors, Peek(0, 0, 0, present=7))
    assert not asks(floors)

    while floors.rescanning:
        look(floors)
    assert not asks(floors)
    floors.settled.seen(Range(7, 99), NOTHING, floors.before)

    assert asks(floors), "it is gone"


def test_a_message_beyond_the_look_is_not_in_the_way(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.passed([row(FLOOR + 9)], floors.returns)
    clock.now += ASK_EVERY
    floors.settled.seen(Range(0, 4), Peek(0, 0, 0, present=8), floors.before)
    assert asks(floors)
    floors.settled.seen(Range(0, FLOOR), Peek(0, 0, 0, present=FLOOR), floors.before)
    assert not asks(floors), "the first that could not be settled"


def test_a_look_at_what_is_settled_does_not_say_that_it_is_gone(far: Floors, clock: Clock) -> None:
    clock.now += ASK_EVERY
    far.settled.over = 10_000_005
    look(far, Peek(0, 0, 0, present=10_000_001))
    assert not asks(far)
    look(far)
    assert not asks(far)


def test_above_what_is_over_it_is_asked_whatever_is_there(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, floors.before)
    clock.now += ASK_EVERY
    floors.passed([row(FLOOR + 10)], floors.returns)

    floors.settled.seen(Range(FLOOR, FLOOR + 10), Peek(0, 0, 0, present=FLOOR + 3), floors.before)

    assert asks(floors)


def test_a_new_one_asks_nothing() -> None:
    settled = Settled()
    assert settled.question(FLOOR) is None
    assert not settled.is_due
    assert settled.to == settled.over == 0


# -- what is walked over all the same -----------------------------------------------------------------------------


@pytest.fixture
def far(clock: Clock) -> Floors:
    """Settled up to ten million, of which walking over takes long."""
    floors = floors_at(10_000_001)
    close(floors, clock)
    floors.settled.seen(Range(0, 10_000_000), NOTHING, floors.before)
    floors.passed([row(10_000_010)], floors.returns)
    return floors


def test_after_a_cycle_a_window_of_it_is_looked_at(far: Floors, clock: Clock) -> None:
    assert look(far) == Range(10_000_001, 10_000_010)
    assert far.rescanning

    assert look(far, seconds=TRIP + 0.01) == Range(0, FIRST_WINDOW - 1)
    assert not far.rescanning
    assert look(far) == Range(10_000_001, 10_000_010)
    assert not far.rescanning, "no other for so long"
    clock.now += REST_OF_SETTLED * 0.01 - 0.1
    look(far)
    assert not far.rescanning
    clock.now += 0.1
    look(far)
    assert far.rescanning
    assert look(far, seconds=TRIP) == Range(FIRST_WINDOW, 2 * FIRST_WINDOW - 1)
    look(far)
    assert look(far) == Range(2 * FIRST_WINDOW, 4 * FIRST_WINDOW - 1), "that took no time"


def test_after_a_window_of_it_the_walk_is_where_it_was(far: Floors, clock: Clock) -> None:
    far.passed([row(10_500_000)], far.returns)
    far._walk.span = FIRST_WINDOW
    while not far._auditing:
        look(far, seconds=TRIP + 0.01)
    look(far, seconds=TRIP + 0.01)
    assert look(far).low == 10_000_001


def test_between_two_windows_of_it_the_rescan_goes_on_once_the_next_is_due(far: Floors, clock: Clock) -> None:
    assert not far.rescanning
    look(far)
    look(far, seconds=TRIP + 0.01)
    look(far)
    assert not far.rescanning
    clock.now += REST_OF_SETTLED * 0.01
    assert far.rescanning


def test_above_what_came_down_there_is_none(far: Floors) -> None:
    look(far)
    far._audit.position = 5_000_000
    far.settled.lower(4_000_000)
    assert far.behind() == []


def test_what_came_back_during_it_is_looked_for_up_to_the_floor(far: Floors) -> None:
    look(far)
    assert far._auditing
    far.lower(10_000_005)
    far.passed([row(10_000_020)], far.returns)

    assert far.behind() == [Range(10_000_021 - FIRST_WINDOW, 10_000_020)]


@pytest.mark.parametrize(("seconds", "rest"), [(0.02, 1.98), (0.3, 10.0), (3.0, 27.0)])
def test_after_a_slow_look_there_is_an_end_to_its_rest(
    floors: Floors, clock: Clock, seconds: float, rest: float
) -> None:
    """One that met a checkpoint for three seconds was the last one for five minutes."""
    floors.settled.to = 1
    floors.settled.walked_over_settled(seconds)
    clock.now += rest - 0.01
    assert not floors.settled.is_due
    clock.now += 0.02
    assert floors.settled.is_due


def test_its_windows_end_where_it_ends(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.settled.seen(Range(0, 40), NOTHING, floors.before)
    floors._auditing = True

    assert floors.behind() == [Range(0, 40)]


def test_all_of_it_is_looked_at_in_time(far: Floors, clock: Clock) -> None:
    windows: list[Range] = []
    while not windows or far._audit.position is not None:
        clock.now += 100.0
        seen = look(far, seconds=TRIP + 0.01)
        if seen.low < 10_000_001:
            windows.append(seen)

    assert [one.low for one in windows[1:]] == [one.high + 1 for one in windows[:-1]]
    assert (windows[0].low, windows[-1].high) == (0, 10_000_000)


def test_where_all_of_it_takes_no_time_it_is_walked_over_with_all_else(far: Floors, clock: Clock) -> None:
    """A vacuum has come by."""
    for _ in range(100):
        clock.now += 100.0
        look(far, seconds=TRIP)
        if not far.settled.to:
            break

    far.passed([row(10_000_020)], far.returns)
    assert far.behind()[0].low == 0
    assert not asks(far)


def test_a_long_walk_over_it_settles_nothing_less(far: Floors, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 100.0
        look(far, seconds=TRIP + BRIEF)
    assert far.settled.to == 10_000_001


def test_after_its_last_window_it_begins_again(floors: Floors, clock: Clock) -> None:
    """Wherever the floor is."""
    close(floors, clock)
    floors.settled.seen(Range(0, 40), NOTHING, floors.before)
    floors.passed([row(10_000_000)], floors.returns)
    floors._auditing = True
    look(floors, seconds=TRIP + 0.01)
    assert floors._audit.position is None


def test_its_windows_are_no_larger_than_twice_what_there_was(floors: Floors, clock: Clock) -> None:
    """Over little they double each time; when much is settled at once, all of it is not to be one look."""
    close(floors, clock)
    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, floors.before)
    for _ in range(200):
        clock.now += 100.0
        floors.settled.walked(1.0)
        floors._auditing = True
        floors.rescanned(TRIP + 2 * BRIEF)
    assert floors.settled.to == FLOOR
    floors.passed([row(10_000_000)], floors.returns)
    close(floors, clock)
    floors.settled.seen(Range(FLOOR, 10_000_000), NOTHING, floors.before)

    floors._auditing = True
    windows = []
    while floors._auditing:
        (window,) = floors.behind()
        windows.append(window)
        floors.rescanned(TRIP + WINDOW_TARGET)

    assert windows[0].high < 2 * FLOOR


def test_on_a_slow_machine_it_is_no_more_looks_than_a_cycle(far: Floors, clock: Clock) -> None:
    looks = 0
    for _ in range(2):
        while True:
            far._auditing = True
            far.rescanned(1.0)
            looks += 1
            if far._audit.position is None:
                break
    assert looks <= 2 * LOOKS_OF_A_CYCLE + 10


def test_a_message_where_there_could_be_none_ends_it(far: Floors, clock: Clock) -> None:
    """Somebody has chosen its seq, or kept it: others may follow."""
    look(far)
    look(far, Peek(0, 1, 70, present=70))

    assert far.settled.to == far.settled.over == 0
    for _ in range(9):
        far.settled.walked(1.0)
        clock.now += 1_000.0
        assert not asks(far)
    far.settled.over = FLOOR
    far.settled.seen(Range(0, 99), NOTHING, far.before)
    assert far.settled.to == 0
    while far.rescanning:
        far.rescanned(0.0)
    assert far.behind()[0].low == 0


@pytest.mark.parametrize("seq", [0, 70, 10_000_000])
def test_a_taken_one_does_as_well(far: Floors, seq: int) -> None:
    look(far)
    look(far, Peek(0, 0, 0, present=seq))
    assert far.settled.to == 0
    assert not far.settled._believed


def test_one_where_there_was_little_does_as_well(far: Floors) -> None:
    before = far.before
    far.settled.all_was_walked_over(0.0)
    assert far.settled.to == 0
    far.settled.seen(Range(0, 99), Peek(0, 0, 0, present=70), before)
    assert not far.settled._believed


def test_one_just_above_does_not(far: Floors) -> None:
    look(far, Peek(0, 0, 0, present=10_000_001))
    assert far.settled.to == 10_000_001
    assert far.settled._believed


def test_a_look_that_began_before_it_was_settled_proves_nothing(floors: Floors, clock: Clock) -> None:
    """Its message has been handled since."""
    before = floors.before
    close(floors, clock)
    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, floors.before)

    floors.settled.seen(Range(0, FLOOR - 1), Peek(0, 0, 0, present=70), before)

    assert floors.settled.to == FLOOR


@pytest.mark.parametrize("forget", [Floors.connected_anew, Floors.reset])
def test_after_a_reconnect_or_a_reset_nothing_is_known(
    floors: Floors, clock: Clock, forget: Callable[[Floors], None]
) -> None:
    close(floors, clock)
    cycle(floors)
    assert floors.settled.to

    forget(floors)

    assert (floors.settled.to, floors.settled.over) == (0, 0)
    tell(floors, set(), FLOOR)
    assert floors.settled.over == 0, "who wrote before is another server's"
    assert not floors.settled.is_due
    assert not floors.rescanning
    floors.passed([row(FLOOR - 1)], floors.returns)
    assert floors.behind()[0].low == 0
    clock.now += ASK_EVERY
    assert not asks(floors), "nor how long a walk takes"


@pytest.mark.parametrize("forget", [Floors.connected_anew, Floors.reset])
def test_a_look_that_began_before_that_says_nothing(
    floors: Floors, clock: Clock, forget: Callable[[Floors], None]
) -> None:
    close(floors, clock)
    floors.settled.seen(Range(0, 99), NOTHING, floors.before)
    before = floors.before
    forget(floors)

    floors.settled.seen(Range(0, FLOOR - 1), NOTHING, before)
    assert floors.settled.to == 0

    floors.settled.seen(Range(0, FLOOR - 1), Peek(0, 0, 0, present=7), before)
    assert floors.settled._believed


@pytest.mark.parametrize("auditing", [False, True])
def test_a_reset_in_the_middle_of_a_cycle_begins_another(far: Floors, clock: Clock, auditing: bool) -> None:
    look(far)
    look(far, seconds=TRIP + 0.01)
    clock.now += 1_000.0
    far._auditing = auditing
    assert far.rescanning

    far.reset()

    assert not far.rescanning
    far.passed([row(10_000_020)], far.returns)
    assert far.behind()[0].low == 0


def test_what_is_settled_then_is_due_at_once(far: Floors, clock: Clock) -> None:
    look(far)
    look(far, seconds=TRIP + 0.3)
    assert not far.settled.is_due
    far.connected_anew()
    far.settled.over = far.settled.to = 5
    assert far.settled.is_due


def test_after_it_what_was_in_the_way_is_not_known(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    floors.passed([row(FLOOR)], floors.returns)
    look(floors, Peek(0, 0, 0, present=7))
    clock.now += 1.0
    assert not asks(floors)
    floors.connected_anew()
    floors.settled.walked(1.0)
    assert asks(floors)


def test_the_first_look_after_a_reconnect_says_nothing_of_the_way(floors: Floors, clock: Clock) -> None:
    floors.connected_anew()
    assert floors._trip == math.inf
    assert floors._alone(0.3) == 0.0
    floors.rescanned(TRIP)
    assert floors._alone(0.3) == pytest.approx(0.299)


# -- what an attack found -----------------------------------------------------------------------------------------


def test_an_answer_that_is_older_than_the_mark_says_nothing(floors: Floors, clock: Clock) -> None:
    """Two ask at once, and the one who was told first says so last: somebody has begun to write in between."""
    early = floors.question()
    assert early is not None
    clock.now += ASK_EVERY
    late = floors.question()
    assert late is not None
    floors.settled.told(late, {"28/2"})

    floors.settled.told(early, set())

    assert floors.settled.over == 0
    tell(floors, {"28/2"}, FLOOR)
    assert floors.settled.over == 0


def test_an_answer_of_before_a_reconnect_says_nothing(floors: Floors, clock: Clock) -> None:
    early = floors.question()
    assert early is not None
    floors.connected_anew()

    floors.settled.told(early, set())
    tell(floors, set(), FLOOR)

    assert floors.settled.over == 0


def test_two_do_not_ask_at_once(floors: Floors, clock: Clock) -> None:
    assert floors.question() is not None
    assert floors.question() is None


def test_what_was_prepared_before_the_server_began_anew_may_be_one_of_them(floors: Floors, clock: Clock) -> None:
    tell(floors, {"4/2"}, FLOOR)
    tell(floors, {"-1/404252"}, FLOOR)
    assert floors.settled.over == 0
    tell(floors, {"14/1"}, FLOOR)
    assert floors.settled.over == FLOOR


def test_where_all_is_over_nobody_is_asked(floors: Floors, clock: Clock) -> None:
    close(floors, clock)
    clock.now += 1_000.0
    assert not asks(floors)
    floors.passed([row(FLOOR)], floors.returns)
    assert asks(floors)


def test_beside_one_that_writes_for_long_it_is_asked_seldom(floors: Floors, clock: Clock) -> None:
    tell(floors, {"3/1"}, FLOOR)
    questions = 0
    for _ in range(1_000):
        clock.now += 0.1
        if (question := floors.question()) is not None:
            questions += 1
            floors.settled.told(question, {"3/1"})
    assert 100 / ASK_SELDOM <= questions <= 100 / ASK_SELDOM + 10

    tell(floors, set(), FLOOR)
    clock.now += ASK_EVERY
    floors.passed([row(FLOOR)], floors.returns)
    assert asks(floors), "as often as before"
    assert ASK_SELDOM <= 10


def test_the_wait_grows(floors: Floors, clock: Clock) -> None:
    tell(floors, {"3/1"}, FLOOR)
    tell(floors, {"3/1"}, FLOOR)
    clock.now += 2 * ASK_EVERY
    assert asks(floors)
    tell(floors, {"3/1"}, FLOOR)
    clock.now += 4 * ASK_EVERY
    assert floors.question() is not None
    clock.now += 2 * ASK_EVERY
    assert floors.question() is None, "nor while the answer is awaited"

    floors.connected_anew()
    floors.settled.walked(1.0)
    assert floors.question() is not None
    clock.now += ASK_EVERY
    assert floors.question() is not None


def test_an_answer_that_comes_too_late_asks_for_no_other(floors: Floors, clock: Clock) -> None:
    early = floors.question()
    assert early is not None
    tell(floors, {"3/1"}, FLOOR)
    floors.settled.told(early, set())
    assert not asks(floors)

    floors.connected_anew()
    floors.settled.told(early, None)
    floors.settled.walked(1.0)
    assert asks(floors), "nor does it keep the new server from being asked"


def test_windows_are_as_large_as_before_where_a_cycle_begins_no_lower(far: Floors) -> None:
    far._auditing = False
    for _ in range(3):
        far.rescanned(TRIP)
        far._auditing = False
        far.passed([row(far.lowest + 500_000)], far.returns)
    far.behind()
    assert far._walk.span > FIRST_WINDOW


def test_so_it_is_where_something_came_back_in_the_middle_of_a_cycle(far: Floors) -> None:
    far._walk.span = 1 << 40
    far._walk.window(10_000_001)
    far._walk.position = 10_000_005
    far.settled.lower(1)
    far.behind()
    far._walk.position = None
    (window,) = far.behind()
    assert window.high - window.low < FIRST_WINDOW


@pytest.mark.parametrize("forget", [Floors.connected_anew, Floors.reset, lambda floors: floors.lower(1, told=False)])
def test_what_is_to_be_walked_over_once_more_is_not_one_look(
    far: Floors, clock: Clock, forget: Callable[[Floors], None]
) -> None:
    """Over what little there was its window has doubled each time."""
    for _ in range(20):
        far._auditing = False
        far.rescanned(TRIP)
        far.passed([row(far.lowest + 5)], far.returns)
    assert far._walk.span > 10_000_000

    forget(far)
    far._auditing = False
    far.passed([row(10_000_020)], far.returns)

    (window,) = far.behind()
    assert window.high - window.low < FIRST_WINDOW


def test_a_look_above_what_is_settled_is_none_at_that(far: Floors, clock: Clock) -> None:
    """Of two that look at once the one was still at what is not."""
    (window,) = far.behind()
    look(far)
    far._audit.position = 9_990_000
    assert not far.is_present(window)
