"""Maps the vision part of a model, which llama.cpp keeps in a file of its own (mmproj), to a multimodal model of
Hugging Face: configuration, tensors, and the files of its processor."""

import math
from typing import Any, NamedTuple

import numpy as np

from tgi.hub.gguf.conversion_plan import MAX_LAYERS, Metadata, TargetTensor
from tgi.hub.gguf.projector_families import DEEPSTACK, FAMILIES, ProjectorFamily, VisionTensor
from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

PROJECTOR_TYPES = ("clip.projector_type", "clip.vision.projector_type")  # the second one beside a part for audio
MAX_IMAGE_SIZE = 1 << 14  # pixels, of a side
MAX_TILES = 256  # of an image
MAX_MERGED = 64  # patches of a token, squared: processors make an image larger that has fewer
# The width of the Gemma 4 whose images do not see later tokens, which files do not tell (llama.cpp, mtmd.cpp).
CAUSAL_GEMMA4 = (1536, 2560)

Entries = dict[str, Any]


class VisionPlan(NamedTuple):
    """What the vision part adds to the directory of a text model."""

    config: Entries  # config.json of the whole
    tensors: list[TargetTensor]
    files: dict[str, Entries]  # of the processor, by name
    tokens: dict[str, str]  # entries of tokenizer_config.json
    text_prefixes: tuple[str, str]  # of a text model's tensors: what stands for the second in the whole


def plan_vision(file: GGUFFile, source: GGUFFile, text: Entries) -> VisionPlan:
    """Checks that the file has the vision part of the model in `source`, of which `text` is the config.json. Raises
    UserError otherwise."""
    metadata = Metadata(file)
    family = _family(metadata, text["model_type"])
    sizes = _sizes(metadata, family, text["hidden_size"])
    tensors = _tensors(file, family, sizes)
    part: Entries = text | {"model_type": family.text_type or text["model_type"]}
    if family.rope:
        part["rope_parameters"] = text["rope_parameters"] | {"mrope_section": _sections(Metadata(source))}
    vocabulary = {token: number for number, token in enumerate(source.metadata["tokenizer.ggml.tokens"])}
    if lacking := {*family.tokens.values(), *family.token_ids.values()} - set(vocabulary):
        raise UserError(f"{file.path} has images, for which the vocabulary of {source.path} lacks {min(lacking)!r}.")
    vision: Entries = {**family.vision, **_numbers(family.sizes, sizes)}
    if act := _activation(metadata, family):
        vision["hidden_act"] = act
    if family.epsilon:
        vision[family.epsilon] = metadata.number("clip.vision.attention.layer_norm_epsilon")
    config: Entries = {name: text[name] for name in ("bos_token_id", "eos_token_id") if name in text}
    config |= {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        **family.config,
        **_numbers(family.config_sizes, sizes),
        **{key: vocabulary[token] for key, token in family.token_ids.items()},
    }
    images = {
        "image_processor_type": family.image_processor,
        "image_mean": _three(metadata, "clip.vision.image_mean"),
        "image_std": _three(metadata, "clip.vision.image_std"),
        **family.images,
        **_image_size(family.size, sizes["size"]),
        **_numbers(family.image_sizes, sizes),
    }
    processor = {
        "processor_class": family.processor,
        **family.processing,
        **_numbers(family.processing_sizes, sizes),
    }
    if (add := _ADDITIONS.get(family.model_type)) is not None:
        add(metadata, sizes, _Parts(config, vision, part, images, Metadata(source)))
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    whole = config | {"text_config": part, "vision_config": vision}
    return VisionPlan(whole, tensors, files, dict(family.tokens), family.text_prefixes)


def _family(metadata: Metadata, text_type: str) -> ProjectorFamily:
    path, found = metadata.file.path, metadata.file.metadata
    kind = next((found[key] for key in PROJECTOR_TYPES if isinstance(found.get(key), str)), None)
    if found.get("general.architecture") != "clip" or kind is None:
        raise UserError(
            f"{path} is no vision part (mmproj): its architecture is {str(found.get('general.architecture'))[:80]!r}, "
            f"and {PROJECTOR_TYPES[0]} {str(kind)[:80]!r}."
        )
    name = kind
    if kind == "pixtral" and metadata.positive("clip.vision.spatial_merge_size", 1) > 1:
        name = "pixtral merged"
    if kind == "mlp" and "clip.vision.image_grid_pinpoints" in found:
        name = "mlp tiles"
    family = FAMILIES.get((name, text_type)) or FAMILIES.get((name, ""))
    if family is None:
        known = ", ".join(sorted({one.partition(" ")[0] for one, _ in FAMILIES}))
        raise UserError(
            f"{path} has a projector of type {kind[:80]!r} for a model of type {text_type!r}; import knows {known} of "
            "their models. Move it to another directory to serve the text part alone, or use the safetensors version."
        )
    return family


def _sizes(metadata: Metadata, family: ProjectorFamily, text: int) -> dict[str, int]:
    read = metadata.positive if family.layers else metadata.integer
    layers, heads = read("clip.vision.block_count"), read("clip.vision.attention.head_count")
    hidden, inner = metadata.positive("clip.vision.embedding_length"), read("clip.vision.feed_forward_length")
    size, patch = metadata.positive("clip.vision.image_size"), metadata.positive("clip.vision.patch_size")
    merged = family.merged
    for key in ("clip.vision.projector.scale_factor", "clip.vision.spatial_merge_size"):
        if (merged := metadata.positive(key, merged)) > MAX_MERGED:
            raise metadata.wrong(key, merged, f"at most {MAX_MERGED}")
    if layers > MAX_LAYERS:
        raise metadata.wrong("clip.vision.block_count", layers, f"at most {MAX_LAYERS}")
    if size > MAX_IMAGE_SIZE:
        raise metadata.wrong("clip.vision.image_size", size, f"at most {MAX_IMAGE_SIZE}")
    side = size // patch
    if family.square and (size % patch or side < merged):
        expected = f"a divisor of {size} with {merged} patches a side of a token"
        raise metadata.wrong("clip.vision.patch_size", patch, expected)
    if heads and hidden % heads:
        raise metadata.wrong("clip.vision.attention.head_count", heads, f"a divisor of {hidden}")
    return {
        **{"H": hidden, "I": inner, "D": hidden // max(1, heads), "P": patch, "S": merged**2, "T": text},
        **{"N": side**2, "N1": side**2 + 1, "tokens": (side // merged) ** 2, "merged": merged},
        **{"layers": layers, "heads": heads, "size": size},
    }


def _numbers(names: Any, sizes: dict[str, int]) -> dict[str, int]:
    return {key: sizes[size] for key, size in names.items()}


def _tensors(file: GGUFFile, family: ProjectorFamily, sizes: dict[str, int]) -> list[TargetTensor]:
    """Those of the result. Raises UserError if those of the file are others."""
    # Earlier converters gave the two matrices of an MLP each other's names.
    first = file.tensors.get("v.blk.0.ffn_up.weight")
    inner, hidden = sizes["I"], sizes["H"]
    swapped = inner != hidden and first is not None and first.shape == (hidden, inner)
    wanted: list[TargetTensor] = []
    read: set[str] = set()
    numbered = [(one, (layer, layer)) for layer in range(sizes["layers"]) for one in family.layers]
    if family.layers and (deeper := _deepstack(file, sizes["layers"])):
        numbered += [(one, (layer, number)) for number, layer in enumerate(deeper) for one in DEEPSTACK]
    for tensor, (layer, number) in [*((one, (0, 0)) for one in family.others), *numbered]:
        names = tensor.source.replace("ffn_up", "?").replace("ffn_down", "ffn_up").replace("?", "ffn_down")
        sources = (names if swapped else tensor.source).replace("{}", str(layer)).split("|")
        named = next((one for one in sources if one.split("+")[0] in file.tensors), sources[0])
        if tensor.optional and named not in file.tensors:
            continue
        target = _target(file, tensor, named.split("+"), tensor.name.format(number), sizes)
        wanted.append(target)
        read.update(target.sources)
    unknown = {name for name in set(file.tensors) - read if not name.startswith(family.unused or ("\0",))}
    if unknown:
        raise UserError(
            f"{file.path} has tensors that the vision part of {family.model_type} does not use, such as "
            f"{min(unknown)!r}."
        )
    return wanted


def _target(file: GGUFFile, tensor: VisionTensor, sources: list[str], name: str, sizes: dict[str, int]) -> TargetTensor:
    for source in sources:
        found = file.tensors.get(source)
        own = () if found is None else found.shape
        expected = _shape(tensor.stored or tensor.shape, sizes, own)
        # Some releases of the converter leave out dimensions of 1.
        if found is not None and [one for one in own if one != 1] == [one for one in expected if one != 1]:
            continue
        if found is not None and "T" in (tensor.stored or tensor.shape).split() and source.endswith(".weight"):
            raise UserError(
                f"{file.path} is the vision part of another model: its tensor {source!r} has shape {list(own)}, and "
                f"embeddings of the text part have {sizes['T']} numbers."
            )
        shape = "no tensor" if found is None else f"{list(own)} in the tensor"
        raise UserError(
            f"{file.path} has {shape} {source!r}, where {list(expected)} was expected. Fetch or convert it again."
        )
    own = _shape(tensor.stored or tensor.shape, sizes, file.tensors[sources[0]].shape)
    stacked = (len(sources), *own) if len(sources) > 1 else own
    turned = tuple(stacked[axis] for axis in tensor.axes) if len(tensor.axes) == len(stacked) else own
    return TargetTensor(
        sources[0],
        name,
        _shape(tensor.shape, sizes, turned),
        heads=sizes["heads"] if tensor.permuted else 0,
        shift=tensor.shift,
        then=tuple(sources[1:]),
        reshaped=own,
        view=_shape(tensor.view or tensor.stored or tensor.shape, sizes, own) if tensor.axes else (),
        axes=tensor.axes,
    )


def _shape(names: str, sizes: dict[str, int], found: tuple[int, ...]) -> tuple[int, ...]:
    """`found` has the sizes "?"."""
    shape = []
    for axis, name in enumerate(names.split()):
        if name == "?":
            shape.append(found[axis] if axis < len(found) else 0)
        else:
            shape.append(math.prod(int(one) if one.isdigit() else sizes[one] for one in name.split("*")))
    return tuple(shape)


def _sections(metadata: Metadata) -> list[int]:
    """The rotary pairs of each axis."""
    found = metadata.file.metadata.get(key := f"{metadata.string('general.architecture')}.rope.dimension_sections")
    if not isinstance(found, list) or len(found) < 3 or not all(type(one) is int and one >= 0 for one in found):
        raise metadata.wrong(key, found, "a list of three whole numbers")
    return found[:3]


def _three(metadata: Metadata, key: str) -> list[float]:
    value = metadata.file.metadata.get(key)
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, float) for one in value):
        raise metadata.wrong(key, value, "a list of three numbers")
    if not all(math.isfinite(one) for one in value) or (key.endswith("std") and min(value) <= 0):
        raise metadata.wrong(key, value, "finite numbers, and positive deviations,")
    return [float(str(np.float32(one))) for one in value]  # the fewest digits that are this number


def _activation(metadata: Metadata, family: ProjectorFamily) -> str:
    """hidden_act; "" if the family has one."""
    found = metadata.file.metadata
    told = next((name for name in ("gelu", "silu") if found.get(f"clip.use_{name}") is True), "")
    return family.activation or told


def _image_size(form: str, size: int) -> Entries:
    square = {"height": size, "width": size}
    if form == "square":
        return {"size": square}
    return {"size": {form: size}, **({"crop_size": square} if form == "shortest_edge" else {})} if form else {}


def _deepstack(file: GGUFFile, layers: int) -> list[int]:
    """The layers whose states are added to those of the text part."""
    found = file.metadata.get(key := "clip.vision.is_deepstack_layers", [])
    if not isinstance(found, list) or len(found) not in (0, layers) or not all(isinstance(one, bool) for one in found):
        raise Metadata(file).wrong(key, found, f"a list of {layers} truth values")
    return [layer for layer, one in enumerate(found) if one]


# --- What does not follow from tables, by model_type ---


class _Parts(NamedTuple):
    config: Entries
    vision: Entries
    text: Entries
    images: Entries
    source: Metadata  # of the text part


def _add_qwen2(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    if sizes["I"] % sizes["H"]:
        raise metadata.wrong("clip.vision.feed_forward_length", sizes["I"], f"a multiple of {sizes['H']}")
    parts.vision["mlp_ratio"] = sizes["I"] // sizes["H"]
    _add_pixels(metadata, sizes, parts)


def _add_qwen2_5(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    each = metadata.positive("clip.vision.n_wa_pattern")
    parts.vision.update(window_size=112, fullatt_block_indexes=[*range(each - 1, sizes["layers"], each)])
    _add_pixels(metadata, sizes, parts)


def _add_qwen3(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    parts.vision["deepstack_visual_indexes"] = _deepstack(metadata.file, sizes["layers"])
    _add_pixels(metadata, sizes, parts)


def _add_pixels(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    """The fewest and the most pixels of an image, if the file tells."""
    least = 1
    for edge, name in (("shortest_edge", "min"), ("longest_edge", "max")):
        pixels = metadata.positive(key := f"clip.vision.image_{name}_pixels", parts.images["size"][edge])
        if pixels > MAX_IMAGE_SIZE**2:
            raise metadata.wrong(key, pixels, f"at most {MAX_IMAGE_SIZE**2}")
        if pixels < least:
            raise metadata.wrong(key, pixels, f"at least {least}")
        least = pixels
        parts.images["size"] = parts.images["size"] | {edge: pixels}


def _add_idefics3(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    longest = metadata.positive(key := "clip.vision.preproc_image_size", sizes["size"])
    if longest > MAX_IMAGE_SIZE:
        raise metadata.wrong(key, longest, f"at most {MAX_IMAGE_SIZE}")
    parts.images.update(size={"longest_edge": longest}, max_image_size={"longest_edge": sizes["size"]})
    parts.config["pad_token_id"] = parts.text.get("pad_token_id")


def _add_llava(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    found = metadata.file.metadata.get(key := "clip.vision.feature_layer", [sizes["layers"]])
    if found not in ([sizes["layers"]], sizes["layers"]):
        raise metadata.wrong(key, found, f"the last layer, {sizes['layers']},")


def _add_llava_next(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    _add_llava(metadata, sizes, parts)
    found = metadata.file.metadata.get(key := "clip.vision.image_grid_pinpoints")
    sides = found if isinstance(found, list) else []
    if not sides or len(sides) % 2 or not all(type(one) is int and 0 < one <= MAX_IMAGE_SIZE for one in sides):
        raise metadata.wrong(key, found, "pairs of pixels")
    pairs = [list(pair) for pair in zip(sides[::2], sides[1::2], strict=True)]
    parts.config["image_grid_pinpoints"] = parts.images["image_grid_pinpoints"] = pairs


def _add_gemma4(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    tensors = metadata.file.tensors
    parts.vision.update(
        position_embedding_size=tensors["v.position_embd.weight"].shape[-2],
        standardize="v.std_bias" in tensors,
        use_clipped_linears="v.blk.0.attn_q.input_min" in tensors,
    )
    sees = parts.text["hidden_size"] not in CAUSAL_GEMMA4
    padding = parts.source.integer(key := "tokenizer.ggml.padding_token_id", 0)  # which images have as further input
    if padding >= parts.text["vocab_size"]:
        raise parts.source.wrong(key, padding, f"less than {parts.text['vocab_size']}")
    parts.text.update(use_bidirectional_attention="vision" if sees else None, pad_token_id=padding)


def _add_gemma4_unified(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    parts.vision["mm_posemb_size"] = metadata.file.tensors["v.position_embd.weight"].shape[-2]
    parts.text["use_bidirectional_attention"] = "vision"


def _add_internvl(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    tensors = metadata.file.tensors
    parts.vision.update(
        image_size=[sizes["size"]] * 2,
        patch_size=[sizes["P"]] * 2,
        attention_bias="v.blk.0.attn_q.bias" in tensors,
        use_qk_norm="v.blk.0.attn_q_norm.weight" in tensors,
        norm_type="layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
    )
    parts.config["downsample_ratio"] = 1 / sizes["merged"]
    least = metadata.positive("clip.vision.preproc_min_tiles", 1)
    most = metadata.positive(key := "clip.vision.preproc_max_tiles", 12)
    if not least <= most <= MAX_TILES:
        raise metadata.wrong(key, most, f"{least} to {MAX_TILES}")
    parts.images.update(min_patches=least, max_patches=most)


def _add_lfm2(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    tensors = metadata.file.tensors
    parts.vision["num_patches"] = tensors["v.position_embd.weight"].shape[0]
    parts.config["projector_hidden_size"] = tensors["mm.1.weight"].shape[0]
    parts.config["projector_use_layernorm"] = "mm.input_norm.weight" in tensors


def _add_llama4(metadata: Metadata, sizes: dict[str, int], parts: _Parts) -> None:
    first, second = (metadata.file.tensors[f"mm.model.mlp.{number}.weight"].shape[0] for number in (1, 2))
    parts.vision.update(
        pixel_shuffle_ratio=1 / sizes["merged"],
        projector_input_dim=first,
        projector_output_dim=second,
        vision_output_dim=second,
    )


_ADDITIONS = {
    **dict.fromkeys(("glm4v", "glm4v_moe"), _add_pixels),
    "gemma4": _add_gemma4,
    "gemma4_unified": _add_gemma4_unified,
    "idefics3": _add_idefics3,
    "internvl": _add_internvl,
    "lfm2_vl": _add_lfm2,
    "llama4": _add_llama4,
    "llava": _add_llava,
    "llava_next": _add_llava_next,
    "qwen2_5_vl": _add_qwen2_5,
    "qwen2_vl": _add_qwen2,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _add_qwen3),
}
