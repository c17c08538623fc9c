"""KV groups: what the layers of a model keep of a request, as data.

The layers of a group keep the same positions, so they share a page table. All groups allocate from one pool: a page has
the same bytes in each of them, because each has the same number of layers (KVGroup.layers, padded to the largest
group). Groups of one kind may be several, where one kind has more layers than another.

Recurrent layers keep no positions but a state, a fixed block per request. Their group, which is the last one, has no
page table: the state of a request has the number of its slot. What the group has are snapshots, copies of a state at
the end of a page, so that a prefix can be found there.

A new kind is a value of GroupKind, and what `first_kept` and `most_pages` say of it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class GroupKind(StrEnum):
    """Which positions the layers of a group keep."""

    FULL = "full"  # all
    SLIDING = "sliding"  # those within the window of a later position
    RECURRENT = "recurrent"  # none, but a state of fixed size


class KVGroup(NamedTuple):
    """Layers with one page table per request, or with one state."""

    kind: str = GroupKind.FULL  # a GroupKind
    window: int = 0  # SLIDING: positions that a query sees, its own included
    layers: list[int] = []  # numbers of the layers; empty: all
    page_bytes: int = 0  # bytes of a page in this group, padding included; RECURRENT: of a state; 0: not told
    snapshots: int = 0  # RECURRENT: snapshots that the worker has memory for
    interval: int = 0  # RECURRENT: positions from one snapshot of a long prompt to the next
    drafts: int = 0  # RECURRENT: drafts of a step before which the worker has memory to keep the state

    def __hash__(self) -> int:
        return hash(
            (self.kind, self.window, self.page_bytes, self.snapshots, self.interval, self.drafts)
        )  # a list has no hash

    @property
    def slides(self) -> bool:
        """Whether pages are given back while a request runs."""
        return self.kind == GroupKind.SLIDING

    @property
    def paged(self) -> bool:
        """Whether it has page tables."""
        return self.kind != GroupKind.RECURRENT

    def first_kept(self, position: int, page_size: int) -> int:
        """The first page that is needed when the positions from `position` on are computed, and when a request goes on
        from the last page border before it. Pages before this one can be given back."""
        if not self.slides:
            return 0
        return max(0, position // page_size - -(-(self.window - 1) // page_size))

    def most_pages(self, tokens: int, step_tokens: int, page_size: int) -> int:
        """The pages that a request of this many tokens holds at most, in steps of up to `step_tokens`."""
        pages = -(-tokens // page_size) * self.paged
        if not self.slides:
            return pages
        return min(pages, -(-(self.window - 1) // page_size) + -(-(step_tokens - 1) // page_size) + 1)


ONE_FULL_GROUP = [KVGroup()]
MAX_GROUPS = 254  # the prefix cache keeps a group's number in a byte
MAX_SNAPSHOTS = 1 << 24


def groups_out_of_range(groups: Sequence[KVGroup]) -> str:
    """Why no worker can have these groups, in words; "" if one can."""
    if not 1 <= len(groups) <= MAX_GROUPS:
        return f"{len(groups)} KV groups"
    for group in groups:
        if group.kind not in list(GroupKind):
            return f"a KV group of kind {group.kind!r}"
        if group.slides and not 1 <= group.window < 1 << 31:
            return f"a KV group with a window of {group.window}"
        if not group.paged and not 0 <= group.drafts <= MAX_SNAPSHOTS:
            return f"a KV group that keeps states before {group.drafts} drafts"
        if not group.paged and not (0 <= group.snapshots <= MAX_SNAPSHOTS and 1 <= group.interval < 1 << 31):
            return f"a KV group with {group.snapshots} snapshots, one every {group.interval} positions"
    if not groups[0].paged or not all(group.paged for group in groups[:-1]):
        return "a recurrent KV group that is not the last one, after one with pages"
    return ""


def paged_groups(groups: Sequence[KVGroup]) -> list[KVGroup]:
    """Those with page tables."""
    return [group for group in groups if group.paged]


def recurrent_group(groups: Sequence[KVGroup]) -> KVGroup | None:
    """The one whose layers are recurrent; None: all layers have pages."""
    return None if groups[-1].paged else groups[-1]


def make_groups(windows: Sequence[int | None], longest: int) -> list[KVGroup]:
    """The groups of a model whose layers have these sliding windows, in positions; None: full attention. Requests have
    at most `longest` tokens: a window that is as long needs no group of its own.

    The first group has full attention, if any layer has. The block hashes of its pages stand for the prefix that all
    groups share.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window is not None and window < longest else 0, []).append(layer)
    if not any(kinds):
        return ONE_FULL_GROUP
    # Each group has as many layers as that kind with which the fewest places stay empty.
    size = min({len(layers) for layers in kinds.values()}, key=lambda size: (padded_layers(kinds, size), -size))
    return [
        KVGroup(GroupKind.SLIDING if window else GroupKind.FULL, window, layers[begin : begin + size])
        for window, layers in sorted(kinds.items())
        for begin in range(0, len(layers), size)
    ]


def padded_layers(kinds: dict[int, list[int]], size: int) -> int:
    """The layers of all groups of `size` layers, empty places included."""
    return sum(-(-len(layers) // size) * size for layers in kinds.values())


def group_layers(groups: Sequence[KVGroup], layers: int) -> int:
    """The layers of each group, empty places included, for a model of this many layers."""
    return max(len(group.layers) or layers for group in groups)


def pages_needed(groups: Sequence[KVGroup], tokens: int, step_tokens: int, page_size: int) -> int:
    """The pages that a request of this many tokens holds at most, over all groups."""
    return sum(group.most_pages(tokens, step_tokens, page_size) for group in groups)


def longest_request(groups: Sequence[KVGroup], pages: int, step_tokens: int, page_size: int, most: int) -> int:
    """The tokens of the longest request, of at most `most`, that needs no more than this many pages."""
    fits, beyond = 0, most + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if pages_needed(groups, middle, step_tokens, page_size) <= pages:
            fits = middle
        else:
            beyond = middle
    return fits


def cache_tokens(groups: Sequence[KVGroup], pages: int, step_tokens: int, page_size: int, longest: int) -> int:
    """The tokens that this many pages hold in requests of `longest` tokens."""
    return pages * -(-longest // page_size) // pages_needed(groups, longest, step_tokens, page_size) * page_size
