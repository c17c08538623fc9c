"""Caches what the vision tower has computed of an image, by the image's digest."""

from collections import OrderedDict
from collections.abc import Callable

from tgi.worker.vision.features import ImageFeatures


class FeatureCache:
    """Keeps the features of the images used last, in at most `limit` bytes; the last one in any case, since its prompt
    may be computed in chunks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._features: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self.bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._features

    def get(self, digest: bytes, compute: Callable[[], ImageFeatures]) -> ImageFeatures:
        """The features of an image, which are computed if they are not there. Raises what `compute` raises."""
        if (found := self._features.get(digest)) is not None:
            self._features.move_to_end(digest)
            return found
        made = self._features[digest] = compute()
        self.bytes += made.nbytes
        while self.bytes > self._limit and len(self._features) > 1:
            _, evicted = self._features.popitem(last=False)
            self.bytes -= evicted.nbytes
        return made
