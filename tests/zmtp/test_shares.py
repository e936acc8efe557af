"""Places and bytes of a listener between keys: who pays, and that it is never somebody else."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.zmtp.shares import Budget, Places


class Weighed:
    """As much of a connection as a budget looks at."""

    def __init__(self, name, weight=0):
        self.name = name
        self.weight = weight

    def __repr__(self):
        return self.name


def budget(**changes):
    return Budget(**{"key_bytes": 100, "safe_bytes": 50, "total_bytes": 400} | changes)


def joined(kept, key, n=1):
    new = [Weighed(f"{key}{number}") for number in range(n)]
    for connection in new:
        kept.add(connection, key)
    return new


def weigh(kept, connection, weight, *, is_fresh=False):
    """It weighs so much from now on; who is to go for that."""
    more, connection.weight = weight - connection.weight, weight
    kept.weigh(connection, more, is_fresh=is_fresh)
    found = kept.beyond(connection)
    return found and found[0]


def test_a_key_pays_for_what_is_kept_for_it_with_its_own_heaviest_connection():
    kept = budget()
    (other,) = joined(kept, "other")
    mine = joined(kept, "mine", 10)
    assert weigh(kept, other, 99) is None
    assert [weigh(kept, one, 10 + (one is mine[3])) for one in mine[:9]] == [None] * 9
    assert weigh(kept, mine[9], 10) is mine[3]
    assert kept.beyond(mine[9])[1] == "101 bytes were kept for mine, 100 are for each"


def test_above_all_together_the_heaviest_key_pays_and_not_the_heaviest_connection():
    kept = budget(total_bytes=200)
    (other,) = joined(kept, "other")
    mine = joined(kept, "mine", 10)
    assert weigh(kept, other, 80) is None
    assert [weigh(kept, one, 9) for one in mine] == [None] * 10
    (third,) = joined(kept, "third")
    assert weigh(kept, third, 31) in mine


def test_many_keys_that_keep_a_little_each_end_nobody_who_is_quick():
    """Forty keys below a message each, for ever; one honest key sends the longest there is."""
    kept = budget()
    many = [joined(kept, f"key{number}")[0] for number in range(40)]
    ended = {weigh(kept, one, 10) for one in many}
    assert ended == {None}, "they are 400 together"
    (honest,) = joined(kept, "honest")
    for came in range(5, 50, 5):
        while (slow := weigh(kept, honest, came)) is not None:
            assert slow in many
            kept.remove(slow)
            slow.weight = 0
    assert weigh(kept, honest, 0) is None
    assert kept.weight <= 400


def test_who_goes_on_is_younger_than_who_does_not():
    kept = budget(key_bytes=400, safe_bytes=400)
    one, other, third = (joined(kept, name)[0] for name in ("one", "other", "third"))
    weigh(kept, one, 150)
    weigh(kept, other, 150)
    weigh(kept, one, 150, is_fresh=True)
    assert weigh(kept, third, 150) is other


def test_strangers_pay_among_themselves_from_the_first_byte_above():
    kept = budget(key_bytes=100, safe_bytes=0, total_bytes=100)
    light, heavy = joined(kept, "light", 3), joined(kept, "heavy", 3)
    for one in light:
        weigh(kept, one, 15)
    assert [weigh(kept, one, 17) for one in heavy] == [None] * 3
    assert weigh(kept, light[0], 20) in heavy, "51 of 101"


def test_what_is_over_or_counts_elsewhere_is_forgotten():
    kept, other = budget(), budget()
    mine = joined(kept, "mine", 3)
    for one in mine:
        weigh(kept, one, 20)
    assert kept.remove(mine[0])
    other.add(mine[0], "another key")
    assert not kept.remove(mine[0])
    assert (kept.weight, other.weight) == (40, 20)
    for one in mine:
        kept.remove(one)
    assert kept.weight == 0
    assert not kept._by_key
    assert not kept._since


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 60), st.booleans()), min_size=1, max_size=80
    )
)
def test_whoever_pays_the_bounds_hold_and_small_keys_pay_only_for_being_slow(steps):
    kept = budget(total_bytes=200)
    connections = [joined(kept, f"key{number % 4}")[0] for number in range(12)]
    key_of = {one: f"key{number % 4}" for number, one in enumerate(connections)}

    def of_key(key):
        return sum(one.weight for one in connections if key_of[one] == key and one in kept._kept_of)

    for number, weight, is_fresh in steps:
        connection = connections[number]
        if connection not in kept._kept_of:
            continue
        more, connection.weight = weight - connection.weight, weight
        kept.weigh(connection, more, is_fresh=is_fresh)
        while (found := kept.beyond(connection)) is not None:
            victim, _ = found
            paid = of_key(key_of[victim])
            assert paid == max(map(of_key, set(key_of.values()))) or paid <= 50
            kept.remove(victim)
            victim.weight = 0
        keys = set(key_of.values())
        assert kept.weight == sum(map(of_key, keys)) <= 200
        assert all(of_key(key) <= 100 for key in keys)


def test_the_key_with_most_connections_makes_place_with_the_one_that_was_silent_longest():
    places = Places()
    (lonely, *many) = [Weighed(str(number)) for number in range(6)]
    places.add(lonely, "lonely")
    for one in many:
        places.add(one, "many")
    places.spoke(many[0])
    gone = []
    while (least := places.least_missed()) is not None:
        places.remove(least)
        gone.append(least)
    assert gone == [*many[1:], lonely, many[0]]


def test_of_keys_with_as_many_the_longest_silence_makes_place():
    places = Places()
    connections = [Weighed(name) for name in "abc"]
    for one in connections:
        places.add(one, one.name)
    places.spoke(connections[0])
    assert places.least_missed() is connections[1]
    assert len(places) == 3
    assert not places.remove(Weighed("d"))
    places.spoke(Weighed("d"))
    assert list(itertools.islice((one in places for one in connections), 3)) == [True] * 3
