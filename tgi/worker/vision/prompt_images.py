"""The images of the requests in the slots, and what they add to a batch."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.hub.vision_towers import Bidirectional
from tgi.microkernel.messages.protocol import MAX_DIVIDED_IMAGES, UNDIVIDED_IMAGES, UNDIVIDED_PROMPT, ImageSegment
from tgi.worker.attention.image_states import ImageStates, Run, StoredImages, TooManyImages
from tgi.worker.attention.interface import ForwardBatch, ImageBlocks, ImageRows
from tgi.worker.device_copies import copy_columns_to_device
from tgi.worker.vision.feature_cache import FeatureCache
from tgi.worker.vision.features import ImageFeatures
from tgi.worker.vision.image_file import BadImage, ImageFiles
from tgi.worker.vision.rope_positions import PlacedGrid, RopePositions, rope_positions
from tgi.worker.vision.tower import VisionTower
from tgi.worker.vision.tower_run import TowerRun

Ints = NDArray[np.int64]


class PlacedImage(NamedTuple):
    """An image of a prompt: `tokens` [n] are the positions of its image tokens, ascending."""

    segment: ImageSegment
    tokens: Ints


class TowerWork(NamedTuple):
    """What the vision tower has computed, and the time it took."""

    positions: int = 0  # image tokens
    us: int = 0


class SeenGroup(NamedTuple):
    """Positions `first` to before `stop` of a prompt see the first `shown` of these images, which follow each other."""

    first: int
    stop: int
    images: list[PlacedImage]
    shown: int


class SlotImages(NamedTuple):
    """The images of a request, and its rotary positions, if these have several axes."""

    images: list[PlacedImage]
    rope: RopePositions | None
    blocks: list[tuple[int, int]]  # positions [first, stop) that see each other, ascending
    groups: list[SeenGroup] = []  # of cross-attention, ascending

    @property
    def end(self) -> int:
        """The position after the last token that images add something to."""
        if self.groups:
            return self.groups[-1].stop
        end = int(self.images[-1].tokens[-1]) + 1
        return max(end, self.blocks[-1][1]) if self.blocks else end

    def last_keys(self, start: int, end: int) -> Ints:
        """The last position that each of these sees. Raises BadImage for a chunk that ends within a block."""
        found = np.arange(start, end)
        for first, stop in self.blocks:
            if first < end < stop:
                raise BadImage(f"a chunk ends at {end}, within the block of positions {first} to {stop - 1}")
            found[max(first - start, 0) : max(stop - start, 0)] = stop - 1
        return found


ENDLESS = 1 << 62  # a position after those of any request


def _seen_groups(images: list[PlacedImage]) -> list[SeenGroup]:
    """SlotImages.groups: a position sees the last image token up to it, and those directly before that."""
    groups: list[SeenGroup] = []
    for image in images:
        position, run = int(image.tokens[0]), [image]
        if groups:
            if position == groups[-1].first + 1:
                run = groups[-1].images  # of all groups of these images
                run.append(image)
            groups[-1] = groups[-1]._replace(stop=position)
        groups.append(SeenGroup(position, ENDLESS, run, len(run)))
    return groups


class PromptImages:
    """Keeps the images of each slot, and computes those that a step needs, from their `files`; at most `cache_bytes` of
    what the tower computes are kept, or, if layers attend to images, what these make of it in `states`. Implements
    PromptParts."""

    encodes_prompt = False

    def __init__(
        self,
        tower: VisionTower,
        files: ImageFiles,
        cache_bytes: int,
        states: ImageStates | None = None,
    ) -> None:
        self.tower = tower
        self.states = states
        self.computed = 0  # images
        self.cache = FeatureCache(cache_bytes)
        self._files = files
        self._slots: dict[int, SlotImages] = {}
        self._work = TowerWork()
        # Of images that are computed in part, by digest. Of more than MAX_DIVIDED_IMAGES, the one whose latest slice is
        # the oldest is given up, and computed anew when needed.
        self.runs: dict[bytes, TowerRun] = {}

    @property
    def shifts(self) -> bool:
        """See PromptParts, as of all that follows."""
        return self.tower.family.rope is not None

    @property
    def undivided(self) -> str:
        """DeploymentLimits.undivided of this model."""
        kind = self.tower.family.bidirectional
        if kind is Bidirectional.PROMPT:
            return UNDIVIDED_PROMPT
        return UNDIVIDED_IMAGES if kind else ""

    @property
    def slices(self) -> int:
        return self.tower.slices

    @property
    def weight_bytes(self) -> int:
        return self.tower.nbytes

    def take_work(self) -> TowerWork:
        """What was computed since the last call."""
        work, self._work = self._work, TowerWork()
        return work

    def reset(self) -> None:
        for slot in list(self._slots):
            self.discard(slot)
        for digest in list(self.runs):
            self.runs.pop(digest).abandon()

    def discard(self, slot: int) -> None:
        """Another request gets this slot."""
        if self._slots.pop(slot, None) is not None and self.states is not None:
            self.states.place(slot, None, 0)

    def assign(self, slot: int, images: Sequence[ImageSegment], ids: Ints) -> None:
        """A request with these images and ids gets the slot. Raises BadImage."""
        placed = []
        for image in images:
            (tokens,) = (ids[image.position : image.position + image.length] == self.tower.image_token_id).nonzero()
            if not len(tokens):
                raise BadImage(f"the ids of an image have no image token, which is {self.tower.image_token_id}")
            placed.append(PlacedImage(image, image.position + tokens))
        rope = None if self.tower.family.rope is None else rope_positions(len(ids), [*map(self._grid, placed)])
        groups = _seen_groups(placed) if self.tower.family.crosses else []
        self._slots[slot] = SlotImages(placed, rope, self._blocks(placed, len(ids)), groups)

    def concern(self, slots: Ints, starts: Ints) -> bool:
        """Whether `add_to` adds something to a batch with rows of `slots` [R] that begin at positions `starts` [R]."""
        if not self._slots:
            return False
        rows = zip(map(self._slots.get, slots.tolist()), starts.tolist(), strict=True)
        return any(own is not None and (own.rope is not None or start < own.end) for own, start in rows)

    def computes(self, slots: Ints, starts: Ints) -> bool:
        if not self._slots:
            return False
        rows = zip(map(self._slots.get, slots.tolist()), starts.tolist(), strict=True)
        if self.states is not None:  # from its last image on, a request sees the same
            return any(own is not None and start < own.groups[-1].first for own, start in rows)
        return any(own is not None and start < own.end for own, start in rows)

    def place(self, slots: Ints, faults: dict[int, str]) -> bool:
        if self.states is None or not self._slots:
            return False
        self.states.begin_step()
        found = False
        for slot in slots.tolist():
            if (own := self._slots.get(slot)) is None or slot in faults:
                continue
            try:
                stored = self._stored(own.groups[-1])
            except BadImage as error:
                faults[slot] = str(error)
                self.states.place(slot, None, 0)
            else:
                self.states.place(slot, stored, stored.ends[-1])
                found = True
        return found

    def advance(self, slot: int, index: int, slices: int, faults: dict[int, str]) -> None:
        own = self._slots.get(slot)
        if own is None or slot in faults:
            return
        image = own.images[index]
        if (digest := image.segment.digest) in self.cache:
            return
        try:
            if (found := self._advance(image, slices)) is not None:
                self.cache.get(digest, lambda: found)
        except BadImage as error:
            faults[slot] = str(error)

    def shift(self, slot: int) -> int:
        own = self._slots.get(slot)
        return 0 if own is None or own.rope is None else own.rope.delta

    def add_to(self, batch: ForwardBatch, slots: Ints, starts: Ints, faults: dict[int, str]) -> ForwardBatch:
        """The batch, whose rows are of `slots` [R] and begin at positions `starts` [R], with the features of the images
        in it and the rotary positions. A slot gets a fault if one of its images cannot be computed."""
        if not self.concern(slots, starts):
            return batch
        where: list[Ints] = []
        features: list[ImageFeatures] = []
        runs: list[Run] = []
        if self.states is not None:
            self.states.begin_step()
        axes: list[Ints] = []
        last_keys: Ints | None = None
        turned, row_begin = False, 0
        for slot, start, length in zip(slots.tolist(), starts.tolist(), batch.query_lens_host, strict=True):
            own = self._slots.get(slot)
            end = start + length
            if own is not None and start < own.end and slot not in faults:
                try:
                    if own.blocks:
                        if last_keys is None:
                            counts = np.array(batch.query_lens_host)
                            last_keys = np.arange(counts.sum()) + np.repeat(starts + counts - counts.cumsum(), counts)
                        last_keys[row_begin : row_begin + length] = own.last_keys(start, end)
                    runs += self._runs(own.groups, start, end)
                    for tokens, found in () if own.groups else self._chunk(own, start, end):
                        where.append(tokens + (row_begin - start))
                        features.append(found)
                except BadImage as error:
                    faults[slot] = str(error)
            if missing := row_begin + length - sum(run.tokens for run in runs):
                runs.append(Run(missing))
            if own is not None and own.rope is not None:
                axes.append(own.rope.select(start, end))
                turned = True
            elif self.tower.family.rope is not None:
                axes.append(np.broadcast_to(np.arange(start, end), (3, length)))
            row_begin += length
        device = batch.tokens.device
        if self.states is not None:
            batch = batch._replace(seen_images=self.states.seen(runs))
        if features:
            (indices,) = copy_columns_to_device((np.concatenate(where),), device)
            deeper = zip(*(one.deeper for one in features), strict=True)
            rows = ImageRows(
                indices, torch.cat([one.embeddings for one in features]), tuple(torch.cat(level) for level in deeper)
            )
            batch = batch._replace(images=rows)
        if last_keys is not None and (last_keys[:-1] >= last_keys[1:]).any():  # some token sees a later one
            (column,) = copy_columns_to_device((last_keys.astype(np.int32),), device)
            windows_alone = self.tower.family.bidirectional is Bidirectional.WINDOWED_IMAGES
            batch = batch._replace(blocks=ImageBlocks(column, windows_alone))
        if turned:
            on_axes = np.concatenate(axes, axis=1)
            differ = bool((on_axes != on_axes[0]).any())
            (positions,) = copy_columns_to_device(((on_axes if differ else on_axes[0]).ravel(),), device)
            batch = batch._replace(rope_positions=positions.view(3, -1) if differ else positions)
        return batch

    def _chunk(self, own: SlotImages, start: int, end: int) -> Iterator[tuple[Ints, ImageFeatures]]:
        """Of each image with image tokens from position `start` to before `end`: these positions, and their features.
        Raises BadImage."""
        for image in own.images:
            first, stop = np.searchsorted(image.tokens, (start, end)).tolist()
            if first == stop:
                continue
            found = self._features(image)
            if len(found.embeddings) != len(image.tokens):
                raise BadImage(
                    f"an image has {len(image.tokens)} image tokens in the prompt, and {len(found.embeddings)} come "
                    "from the model's vision tower"
                )
            chosen = slice(first, stop)
            yield (
                image.tokens[chosen],
                ImageFeatures(found.embeddings[chosen], tuple(level[chosen] for level in found.deeper)),
            )

    def _runs(self, groups: list[SeenGroup], start: int, end: int) -> list[Run]:
        """What the positions from `start` to before `end` see. Raises BadImage."""
        found: list[Run] = []
        for group in groups:
            if (begin := max(group.first, start)) < (stop := min(group.stop, end)):
                if begin > start and not found:
                    found.append(Run(begin - start))
                stored = self._stored(group)
                found.append(Run(stop - begin, stored, stored.ends[group.shown - 1]))
        return found

    def _stored(self, group: SeenGroup) -> StoredImages:
        """The images of a group in `states`. Raises BadImage."""
        assert self.states is not None
        project, images = self.states.project, group.images
        digests = tuple(image.segment.digest for image in images)
        try:
            return self.states.find(digests, lambda: [project(self._compute(image).embeddings) for image in images])
        except TooManyImages as error:
            raise BadImage(str(error)) from error

    def _features(self, image: PlacedImage) -> ImageFeatures:
        return self.cache.get(image.segment.digest, lambda: self._compute(image))

    def _compute(self, image: PlacedImage) -> ImageFeatures:
        """All that is left of it."""
        found = self._advance(image, self.slices)
        while found is None:  # a tower that goes through its layers more than once
            found = self._advance(image, self.slices)
        return found

    def _advance(self, image: PlacedImage, slices: int) -> ImageFeatures | None:
        """Computes the next `slices` slices of an image. Returns its features if they are complete. Raises BadImage."""
        began = time.monotonic()
        digest = image.segment.digest
        run = self.runs.pop(digest, None)
        if run is None and slices >= self.slices:
            found: ImageFeatures | None = self.tower.compute(self._files.read(image.segment, self.tower.family))
        else:
            run = run or self.tower.begin(lambda: self._files.read(image.segment, self.tower.family))
            found = self.tower.advance(run, slices)
        if found is None and run is not None:
            self.runs[digest] = run
            if len(self.runs) > MAX_DIVIDED_IMAGES:
                self.runs.pop(next(iter(self.runs))).abandon()
        else:
            self.computed += 1
        took, done = int(1e6 * (time.monotonic() - began)), self._work
        share = min(1.0, slices / self.slices)
        self._work = TowerWork(done.positions + max(1, round(share * len(image.tokens))), done.us + took)
        return found

    def _blocks(self, images: list[PlacedImage], tokens: int) -> list[tuple[int, int]]:
        """SlotImages.blocks of a prompt of this many tokens: image tokens that follow each other, or all of it."""
        kind = self.tower.family.bidirectional
        if not kind:
            return []
        if kind is Bidirectional.PROMPT:
            return [(0, tokens)]
        found = np.concatenate([image.tokens for image in images])
        parted = (np.diff(found) > 1).nonzero()[0] + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(found, parted)]

    def _grid(self, image: PlacedImage) -> PlacedGrid:
        """Where the tokens of an image are. Raises BadImage unless they are neighbours, one for each place of the
        grid."""
        grid: Tensor = self._files.read(image.segment, self.tower.family, only="image_grid_thw")["image_grid_thw"]
        if grid.shape != (1, 3):
            raise BadImage(f"the grid of an image has shape {list(grid.shape)}, expected [1, 3]")
        frames, rows, columns = grid[0].tolist()
        rows, columns = rows // self.tower.merge, columns // self.tower.merge
        first, count = int(image.tokens[0]), len(image.tokens)
        if min(frames, rows, columns) < 1 or frames * rows * columns != count or image.tokens[-1] != first + count - 1:
            raise BadImage(f"an image with a grid of {frames} * {rows} * {columns} has {count} image tokens")
        return PlacedGrid(first, frames, rows, columns)
