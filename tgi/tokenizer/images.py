"""Images in prompts: the ids that stand for each image take the place of its placeholder."""

from collections.abc import Sequence
from typing import NamedTuple

from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, column_slice, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import ImageInput, ImageSegment
from tgi.tokenizer.vocabulary import Vocabulary


class PlaceholderError(Exception):
    """The placeholders of a prompt do not fit its images. The message is for the client."""


class ExpandedIds(NamedTuple):
    """Ids of a prompt with its images."""

    ids: bytes  # int32
    origins: list[int]  # for each id, the index of the id that it was before
    images: list[ImageSegment]


class ImagePlaceholders:
    """Puts images into the prompts of one model. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, image_token: str, images_first: bool = False) -> None:
        """`image_token`: what a prompt has for each image; "": the model reads text alone. `images_first`:
        VisionConfig.images_first, of a model whose processor ends the ids of an image with the token that begins a text
        and a newline."""
        self._images_first = images_first
        self._vocabulary = vocabulary
        self.token = image_token
        found = vocabulary.tokenizer.token_to_id(image_token) if image_token else None
        self._token_id = -1 if found is None else found
        self._added = vocabulary.tokenizer.get_added_tokens_decoder().keys()

    def with_margins(self, text: str, images: Sequence[ImageInput]) -> str:
        """The text with what the images' processor writes around an image as text. It is encoded with the text next to
        it: a tokenizer may have one token for the last character of this and the first one of that.

        Raises PlaceholderError if there is not one placeholder for each image.
        """
        pieces = text.split(self.token) if self.token else [text]
        if len(pieces) != len(images) + 1:
            raise PlaceholderError(
                f"the prompt has {len(pieces) - 1} times {self.token!r}, which stands for an image, and {len(images)} "
                "images. Leave the token out of texts; if they have none, the model's chat template loses images"
            )
        parts = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            before, _, after = self._divided(image)
            decode = self._vocabulary.tokenizer.decode
            parts += decode(before), self.token, "" if self._images_first else decode(after), piece
        if self._images_first and images:
            parts.append("\n")
        return "".join(parts)

    def expand(self, ids: bytes, images: Sequence[ImageInput]) -> ExpandedIds:
        """Puts the ids of each image in the place of its placeholder, in order. Raises PlaceholderError."""
        given = unpack_int32(ids)
        places = [at for at, token_id in enumerate(given) if token_id == self._token_id]
        if len(places) != len(images):
            raise PlaceholderError(f"the prompt has {len(places)} placeholders for {len(images)} images")
        expanded: list[int] = []
        origins: list[int] = []
        segments = []
        begin = 0
        for number, (place, image) in enumerate(zip(places, images, strict=True), 1):
            _, inner, _ = self._divided(image)
            if self._images_first and number == place == 1 and given[0] == inner[-1]:
                begin = 1  # the text begins after the images
            if self._images_first and number < len(images):
                del inner[-1]
            expanded += given[begin:place]
            origins += range(begin, place)
            segment = ImageSegment(len(expanded), len(inner), image.digest, image.name, image.site, image.size)
            segments.append(segment)
            expanded += inner
            origins += [place] * len(inner)
            begin = place + 1
        expanded += given[begin:]
        origins += range(begin, len(given))
        return ExpandedIds(pack_column(INT32, expanded), origins, segments)

    def _divided(self, image: ImageInput) -> tuple[list[int], list[int], list[int]]:
        """The ids of an image: those of text in front, from the first to the last added token, and those of text
        behind."""
        ids = unpack_int32(image.prompt_ids)
        marks = [at for at, token_id in enumerate(ids) if token_id in self._added]
        if not marks:
            raise PlaceholderError("the model's image processor has returned no token that stands for the image")
        first, last = marks[0], marks[-1] + 1
        return ids[:first], ids[first:last], ids[last:]


def without_first(images: Sequence[ImageSegment], dropped: int) -> list[ImageSegment]:
    """The images of a prompt whose first ids are dropped. Raises PlaceholderError if one of them would be cut."""
    if images and images[0].position < dropped:
        raise PlaceholderError("`truncate` would cut an image out of the prompt. Send a shorter prompt")
    return [image._replace(position=image.position - dropped) for image in images]


def expanded_column(column: bytes, origins: Sequence[int]) -> bytes:
    """A column of four-byte items for the ids of a prompt as one for its expanded ids."""
    return b"".join(column_slice(column, at, at + 1) for at in origins) if len(column) >= ITEM_BYTES else column
