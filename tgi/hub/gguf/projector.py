"""Maps the vision part of a model, which llama.cpp keeps in a file of its own (mmproj), to a multimodal model of
Hugging Face: configuration, tensors, and the files of its processor."""

import math
from typing import Any, NamedTuple

from tgi.hub.gguf.architecture import MAX_LAYERS, Metadata, TargetTensor
from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

PROJECTOR_TYPE = "clip.projector_type"
# What stands for images in the vocabularies.
GEMMA3_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
IDEFICS3_TOKENS = {
    "image_token": "<image>",
    "image_boundary_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}
# Of a layer of SigLIP: the name in the file, the name in the result, rows and columns.
_SIGLIP_LAYER = (
    ("ln1", "layer_norm1", "H", ""),
    ("ln2", "layer_norm2", "H", ""),
    ("attn_q", "self_attn.q_proj", "H", "H"),
    ("attn_k", "self_attn.k_proj", "H", "H"),
    ("attn_v", "self_attn.v_proj", "H", "H"),
    ("attn_out", "self_attn.out_proj", "H", "H"),
    ("ffn_up", "mlp.fc1", "I", "H"),
    ("ffn_down", "mlp.fc2", "H", "I"),
)


class VisionPlan(NamedTuple):
    """What the vision part adds to the directory of a text model."""

    config: dict[str, Any]  # config.json of the whole
    tensors: list[TargetTensor]
    files: dict[str, dict[str, Any]]  # of the processor, by name
    tokens: dict[str, str]  # entries of tokenizer_config.json
    text_prefixes: tuple[str, str]  # of a text model's tensors: what stands for the second in the whole


class Sizes(NamedTuple):
    """Of a tower and of the text part."""

    hidden: int
    inner: int
    layers: int
    size: int  # of an image, in pixels
    patch: int
    merged: int  # patches of a token, squared
    text: int

    @property
    def tokens(self) -> int:
        """Of an image, or of a tile."""
        return (self.size // self.patch // self.merged) ** 2


def plan_vision(file: GGUFFile, text: dict[str, Any], vocabulary: list[str]) -> VisionPlan:
    """Checks that the file has the vision part of a model with this text part, as config.json has it, and vocabulary.
    Raises UserError otherwise."""
    metadata = Metadata(file)
    kind = metadata.string(PROJECTOR_TYPE)
    if (kind, text["model_type"]) not in _PLANS:
        raise UserError(
            f"{file.path} has a projector of type {kind!r} for a model of type {text['model_type']!r}; import "
            "knows those of Gemma 3 and of Idefics 3 (SmolVLM). Move it to another directory to serve the text part "
            "alone, or use the safetensors version."
        )
    sizes = Sizes(
        hidden=metadata.positive("clip.vision.embedding_length"),
        inner=metadata.positive("clip.vision.feed_forward_length"),
        layers=metadata.positive("clip.vision.block_count"),
        size=metadata.positive("clip.vision.image_size"),
        patch=metadata.positive("clip.vision.patch_size"),
        merged=metadata.positive("clip.vision.projector.scale_factor", 4),
        text=text["hidden_size"],
    )
    if sizes.layers > MAX_LAYERS:
        raise metadata.wrong("clip.vision.block_count", sizes.layers, f"at most {MAX_LAYERS}")
    if sizes.size % sizes.patch or not sizes.tokens:
        expected = f"a divisor of {sizes.size} with {sizes.merged} patches a side of a token"
        raise metadata.wrong("clip.vision.patch_size", sizes.patch, expected)
    plan = _PLANS[kind, text["model_type"]](metadata, sizes, text)
    if lacking := set(plan.tokens.values()) - set(vocabulary):
        raise UserError(f"{file.path} has images, for which the vocabulary of the text part lacks {min(lacking)!r}.")
    ids = {key: vocabulary.index(token) for key, token in plan.config.items() if token in plan.tokens.values()}
    plan.config.update(
        ids,
        dtype=text["dtype"],
        tie_word_embeddings=text["tie_word_embeddings"],
        text_config=text,
        vision_config=plan.config["vision_config"] | _vision_config(metadata, sizes),
        **{name: text[name] for name in ("bos_token_id", "eos_token_id") if name in text},
    )
    plan.files["preprocessor_config.json"].update(
        image_mean=_three(metadata, "clip.vision.image_mean"), image_std=_three(metadata, "clip.vision.image_std")
    )
    unknown = set(file.tensors) - {tensor.source for tensor in plan.tensors}
    if unknown:
        raise UserError(f"{file.path} has tensors that {kind} does not use, such as {min(unknown)!r}.")
    for tensor in plan.tensors:
        found = file.tensors.get(tensor.source)
        if found is None or found.shape != tensor.stored:
            shape = "no tensor" if found is None else f"{list(found.shape)} in the tensor"
            raise UserError(
                f"{file.path} has {shape} {tensor.source!r}, where {list(tensor.stored)} was expected. Fetch or "
                "convert it again."
            )
    return plan


def _vision_config(metadata: Metadata, sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": metadata.positive("clip.vision.attention.head_count"),
        "image_size": sizes.size,
        "patch_size": sizes.patch,
        "layer_norm_eps": metadata.number("clip.vision.attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _plan_gemma3(metadata: Metadata, sizes: Sizes, text: dict[str, Any]) -> VisionPlan:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": GEMMA3_TOKENS["image_token"],
        "boi_token_index": GEMMA3_TOKENS["boi_token"],
        "eoi_token_index": GEMMA3_TOKENS["eoi_token"],
        "mm_tokens_per_image": sizes.tokens,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
    }
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": sizes.size, "width": sizes.size},
        "image_seq_length": sizes.tokens,
    }
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": sizes.tokens},
    }
    projector, shape = "multi_modal_projector.mm_", (sizes.hidden,)
    wanted = [
        *_tower(metadata.file, sizes, "vision_tower."),
        TargetTensor("mm.input_projection.weight", f"{projector}input_projection_weight", (*shape, sizes.text)),
        TargetTensor("mm.soft_emb_norm.weight", f"{projector}soft_emb_norm.weight", shape, shift=1.0),
    ]
    return VisionPlan(config, wanted, files, GEMMA3_TOKENS, ("language_model.", ""))


def _plan_idefics3(metadata: Metadata, sizes: Sizes, text: dict[str, Any]) -> VisionPlan:
    """Also of SmolVLM, whose processor and layers do the same with images."""
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": IDEFICS3_TOKENS["image_token"],
        "scale_factor": sizes.merged,
        "pad_token_id": text.get("pad_token_id"),
        "vision_config": {"model_type": "idefics3_vision"},
    }
    longest = metadata.positive("clip.vision.preproc_image_size", sizes.size)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": sizes.size},
    }
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": images,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": sizes.tokens},
    }
    shape = sizes.text, sizes.hidden * sizes.merged**2
    wanted = [
        *_tower(metadata.file, sizes, "model.vision_model."),
        TargetTensor("mm.model.fc.weight", "model.connector.modality_projection.proj.weight", shape),
    ]
    return VisionPlan(config, wanted, files, IDEFICS3_TOKENS, ("model.text_model.", "model."))


# By the type of the projector, and the model_type of the text part.
_PLANS = {("gemma3", "gemma3_text"): _plan_gemma3, ("idefics3", "llama"): _plan_idefics3}


def _three(metadata: Metadata, key: str) -> list[float]:
    value = metadata.file.metadata.get(key)
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, float) for one in value):
        raise metadata.wrong(key, value, "a list of three numbers")
    if not all(math.isfinite(one) for one in value) or (key.endswith("std") and min(value) <= 0):
        raise metadata.wrong(key, value, "finite numbers, and positive deviations,")
    return [float(f"{one:.7g}") for one in value]


def _tower(file: GGUFFile, of: Sizes, tower: str) -> list[TargetTensor]:
    """Those of SigLIP, whose names in the result begin with `tower`."""
    hidden, inner, patch, sizes = of.hidden, of.inner, of.patch, {"H": of.hidden, "I": of.inner}
    patches = (of.size // patch) ** 2
    wanted = [
        TargetTensor("v.patch_embd.weight", f"{tower}embeddings.patch_embedding.weight", (hidden, 3, patch, patch)),
        TargetTensor("v.patch_embd.bias", f"{tower}embeddings.patch_embedding.bias", (hidden,)),
        TargetTensor("v.position_embd.weight", f"{tower}embeddings.position_embedding.weight", (patches, hidden)),
        TargetTensor("v.post_ln.weight", f"{tower}post_layernorm.weight", (hidden,)),
        TargetTensor("v.post_ln.bias", f"{tower}post_layernorm.bias", (hidden,)),
    ]
    # Earlier converters gave the two matrices of an MLP each other's names.
    first = file.tensors.get("v.blk.0.ffn_up.weight")
    swapped = inner != hidden and first is not None and first.shape == (hidden, inner)
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    for layer in range(of.layers):
        for source, name, rows, columns in _SIGLIP_LAYER:
            stored, made = f"v.blk.{layer}.{names.get(source, source)}", f"{tower}encoder.layers.{layer}.{name}"
            shape = tuple(sizes[one] for one in (rows, columns) if one)
            wanted.append(TargetTensor(f"{stored}.weight", f"{made}.weight", shape))
            wanted.append(TargetTensor(f"{stored}.bias", f"{made}.bias", shape[:1]))
    return wanted
