"""GGUF files with their vision parts, of each vision family that llama.cpp's converter writes, against the models that
they were made of: tensors bit for bit, pixels, and answers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from scripts.make_gguf import VISION_PARTS, write_gguf_pair
from tests.families import in_depth
from tests.media.pictures import noise
from tests.models import vision_model
from tests.worker.test_images import COUNT, Harness, agrees, expected, prompt
from tgi.hub.gguf.architecture import plan_conversion
from tgi.hub.gguf.convert import convert
from tgi.hub.gguf.projector import plan_vision
from tgi.hub.gguf.reader import read_gguf
from tgi.hub.gguf.weights import write_weights
from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import import_gguf, model_directory
from tgi.hub.vision import read_vision_config
from tgi.media.processor import ImageProcessor
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings
from tgi.worker.planning.deployment_plan import read_planned_model

pytestmark = pytest.mark.slow

PREPROCESSOR = "preprocessor_config.json"

# What llama.cpp has in its code, so that files do not contain it: entries of config.json. A full layer of Gemma 3 is
# the sixth one.
ASSUMED: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "text_config": {
            **{"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "layer_types": 3 * ["sliding_attention"]}
        }
    },
    "qwen2_5_vl": {"vision_config": {"window_size": 112}},
}
# The same of preprocessor_config.json, where None is the default.
_TILES = dict.fromkeys(("tile_size", "min_image_tokens", "max_image_tokens", "max_tiles"))
ASSUMED_OF_IMAGES: dict[str, dict[str, Any]] = {
    "gemma4": {"max_soft_tokens": None},
    "gemma4_unified": {"max_soft_tokens": None},
    "lfm2_vl": _TILES,
}
# Settings of the text part, without which files cannot describe the small models.
TEXT_PARTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama4": (
        *(("moe_layers", None), ("interleave_moe_layer_step", 2), ("no_rope_layers", None)),
        *(("attention_chunk_size", 8192), ("floor_scale", 8192), ("attn_scale", 0.1)),
    ),
    "qwen3_vl_moe": (("mlp_only_layers", []),),
}
# One of each kind: as Gemma 3, matrices in three tensors and windows, layers whose states go to the text part, tiles,
# permuted rows, layers left out, patches with channels last, pairs of rows.
EACH = ("idefics3", "qwen2_5_vl", "qwen3_vl", "internvl", "mistral3", "llava_next", "lfm2_vl", "glm4v")


def make(kind: str, tmp_path: Path) -> Path:
    """A model of which files have everything."""
    options = {"text_part": TEXT_PARTS[kind]} if kind in TEXT_PARTS else {}
    directory = vision_model(kind, **options)
    if kind not in {*ASSUMED, *ASSUMED_OF_IMAGES}:
        return directory
    directory = Path(shutil.copytree(directory, tmp_path / "original"))
    config, images = (json.loads((directory / name).read_text()) for name in ("config.json", PREPROCESSOR))
    for part, values in ASSUMED.get(kind, {}).items():
        config[part] |= values
    images |= ASSUMED_OF_IMAGES.get(kind, {})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / PREPROCESSOR).write_text(json.dumps({k: one for k, one in images.items() if one is not None}))
    return directory


def import_pair(kind: str, directory: Path, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    write_gguf_pair(directory, tmp_path / "model.gguf", tmp_path / "mmproj.gguf")
    convert(tmp_path / "model.gguf", made, lambda *_: None, packed=True, mmproj=tmp_path / "mmproj.gguf")
    return made


def serve(made: Path, directory: Path, kind: str, tmp_path: Path) -> None:
    given = prompt(kind, tmp_path, 1, 1)
    running = Harness(made, tmp_path).start()
    served = running.add(given.ids, COUNT, given.images)
    running.run()
    agrees(served, expected(directory, given))


def see_the_same(made: Path, directory: Path) -> None:
    """The processors make the same ids and pixels of an image."""
    shown = [
        ImageProcessor(path, read_vision_config(read_model_config(path, weights=False))).process(noise(90, 70))
        for path in (made, directory)
    ]
    assert shown[0].prompt_ids == shown[1].prompt_ids
    assert all((shown[0].tensors[name] == one).all() for name, one in shown[1].tensors.items())


@pytest.mark.parametrize("kind", sorted(VISION_PARTS.keys() - {"gemma3"}))
def test_import(kind: str, tmp_path: Path) -> None:
    """Tensors of the tower are those of the original, bit for bit, and so are pixels."""
    directory = make(kind, tmp_path)
    made = import_pair(kind, directory, tmp_path)
    original, found = load_file(directory / "model.safetensors"), load_file(made / "vision.safetensors")
    invented = {name for name in found if kind.startswith("llava") and "post_layernorm" in name}
    assert found.keys() - original.keys() == set()
    assert all(torch.equal(one.float(), original[name]) for name, one in found.items() if name not in invented)
    see_the_same(made, directory)
    if kind in in_depth((kind,), EACH):
        serve(made, directory, kind, tmp_path)


def load_pair(file: Path, directory: Path) -> None:
    """transformers finds all tensors in the import."""
    import_gguf(file, directory, lambda stage, percent, size=0: None)
    model = transformers.AutoModelForImageTextToText
    _, report = model.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())


def test_vision_part_by_its_name(tmp_path: Path) -> None:
    """--mmproj names a file anywhere; without it one next to the model's file is found. The plan counts it."""
    directory, file, elsewhere = make("gemma3", tmp_path), tmp_path / "model.gguf", tmp_path / "elsewhere"
    elsewhere.mkdir()
    mmproj = elsewhere / "seen.gguf"
    for swapped in (False, True):  # of which files have the two matrices of an MLP under each other's names
        write_gguf_pair(directory, file, mmproj, swapped=swapped)
        made = model_directory(str(file), cache=tmp_path / "cache", mmproj=str(mmproj))
        serve(made, directory, "gemma3", tmp_path)
        see_the_same(made, directory)
    planned = [read_planned_model(path, Settings(mmproj=str(mmproj))).tower for path in (file, made)]
    assert planned[0] == planned[1] > 0
    assert read_planned_model(file, Settings(mmproj=str(mmproj), media_workers=0)).tower == 0
    assert read_planned_model(file, Settings()).tower == 0

    shutil.copy(mmproj, tmp_path / "mmproj-model.gguf")
    assert model_directory(str(file), cache=tmp_path / "cache") != made  # that file has another time
    load_pair(file, tmp_path / "plain")
    shutil.copy(mmproj, tmp_path / "mmproj-other.gguf")
    with pytest.raises(UserError, match=r"several vision parts: mmproj-model\.gguf, mmproj-other\.gguf.*--mmproj"):
        model_directory(str(file), cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"--mmproj seen\.gguf is for a model in a GGUF file, and 'gpt2' is not one"):
        model_directory("gpt2", mmproj="seen.gguf")
    with pytest.raises(UserError, match=r"--mmproj .*/nowhere\.gguf does not exist"):
        model_directory(str(file), cache=tmp_path / "cache", mmproj=str(tmp_path / "nowhere.gguf"))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"clip.projector_type": "resampler"}, "has a projector of type 'resampler' for a model of type 'gemma3_text'"),
    ({"clip.projector_type": "qwen2vl_merger"}, "has a projector of type 'qwen2vl_merger' for a model of type"),
    ({"clip.projector_type": None}, "is no vision part"),
    ({"clip.vision.block_count": 3}, r"no tensor 'v\.blk\.2\.ln1\.weight'"),
    ({"clip.vision.block_count": 1}, r"does not use, such as 'v\.blk\.1\."),
    ({"clip.vision.block_count": 1 << 30}, "at most 1024 was expected"),
    ({"clip.vision.image_size": 1 << 20}, "at most 16384 was expected"),
    ({"clip.vision.image_size": 85}, "a divisor of 85"),
    ({"clip.vision.attention.head_count": 5}, "a divisor of 32"),
    ({"clip.vision.image_mean": [0.5, 0.5]}, "a list of three numbers"),
    ({"clip.vision.image_std": [0.5, 0.0, 0.5]}, "positive deviations"),
)


def test_refused_vision_parts(tmp_path: Path) -> None:
    directory, file, mmproj = make("gemma3", tmp_path), tmp_path / "model.gguf", tmp_path / "seen.gguf"
    for number, (metadata, words) in enumerate(REFUSED):
        write_gguf_pair(directory, file, mmproj, metadata)
        with pytest.raises(UserError, match=words):
            refuse(file, mmproj, tmp_path / str(number))
    with pytest.raises(UserError, match=r"model\.gguf is no vision part \(mmproj\): its architecture is 'gemma3'"):
        refuse(file, file, tmp_path / "text")
    wide = vision_model("gemma3", text_part=(("hidden_size", 96),))
    write_gguf_pair(wide, tmp_path / "wide.gguf", tmp_path / "other.gguf")
    with pytest.raises(UserError, match=r"other\.gguf is the vision part of another model: .*\[32, 96\], and .* 64"):
        refuse(file, tmp_path / "other.gguf", tmp_path / "other")


def test_dimensions_of_one_behind_turned_axes(tmp_path: Path) -> None:
    directory = make("gemma4_unified", tmp_path)
    write_gguf_pair(directory, tmp_path / "model.gguf", tmp_path / "seen.gguf")
    source, seen = (read_gguf(tmp_path / name) for name in ("model.gguf", "seen.gguf"))
    position = seen.tensors[name := "v.position_embd.weight"]
    longer = replace(seen, tensors=seen.tensors | {name: replace(position, shape=(*position.shape, 1))})
    text = plan_conversion(source).config
    for number, file in enumerate((seen, longer)):
        tensors = plan_vision(file, source, text).tensors
        write_weights(file, tensors, tmp_path / f"{number}.safetensors", lambda *_: None, packed=True, plain=True)
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()


def refuse(file: Path, mmproj: Path, made: Path) -> None:
    made.mkdir()
    convert(file, made, lambda *_: None, packed=True, mmproj=mmproj)


def test_refused_tiles_and_axes(tmp_path: Path) -> None:
    """Numbers of the processor, and of the text part, that mean work."""
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("internvl", {"clip.vision.preproc_max_tiles": 10**6}, "1 to 256 was expected"),
        ("llava_next", {"clip.vision.image_grid_pinpoints": [56, 112, 56]}, "pairs of pixels was expected"),
        ("llava", {"clip.vision.feature_layer": [0, 1]}, "the last layer, 1, was expected"),
        ("qwen2_vl", {"clip.vision.image_max_pixels": 1 << 31}, "at most 268435456 was expected"),
        ("qwen2_vl", {"clip.vision.image_min_pixels": 1 << 26}, "image_max_pixels' .* at least 67108864"),
        ("gemma4", {"clip.vision.projector.scale_factor": 1 << 14}, "scale_factor' .* at most 64 was expected"),
        ("glm4v", {"clip.vision.spatial_merge_size": 65}, "spatial_merge_size' .* at most 64 was expected"),
        ("qwen3_vl", {"clip.vision.is_deepstack_layers": [True]}, "a list of 3 truth values"),
    )
    for number, (kind, metadata, words) in enumerate(cases):
        write_gguf_pair(vision_model(kind), tmp_path / f"{kind}.gguf", tmp_path / "seen.gguf", metadata)
        with pytest.raises(UserError, match=words):
            refuse(tmp_path / f"{kind}.gguf", tmp_path / "seen.gguf", tmp_path / str(number))
