"""Guesses by looking up: the latest of the longest runs, and how far they are trusted."""

from array import array

import hypothesis.strategies as st
from hypothesis import given, settings

from tgi.kernel.pack import INT32
from tgi.scheduler.lookup import LONGEST, PLACES, Lookup


def reader(prompt: list[int], *generated: int) -> Lookup:
    """A lookup that has read the prompt and caught up with the rest."""
    ids = array(INT32, prompt)
    lookup = Lookup(ids, 1000)
    lookup.read(1000)
    for token in generated:
        ids.append(token)
        lookup.catch_up()
    return lookup


def test_what_followed_the_same_ids_is_guessed() -> None:
    lookup = reader([1, 2, 3, 4, 5, 6], 9, 2, 3)
    assert lookup.guess(3).tolist() == [4, 5, 6]
    assert lookup.guess(7).tolist() == [4, 5, 6, 9, 2, 3, 4]  # as if all since then came again


def test_the_longest_run_is_taken_and_the_latest_of_those() -> None:
    assert reader([5, 2, 3, 10, 2, 3, 11, 7, 2, 3, 12], 5, 2, 3).guess(1).tolist() == [10]
    assert reader([2, 3, 10, 2, 3, 11, 2, 3, 12], 6, 2, 3).guess(1).tolist() == [12]


def test_one_equal_id_is_not_enough() -> None:
    lookup = reader([1, 2, 3, 4], 9, 3)
    assert lookup.chance == 0
    assert reader([1], 1).chance == 0
    assert reader([1, 1], 1).chance > 0


def test_a_right_guess_is_followed_and_trusted_more() -> None:
    lookup = reader(list(range(50)), 10, 11)
    first = lookup.chance
    for token in range(12, 40):
        lookup._ids.append(token)
        lookup.catch_up()
        assert lookup.guess(1).tolist() == [token + 1]
    assert lookup.chance > 0.9 > first


def test_a_request_whose_guesses_are_wrong_is_trusted_less_and_less() -> None:
    lookup = reader([1, 2, 3])
    chances = []
    for n in range(30):
        for token in (100 + n, 1, 2):
            lookup._ids.append(token)
            lookup.catch_up()
        chances.append(lookup.chance)
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.05


def test_a_long_prompt_is_read_in_pieces() -> None:
    lookup = Lookup(array(INT32, range(100)), 200)
    assert [lookup.read(40) for _ in range(4)] == [40, 40, 19, 0]
    assert lookup.unread == 0


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), max_size=60), st.data())
def test_it_agrees_with_a_search_through_everything(prompt: list[int], rest: list[int], data: st.DataObject) -> None:
    ids = array(INT32, prompt)
    lookup = Lookup(ids, len(prompt) + len(rest))
    while lookup.unread:
        lookup.read(data.draw(st.integers(1, 20)))
    run, source = 0, 0
    for token in rest:
        right = bool(source) and ids[source] == token
        ids.append(token)
        lookup.catch_up()
        run, source = (run + 1, source + 1) if right else _search(ids.tolist())
        assert (lookup.chance > 0) == bool(source)
        if source:
            assert lookup.guess(1)[0] == ids[source]


def _search(ids: list[int]) -> tuple[int, int]:
    """The longest run that ends before the last id as the ids do, among the latest pairs; and what follows it."""
    places = [at for at in range(len(ids) - 2, 0, -1) if ids[at - 1 : at + 1] == ids[-2:]][:PLACES]
    runs = [max(n for n in range(2, min(LONGEST, at + 1) + 1) if ids[at + 1 - n : at + 1] == ids[-n:]) for at in places]
    if not runs:
        return 0, 0
    return max(runs), places[runs.index(max(runs))] + 1
