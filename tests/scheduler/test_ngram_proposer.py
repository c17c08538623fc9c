"""The n-gram proposer: the latest of the longest matches, and its acceptance."""

from array import array

import hypothesis.strategies as st
from hypothesis import given, settings

from tgi.microkernel.messages.codec import INT32
from tgi.scheduler.speculation import MAX_CANDIDATES, MAX_MATCH, NgramProposer


def proposer_of(prompt: list[int], *generated: int) -> NgramProposer:
    """A proposer that has indexed the prompt and been updated with the generated ids."""
    ids = array(INT32, prompt)
    proposer = NgramProposer(ids, 1000)
    proposer.index(1000)
    for token in generated:
        ids.append(token)
        proposer.update()
    return proposer


def test_what_followed_the_same_ids_is_proposed() -> None:
    proposer = proposer_of([1, 2, 3, 4, 5, 6], 9, 2, 3)
    assert proposer.propose(3).tolist() == [4, 5, 6]
    assert proposer.propose(7).tolist() == [4, 5, 6, 9, 2, 3, 4]  # the sequence since the match is repeated


def test_the_longest_match_is_used_and_the_latest_of_equal_length() -> None:
    assert proposer_of([5, 2, 3, 10, 2, 3, 11, 7, 2, 3, 12], 5, 2, 3).propose(1).tolist() == [10]
    assert proposer_of([2, 3, 10, 2, 3, 11, 2, 3, 12], 6, 2, 3).propose(1).tolist() == [12]


def test_a_match_has_at_least_two_ids() -> None:
    proposer = proposer_of([1, 2, 3, 4], 9, 3)
    assert proposer.acceptance == 0
    assert proposer_of([1], 1).acceptance == 0
    assert proposer_of([1, 1], 1).acceptance > 0


def test_acceptance_rises_with_accepted_proposals() -> None:
    proposer = proposer_of(list(range(50)), 10, 11)
    first = proposer.acceptance
    for token in range(12, 40):
        proposer._ids.append(token)
        proposer.update()
        assert proposer.propose(1).tolist() == [token + 1]
    assert proposer.acceptance > 0.9 > first


def test_acceptance_falls_with_rejected_proposals() -> None:
    proposer = proposer_of([1, 2, 3])
    acceptances = []
    for n in range(30):
        for token in (100 + n, 1, 2):
            proposer._ids.append(token)
            proposer.update()
        acceptances.append(proposer.acceptance)
    assert acceptances == sorted(acceptances, reverse=True)
    assert acceptances[-1] < 0.05


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    proposer = NgramProposer(array(INT32, range(100)), 200)
    assert [proposer.index(40) for _ in range(4)] == [40, 40, 19, 0]
    assert proposer.unindexed == 0


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), max_size=60), st.data())
def test_it_agrees_with_an_exhaustive_search(prompt: list[int], rest: list[int], data: st.DataObject) -> None:
    ids = array(INT32, prompt)
    proposer = NgramProposer(ids, len(prompt) + len(rest))
    while proposer.unindexed:
        proposer.index(data.draw(st.integers(1, 20)))
    match, source = 0, 0
    for token in rest:
        accepted = bool(source) and ids[source] == token
        ids.append(token)
        proposer.update()
        match, source = (match + 1, source + 1) if accepted else _search(ids.tolist())
        assert (proposer.acceptance > 0) == bool(source)
        if source:
            assert proposer.propose(1)[0] == ids[source]


def _search(ids: list[int]) -> tuple[int, int]:
    """The length of the longest match among the latest candidates, and the position after it."""
    positions = [at for at in range(len(ids) - 2, 0, -1) if ids[at - 1 : at + 1] == ids[-2:]][:MAX_CANDIDATES]
    matches = [
        max(n for n in range(2, min(MAX_MATCH, at + 1) + 1) if ids[at + 1 - n : at + 1] == ids[-n:]) for at in positions
    ]
    if not matches:
        return 0, 0
    return max(matches), positions[matches.index(max(matches))] + 1
