from hypothesis import given
from hypothesis import strategies as st

from weight_sync.chain import missing_delta, shortest_chain


def test_the_fewest_bytes_win():
    sizes = {(1, 2): 10, (2, 3): 10, (1, 3): 15, (3, 4): 1}
    assert shortest_chain(sizes, 1, 4, max_deltas=8) == [(1, 3), (3, 4)]
    assert shortest_chain(sizes | {(1, 3): 25}, 1, 4, max_deltas=8) == [(1, 2), (2, 3), (3, 4)]
    assert shortest_chain(sizes | {(1, 4): 16}, 1, 4, max_deltas=1) == [(1, 4)]


def test_without_a_way_there_is_none():
    sizes = {(1, 2): 10, (2, 3): 10}
    assert shortest_chain(sizes, 1, 3, max_deltas=1) is None
    assert shortest_chain(sizes, 3, 1, max_deltas=9) is None
    assert shortest_chain(sizes, 1, 1, max_deltas=9) is None
    assert shortest_chain({}, 1, 2, max_deltas=9) is None


def test_what_to_make():
    def missing(sizes, held, have, want, max_deltas=4):
        return missing_delta(sizes, held, have, want, max_deltas=max_deltas)

    assert missing({}, [4, 5], 4, 5) == (4, 5)
    assert missing({}, [5], 4, 5) is None, "nothing to make it from"
    assert missing({(3, 4): 1}, [4, 5], 3, 5) == (4, 5), "3 itself is gone"
    assert missing({(3, 4): 1}, [3, 4, 5], 3, 5) == (4, 5), "others can use it too"
    assert missing({(3, 4): 1}, [3, 4, 5], 3, 5, max_deltas=1) == (3, 5)
    assert missing({(3, 4): 1}, [4, 5], 3, 5, max_deltas=1) is None
    assert missing({}, [4], 4, 5) is None
    assert missing({}, [4, 5], 6, 5) is None
    assert missing({}, [4, 5], 5, 5) is None


edges = st.tuples(st.integers(1, 7), st.integers(1, 7)).filter(lambda edge: edge[0] < edge[1])


def all_chains(sizes, have, want):
    if have == want:
        yield []
    for edge in sizes:
        if edge[0] == have and edge[1] <= want:
            yield from ([edge, *rest] for rest in all_chains(sizes, edge[1], want))


@given(
    sizes=st.dictionaries(edges, st.integers(1, 30), max_size=12),
    have=st.integers(1, 7),
    want=st.integers(1, 7),
    limit=st.integers(1, 6),
)
def test_no_chain_is_shorter(sizes, have, want, limit):
    found = shortest_chain(sizes, have, want, max_deltas=limit)
    possible = [c for c in all_chains(sizes, have, want) if 0 < len(c) <= limit]
    if not possible:
        assert found is None
    else:
        assert found in possible
        assert sum(map(sizes.get, found)) == min(sum(map(sizes.get, c)) for c in possible)
