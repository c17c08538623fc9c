"""Maps the vision part of a model, which llama.cpp keeps in a file of its own (mmproj), to a multimodal model of
Hugging Face: configuration, tensors, and the files of its processor."""

import math
from typing import Any, NamedTuple

from tgi.hub.gguf.architecture import MAX_LAYERS, Metadata, TargetTensor
from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

PROJECTOR_TYPE = "clip.projector_type"
# What stands for images in the vocabulary of Gemma 3.
GEMMA3_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
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


def plan_vision(file: GGUFFile, text: dict[str, Any], vocabulary: list[str]) -> VisionPlan:
    """Checks that the file has the vision part of a model with this text part, as config.json has it, and vocabulary.
    Raises UserError otherwise."""
    metadata = Metadata(file)
    kind = metadata.string(PROJECTOR_TYPE)
    if (kind, text["model_type"]) != ("gemma3", "gemma3_text"):
        raise UserError(
            f"{file.path} has a projector of type {kind!r} for a model of type {text['model_type']!r}; import "
            "knows that of Gemma 3. Move it to another directory to serve the text part alone, or use the safetensors "
            "version."
        )
    hidden, layers = metadata.positive("clip.vision.embedding_length"), metadata.positive("clip.vision.block_count")
    size, patch = metadata.positive("clip.vision.image_size"), metadata.positive("clip.vision.patch_size")
    inner = metadata.positive("clip.vision.feed_forward_length")
    if layers > MAX_LAYERS:
        raise metadata.wrong("clip.vision.block_count", layers, f"at most {MAX_LAYERS}")
    merged = metadata.positive("clip.vision.projector.scale_factor", 4)  # patches of a token, squared
    tokens = (size // patch // merged) ** 2
    if size % patch or not tokens:
        raise metadata.wrong(
            "clip.vision.patch_size", patch, f"a divisor of {size} with {merged} patches a side of a token"
        )
    if lacking := set(GEMMA3_TOKENS.values()) - set(vocabulary):
        raise UserError(f"{file.path} has images, for which the vocabulary of the text part lacks {min(lacking)!r}.")
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.positive("clip.vision.attention.head_count"),
        "image_size": size,
        "patch_size": patch,
        "layer_norm_eps": metadata.number("clip.vision.attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }
    ids = {name: vocabulary.index(token) for name, token in GEMMA3_TOKENS.items()}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{f"{name}_index": number for name, number in ids.items() if name != "image_token"},
        "image_token_index": ids["image_token"],
        "mm_tokens_per_image": tokens,
        "text_config": text,
        "vision_config": vision,
    }
    config |= {name: text[name] for name in ("bos_token_id", "eos_token_id") if name in text}
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        "image_mean": _three(metadata, "clip.vision.image_mean"),
        "image_std": _three(metadata, "clip.vision.image_std"),
        "image_seq_length": tokens,
    }
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": tokens},
    }
    wanted = _tensors(file, hidden, inner, layers, (size // patch) ** 2, patch, text["hidden_size"])
    unknown = set(file.tensors) - {tensor.source for tensor in wanted}
    if unknown:
        raise UserError(f"{file.path} has tensors that Gemma 3 does not use, such as {min(unknown)!r}.")
    for tensor in wanted:
        found = file.tensors.get(tensor.source)
        if found is None or found.shape != tensor.stored:
            shape = "no tensor" if found is None else f"{list(found.shape)} in the tensor"
            raise UserError(
                f"{file.path} has {shape} {tensor.source!r}, where {list(tensor.stored)} was expected. Fetch or "
                "convert it again."
            )
    return VisionPlan(config, wanted, files, GEMMA3_TOKENS)


def _three(metadata: Metadata, key: str) -> list[float]:
    value = metadata.file.metadata.get(key)
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, float) for one in value):
        raise metadata.wrong(key, value, "a list of three numbers")
    if not all(math.isfinite(one) for one in value) or (key.endswith("std") and min(value) <= 0):
        raise metadata.wrong(key, value, "finite numbers, and positive deviations,")
    return [float(f"{one:.7g}") for one in value]


def _tensors(
    file: GGUFFile, hidden: int, inner: int, layers: int, patches: int, patch: int, text_hidden: int
) -> list[TargetTensor]:
    tower, sizes = "vision_tower.", {"H": hidden, "I": inner}
    wanted = [
        TargetTensor("v.patch_embd.weight", f"{tower}embeddings.patch_embedding.weight", (hidden, 3, patch, patch)),
        TargetTensor("v.patch_embd.bias", f"{tower}embeddings.patch_embedding.bias", (hidden,)),
        TargetTensor("v.position_embd.weight", f"{tower}embeddings.position_embedding.weight", (patches, hidden)),
        TargetTensor("v.post_ln.weight", f"{tower}post_layernorm.weight", (hidden,)),
        TargetTensor("v.post_ln.bias", f"{tower}post_layernorm.bias", (hidden,)),
        TargetTensor(
            "mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden)
        ),
        TargetTensor("mm.soft_emb_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight", (hidden,), shift=1.0),
    ]
    # Earlier converters gave the two matrices of an MLP each other's names.
    first = file.tensors.get("v.blk.0.ffn_up.weight")
    swapped = inner != hidden and first is not None and first.shape == (hidden, inner)
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    for layer in range(layers):
        for source, name, rows, columns in _SIGLIP_LAYER:
            stored, made = f"v.blk.{layer}.{names.get(source, source)}", f"{tower}encoder.layers.{layer}.{name}"
            shape = tuple(sizes[one] for one in (rows, columns) if one)
            wanted.append(TargetTensor(f"{stored}.weight", f"{made}.weight", shape))
            wanted.append(TargetTensor(f"{stored}.bias", f"{made}.bias", shape[:1]))
    return wanted
