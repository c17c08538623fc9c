"""The vision parts that import knows, as data: as llama.cpp's convert_hf_to_gguf.py writes them, and as its tools/mtmd
reads what that omits. To add one, add an entry to FAMILIES.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple


class VisionTensor(NamedTuple):
    """A tensor of a vision part. "{}" is the number of a layer.

    Shapes name sizes, or products of them: H hidden state and I MLP of the tower, D a head, P a patch's side, N patches
    of an image, N1 these and the class, S patches of a token, T hidden state of the text part; "?" is what the file
    has. `stored` is the shape in the file, if it is another one. The numbers of several tensors of the file, which "+"
    separates, follow each other; of names that "|" separates the file has one. Where `axes` are set, the tensor of the
    result is that of the file, or several stacked ones, in the shape `view` with its axes in this order."""

    source: str
    name: str
    shape: str
    stored: str = ""
    view: str = ""  # or `stored`
    axes: tuple[int, ...] = ()
    permuted: bool = False  # rows of each head, as those of a llama
    shift: float = 0.0
    optional: bool = False  # files without it are of models without it


def _weight(source: str, name: str, shape: str, **more: Any) -> tuple[VisionTensor, ...]:
    sources = "+".join(f"{one}.weight" for one in source.split("+"))
    return (VisionTensor(sources, f"{name}.weight", shape, **more),)


def _linear(
    source: str, name: str, shape: str, stored: str = "", *, optional: bool = False
) -> tuple[VisionTensor, ...]:
    """With a bias."""
    biases = "+".join(f"{one}.bias" for one in source.split("+"))
    bias = VisionTensor(biases, f"{name}.bias", shape.split()[0], stored.partition(" ")[0], optional=optional)
    return (*_weight(source, name, shape, stored=stored, optional=optional), bias)


@dataclass(frozen=True)
class ProjectorFamily:
    """A kind of vision part."""

    model_type: str
    architecture: str
    text_prefixes: tuple[str, str]  # of a text model's tensors: what stands for the second in the whole
    layers: tuple[VisionTensor, ...]
    others: tuple[VisionTensor, ...]
    tokens: Mapping[str, str]  # entries of tokenizer_config.json
    token_ids: Mapping[str, str]  # keys of config.json: tokens
    image_processor: str  # its class
    processor: str
    sizes: Mapping[str, str]  # keys of vision_config: sizes
    text_type: str = ""  # the model_type of the text part in the whole, if it is not that of a text model
    vision: Mapping[str, Any] = field(default_factory=dict)  # further entries of vision_config
    config: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    images: Mapping[str, Any] = field(default_factory=dict)  # of preprocessor_config.json
    processing: Mapping[str, Any] = field(default_factory=dict)  # of processor_config.json
    # Keys of config.json, of preprocessor_config.json and of processor_config.json: sizes.
    config_sizes: Mapping[str, str] = field(default_factory=dict)
    image_sizes: Mapping[str, str] = field(default_factory=dict)
    processing_sizes: Mapping[str, str] = field(default_factory=dict)
    size: str = ""  # the form of preprocessor_config.json's `size`: "square", "shortest_edge" or "longest_edge"
    epsilon: str = "layer_norm_eps"  # the key of vision_config; "" if the model has none
    activation: str = ""  # of vision_config, in place of what the file tells
    merged: int = 1  # patches of a token, squared, if the file does not tell
    rope: bool = False  # positions of the text part have three axes
    square: bool = True  # images, or tiles, have one size
    unused: tuple[str, ...] = ()  # prefixes of tensors


_ATTENTION = (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"))
_SIGLIP_LAYER = (
    *_linear("v.blk.{}.ln1", "encoder.layers.{}.layer_norm1", "H"),
    *_linear("v.blk.{}.ln2", "encoder.layers.{}.layer_norm2", "H"),
    *(
        one
        for short, name in _ATTENTION
        for one in _linear(f"v.blk.{{}}.attn_{short}", f"encoder.layers.{{}}.self_attn.{name}", "H H")
    ),
    *_linear("v.blk.{}.attn_out", "encoder.layers.{}.self_attn.out_proj", "H H"),
    *_linear("v.blk.{}.ffn_up", "encoder.layers.{}.mlp.fc1", "I H"),
    *_linear("v.blk.{}.ffn_down", "encoder.layers.{}.mlp.fc2", "H I"),
)
_SIGLIP = (
    *_linear("v.patch_embd", "embeddings.patch_embedding", "H 3 P P"),
    *_weight("v.position_embd", "embeddings.position_embedding", "N H"),
    *_linear("v.post_ln", "post_layernorm", "H"),
)
_CLIP = (
    *_weight("v.patch_embd", "embeddings.patch_embedding", "H 3 P P"),
    VisionTensor("v.class_embd", "embeddings.class_embedding", "H"),
    *_weight("v.position_embd", "embeddings.position_embedding", "N1 H"),
    *_linear("v.pre_ln", "pre_layrnorm", "H"),
    *_linear("v.pre_ln", "post_layernorm", "H"),  # not computed, so that the file lacks it
)
_TOWER = {
    "hidden_size": "H",
    "intermediate_size": "I",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "image_size": "size",
    "patch_size": "P",
}
_TANH = "gelu_pytorch_tanh"


def _under(prefix: str, tensors: tuple[VisionTensor, ...]) -> tuple[VisionTensor, ...]:
    return tuple(one._replace(name=prefix + one.name) for one in tensors)


# Of Qwen's towers, whose patches are those of two frames.
_FRAMES = VisionTensor(
    *("v.patch_embd.weight+v.patch_embd.weight.1", "patch_embed.proj.weight", "H 3 2 P P", "H 3 P P"),
    *("2 H 3 P P", (1, 2, 0, 3, 4)),
)
_QKV = "v.blk.{}.attn_q+v.blk.{}.attn_k+v.blk.{}.attn_v"
_QWEN_MERGER = (
    *_linear("mm.0", "merger.mlp.0", "S*H S*H"),
    *_linear("mm.2", "merger.mlp.2", "T S*H"),
)
_QWEN_TOWER = {"depth": "layers", "num_heads": "heads", "patch_size": "P", "spatial_merge_size": "merged"}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_FRAME_PIXELS = {"temporal_patch_size": 2}
_MERGED_PATCHES = {"patch_size": "P", "merge_size": "merged"}
_QWEN2_VL = ProjectorFamily(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    ("", ""),
    _under(
        "visual.",
        (
            *_linear("v.blk.{}.ln1", "blocks.{}.norm1", "H"),
            *_linear("v.blk.{}.ln2", "blocks.{}.norm2", "H"),
            *_linear(_QKV, "blocks.{}.attn.qkv", "3*H H", stored="H H"),
            *_linear("v.blk.{}.attn_out", "blocks.{}.attn.proj", "H H"),
            *_linear("v.blk.{}.ffn_up", "blocks.{}.mlp.fc1", "I H"),
            *_linear("v.blk.{}.ffn_down", "blocks.{}.mlp.fc2", "H I"),
        ),
    ),
    _under("visual.", (_FRAMES, *_linear("v.post_ln", "merger.ln_q", "H"), *_QWEN_MERGER)),
    _QWEN_TOKENS,
    _QWEN_IDS,
    "Qwen2VLImageProcessor",
    "Qwen2VLProcessor",
    _QWEN_TOWER | {"embed_dim": "H", "hidden_size": "T"},
    text_type="qwen2_vl_text",
    vision=_FRAME_PIXELS,
    images={"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}, **_FRAME_PIXELS},
    image_sizes=_MERGED_PATCHES,
    activation="quick_gelu",
    epsilon="",
    merged=2,
    rope=True,
    square=False,
)
_QWEN3_VL = ProjectorFamily(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    ("model.language_model.", "model."),
    _under(
        "model.visual.",
        (
            *_linear("v.blk.{}.ln1", "blocks.{}.norm1", "H"),
            *_linear("v.blk.{}.ln2", "blocks.{}.norm2", "H"),
            *_linear("v.blk.{}.attn_qkv", "blocks.{}.attn.qkv", "3*H H"),
            *_linear("v.blk.{}.attn_out", "blocks.{}.attn.proj", "H H"),
            *_linear("v.blk.{}.ffn_up", "blocks.{}.mlp.linear_fc1", "I H"),
            *_linear("v.blk.{}.ffn_down", "blocks.{}.mlp.linear_fc2", "H I"),
        ),
    ),
    _under(
        "model.visual.",
        (
            _FRAMES,
            VisionTensor("v.patch_embd.bias", "patch_embed.proj.bias", "H"),
            *_weight("v.position_embd", "pos_embed", "N H"),
            *_linear("v.post_ln", "merger.norm", "H"),
            *_linear("mm.0", "merger.linear_fc1", "S*H S*H"),
            *_linear("mm.2", "merger.linear_fc2", "T S*H"),
        ),
    ),
    {**_QWEN_TOKENS, "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    _QWEN_IDS,
    "Qwen2VLImageProcessor",
    "Qwen3VLProcessor",
    _QWEN_TOWER
    | {"hidden_size": "H", "intermediate_size": "I", "out_hidden_size": "T", "num_position_embeddings": "N"},
    text_type="qwen3_vl_text",
    vision=_FRAME_PIXELS,
    images={"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}, **_FRAME_PIXELS},
    image_sizes=_MERGED_PATCHES,
    activation=_TANH,
    epsilon="",
    merged=2,
    rope=True,
    square=False,
)
# Of a layer of Qwen3-VL whose states are added to the text part's; the second number is that among such layers.
DEEPSTACK = _under(
    "model.visual.deepstack_merger_list.",
    (
        *_linear("v.deepstack.{}.norm", "{}.norm", "S*H"),
        *_linear("v.deepstack.{}.fc1", "{}.linear_fc1", "S*H S*H"),
        *_linear("v.deepstack.{}.fc2", "{}.linear_fc2", "T S*H"),
    ),
)

_LLAVA_PREFIXES = ("language_model.", "")
_PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_PIXTRAL = ProjectorFamily(
    "llava",
    "LlavaForConditionalGeneration",
    _LLAVA_PREFIXES,
    _under(
        "vision_tower.transformer.",
        (
            *_weight("v.blk.{}.ln1", "layers.{}.attention_norm", "H"),
            *_weight("v.blk.{}.ln2", "layers.{}.ffn_norm", "H"),
            *_weight("v.blk.{}.attn_q", "layers.{}.attention.q_proj", "H H", permuted=True),
            *_weight("v.blk.{}.attn_k", "layers.{}.attention.k_proj", "H H", permuted=True),
            *_weight("v.blk.{}.attn_v", "layers.{}.attention.v_proj", "H H"),
            *_weight("v.blk.{}.attn_out", "layers.{}.attention.o_proj", "H H"),
            *_weight("v.blk.{}.ffn_gate", "layers.{}.feed_forward.gate_proj", "I H"),
            *_weight("v.blk.{}.ffn_up", "layers.{}.feed_forward.up_proj", "I H"),
            *_weight("v.blk.{}.ffn_down", "layers.{}.feed_forward.down_proj", "H I"),
        ),
    ),
    (
        *_weight("v.patch_embd", "vision_tower.patch_conv", "H 3 P P"),
        *_weight("v.pre_ln", "vision_tower.ln_pre", "H"),
        *_linear("mm.1", "multi_modal_projector.linear_1", "T H"),
        *_linear("mm.2", "multi_modal_projector.linear_2", "T T"),
    ),
    _PIXTRAL_TOKENS,
    {"image_token_index": "[IMG]"},
    "PixtralImageProcessor",
    "PixtralProcessor",
    _TOWER | {"head_dim": "D"},
    vision={"model_type": "pixtral"},
    config={
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    image_sizes={"patch_size": "P"},
    processing=_PIXTRAL_TOKENS,
    processing_sizes={"patch_size": "P", "spatial_merge_size": "merged"},
    size="longest_edge",
    epsilon="",
    square=False,
    unused=("v.token_embd.img_break",),  # a row of the text part's embedding
)
_LLAVA = ProjectorFamily(
    "llava",
    "LlavaForConditionalGeneration",
    _LLAVA_PREFIXES,
    _under("vision_tower.", _SIGLIP_LAYER),
    (
        *_under("vision_tower.", _CLIP),
        *_linear("mm.0", "multi_modal_projector.linear_1", "T H"),
        *_linear("mm.2", "multi_modal_projector.linear_2", "T T"),
    ),
    {"image_token": "<image>"},
    {"image_token_index": "<image>"},
    "CLIPImageProcessor",
    "LlavaProcessor",
    _TOWER,
    vision={"model_type": "clip_vision_model", "hidden_act": "quick_gelu"},
    config={
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,  # files have no layers behind that
        "vision_feature_select_strategy": "default",
    },
    processing={"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    processing_sizes={"patch_size": "P"},
    size="shortest_edge",
)

_GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_GEMMA4 = ProjectorFamily(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    ("model.language_model.", "model."),
    _under(
        "model.vision_tower.encoder.layers.{}.",
        (
            *_weight("v.blk.{}.ln1", "input_layernorm", "H"),
            *_weight("v.blk.{}.attn_post_norm", "post_attention_layernorm", "H"),
            *_weight("v.blk.{}.ln2", "pre_feedforward_layernorm", "H"),
            *_weight("v.blk.{}.ffn_post_norm", "post_feedforward_layernorm", "H"),
            *_weight("v.blk.{}.attn_q_norm", "self_attn.q_norm", "D"),
            *_weight("v.blk.{}.attn_k_norm", "self_attn.k_norm", "D"),
            *(
                one
                for short, name, shape in (
                    *((f"attn_{short}", f"self_attn.{name}", "H H") for short, name in _ATTENTION),
                    ("attn_out", "self_attn.o_proj", "H H"),
                    ("ffn_gate", "mlp.gate_proj", "I H"),
                    ("ffn_up", "mlp.up_proj", "I H"),
                    ("ffn_down", "mlp.down_proj", "H I"),
                )
                for one in (
                    *_weight(f"v.blk.{{}}.{short}", f"{name}.linear", shape),
                    *(
                        VisionTensor(f"v.blk.{{}}.{short}.{end}", f"{name}.{end}", "", "1", optional=True)
                        for end in ("input_min", "input_max", "output_min", "output_max")
                    ),
                )
            ),
        ),
    ),
    (
        VisionTensor(
            *("v.patch_embd.weight", "model.vision_tower.patch_embedder.input_proj.weight", "H 3*P*P", "H 3 P P", ""),
            (0, 2, 3, 1),
        ),
        VisionTensor("v.position_embd.weight", "model.vision_tower.patch_embedder.position_embedding_table", "2 ? H"),
        VisionTensor("v.std_bias", "model.vision_tower.std_bias", "H", optional=True),
        VisionTensor("v.std_scale", "model.vision_tower.std_scale", "H", optional=True),
        *_weight("mm.input_projection", "model.embed_vision.embedding_projection", "T H"),
    ),
    _GEMMA4_TOKENS,
    {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "audio_token_id": "<|audio|>",
    },
    "Gemma4ImageProcessor",
    "Gemma4Processor",
    {key: size for key, size in _TOWER.items() if key != "image_size"}
    | {"num_key_value_heads": "heads", "head_dim": "D", "pooling_kernel_size": "merged"},
    vision={"hidden_activation": _TANH},
    config={"audio_config": None},
    images={"do_normalize": False, "max_soft_tokens": 280},
    image_sizes={"patch_size": "P", "pooling_kernel_size": "merged"},
    processing={"image_seq_length": 280},
    epsilon="rms_norm_eps",
    merged=3,
    square=False,
    unused=("a.", "mm.a."),  # of audio
)
_GLM4V = ProjectorFamily(
    "glm4v",
    "Glm4vForConditionalGeneration",
    ("model.language_model.", "model."),
    _under(
        "model.visual.blocks.{}.",
        (
            *_weight("v.blk.{}.ln1", "norm1", "H"),
            *_weight("v.blk.{}.ln2", "norm2", "H"),
            *_weight("v.blk.{}.attn_qkv", "attn.qkv", "3*H H"),
            *_weight("v.blk.{}.attn_out", "attn.proj", "H H"),
            *_weight("v.blk.{}.ffn_gate", "mlp.gate_proj", "T H"),
            *_weight("v.blk.{}.ffn_up", "mlp.up_proj", "T H"),
            *_weight("v.blk.{}.ffn_down", "mlp.down_proj", "H T"),
        ),
    ),
    _under(
        "model.visual.",
        (
            _FRAMES,
            VisionTensor("v.patch_embd.bias", "patch_embed.proj.bias", "H"),
            *_weight("v.position_embd", "embeddings.position_embedding", "N H"),
            *_weight("v.norm_embd", "post_conv_layernorm", "H"),
            *_weight("v.post_ln", "post_layernorm", "H"),
            *_linear("mm.patch_merger", "downsample", "T H 2 2"),
            *_weight("mm.model.fc", "merger.proj", "T T"),
            *_linear("mm.post_norm", "merger.post_projection_norm", "T"),
            *_weight("mm.gate", "merger.gate_proj", "I T"),
            *_weight("mm.up", "merger.up_proj", "I T"),
            *_weight("mm.down", "merger.down_proj", "T I"),
        ),
    ),
    {"image_token": "<|image|>", "video_token": "<|video|>"},
    {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    "Glm4vImageProcessor",
    "Glm4vProcessor",
    _QWEN_TOWER | {"hidden_size": "H", "intermediate_size": "I", "out_hidden_size": "T", "image_size": "size"},
    text_type="glm4v_text",
    vision=_FRAME_PIXELS,
    images={"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}, **_FRAME_PIXELS},
    image_sizes=_MERGED_PATCHES,
    epsilon="rms_norm_eps",
    merged=2,
    rope=True,
    square=False,
)
GEMMA3_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_GEMMA3 = ProjectorFamily(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    _LLAVA_PREFIXES,
    _under("vision_tower.", _SIGLIP_LAYER),
    (
        *_under("vision_tower.", _SIGLIP),
        VisionTensor("mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight", "H T"),
        VisionTensor("mm.soft_emb_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight", "H", shift=1.0),
    ),
    GEMMA3_TOKENS,
    {f"{key}_index": token for key, token in GEMMA3_TOKENS.items()},
    "Gemma3ImageProcessor",
    "Gemma3Processor",
    _TOWER,
    vision={"model_type": "siglip_vision_model", "vision_use_head": False},
    config_sizes={"mm_tokens_per_image": "tokens"},
    image_sizes={"image_seq_length": "tokens"},
    processing_sizes={"image_seq_length": "tokens"},
    size="square",
    activation=_TANH,
    merged=4,
)
_IDEFICS3 = ProjectorFamily(  # also SmolVLM, whose processor and layers do the same with images
    "idefics3",
    "Idefics3ForConditionalGeneration",
    ("model.text_model.", "model."),
    _under("model.vision_model.", _SIGLIP_LAYER),
    (
        *_under("model.vision_model.", _SIGLIP),
        *_weight("mm.model.fc", "model.connector.modality_projection.proj", "T S*H"),
    ),
    {
        "image_token": "<image>",
        "image_boundary_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    },
    {"image_token_id": "<image>"},
    "Idefics3ImageProcessor",
    "Idefics3Processor",
    _TOWER,
    vision={"model_type": "idefics3_vision"},
    config_sizes={"scale_factor": "merged"},
    processing_sizes={"image_seq_len": "tokens"},
    activation=_TANH,
    merged=4,
)
_INTERNVL = ProjectorFamily(
    "internvl",
    "InternVLForConditionalGeneration",
    _LLAVA_PREFIXES,
    _under(
        "vision_tower.encoder.layer.{}.",
        (
            *_linear("v.blk.{}.ln1", "layernorm_before", "H"),
            *_linear("v.blk.{}.ln2", "layernorm_after", "H"),
            *(
                one
                for short, name in _ATTENTION
                for one in (
                    *_weight(f"v.blk.{{}}.attn_{short}", f"attention.{name}", "H H"),
                    VisionTensor(f"v.blk.{{}}.attn_{short}.bias", f"attention.{name}.bias", "H", optional=True),
                )
            ),
            *_weight("v.blk.{}.attn_q_norm", "attention.q_norm", "H", optional=True),
            *_weight("v.blk.{}.attn_k_norm", "attention.k_norm", "H", optional=True),
            *_linear("v.blk.{}.attn_out", "attention.projection_layer", "H H"),
            *_linear("v.blk.{}.ffn_up", "mlp.fc1", "I H"),
            *_linear("v.blk.{}.ffn_down", "mlp.fc2", "H I"),
            VisionTensor("v.blk.{}.ls1.weight", "lambda_1", "H"),
            VisionTensor("v.blk.{}.ls2.weight", "lambda_2", "H"),
        ),
    ),
    (
        *_linear("v.patch_embd", "vision_tower.embeddings.patch_embeddings.projection", "H 3 P P"),
        VisionTensor("v.class_embd", "vision_tower.embeddings.cls_token", "1 1 H"),
        VisionTensor("v.position_embd.weight", "vision_tower.embeddings.position_embeddings", "1 N1 H"),
        *_linear("mm.model.mlp.0", "multi_modal_projector.layer_norm", "S*H"),
        *_linear("mm.model.mlp.1", "multi_modal_projector.linear_1", "T S*H"),
        *_linear("mm.model.mlp.3", "multi_modal_projector.linear_2", "T T"),
    ),
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "</img>",  # which the processor asks for, and does not meet
    },
    {"image_token_id": "<IMG_CONTEXT>"},
    "GotOcr2ImageProcessor",
    "InternVLProcessor",
    _TOWER,
    config_sizes={"image_seq_length": "tokens"},
    images={"crop_to_patches": True},
    processing_sizes={"image_seq_length": "tokens"},
    size="square",
    merged=2,
)
_LFM2_VL = ProjectorFamily(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    ("model.language_model.", "model."),
    _under("model.vision_tower.", _SIGLIP_LAYER),
    (
        VisionTensor(
            *("v.patch_embd.weight", "model.vision_tower.embeddings.patch_embedding.weight", "H 3*P*P", "H 3 P P", ""),
            (0, 2, 3, 1),
        ),
        VisionTensor("v.patch_embd.bias", "model.vision_tower.embeddings.patch_embedding.bias", "H"),
        *_weight("v.position_embd", "model.vision_tower.embeddings.position_embedding", "? H"),
        *_under("model.vision_tower.", _SIGLIP[3:]),
        *_linear("mm.input_norm", "model.multi_modal_projector.layer_norm", "S*H", optional=True),
        *_linear("mm.1", "model.multi_modal_projector.linear_1", "? S*H"),
        *_linear("mm.2", "model.multi_modal_projector.linear_2", "T ?"),
    ),
    {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    {"image_token_id": "<image>"},
    "Lfm2VlImageProcessorFast",
    "Lfm2VlProcessor",
    {key: size for key, size in _TOWER.items() if key != "image_size"},
    vision={"model_type": "siglip2_vision_model", "vision_use_head": False},
    config={"projector_bias": True},
    config_sizes={"downsample_factor": "merged"},
    image_sizes={"encoder_patch_size": "P", "downsample_factor": "merged"},
    activation=_TANH,
    merged=2,
)
_LLAMA4 = ProjectorFamily(
    "llama4",
    "Llama4ForConditionalGeneration",
    _LLAVA_PREFIXES,
    _under(
        "vision_model.model.layers.{}.",
        (
            *_linear("v.blk.{}.ln1", "input_layernorm", "H"),
            *(
                VisionTensor(
                    f"v.blk.{{}}.ln2.{end}|v.blk.{{}}.attn_post_norm.{end}", f"post_attention_layernorm.{end}", "H"
                )
                for end in ("weight", "bias")
            ),
            *(
                one
                for short, name in _ATTENTION
                for one in _linear(f"v.blk.{{}}.attn_{short}", f"self_attn.{name}", "H H")
            ),
            *_linear("v.blk.{}.attn_out", "self_attn.o_proj", "H H"),
            *_linear("v.blk.{}.ffn_up", "mlp.fc1", "I H"),
            *_linear("v.blk.{}.ffn_down", "mlp.fc2", "H I"),
        ),
    ),
    (
        *_weight("v.patch_embd", "vision_model.patch_embedding.linear", "H 3*P*P"),
        VisionTensor("v.class_embd", "vision_model.class_embedding", "H"),
        VisionTensor("v.position_embd.weight", "vision_model.positional_embedding_vlm", "N1 H"),
        *_linear("v.pre_ln", "vision_model.layernorm_pre", "H"),
        *_linear("v.post_ln", "vision_model.layernorm_post", "H"),
        *_weight("mm.model.mlp.1", "vision_model.vision_adapter.mlp.fc1", "? I"),
        *_weight("mm.model.mlp.2", "vision_model.vision_adapter.mlp.fc2", "? ?"),
        *_weight("mm.model.fc", "multi_modal_projector.linear_1", "T ?"),
    ),
    {"image_token": "<|image|>"},
    {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
    "Llama4ImageProcessorFast",
    "Llama4Processor",
    _TOWER,
    images={"max_patches": 16},
    processing_sizes={"patch_size": "P"},
    size="square",
    epsilon="norm_eps",
    merged=2,
)

# By the type of the projector, and the model_type of the text part, "" for any.
FAMILIES: Mapping[tuple[str, str], ProjectorFamily] = MappingProxyType(
    {
        ("gemma3", "gemma3_text"): _GEMMA3,
        ("idefics3", "llama"): _IDEFICS3,
        ("qwen2vl_merger", "qwen2"): _QWEN2_VL,
        ("qwen2.5vl_merger", "qwen2"): replace(
            _QWEN2_VL,
            model_type="qwen2_5_vl",
            architecture="Qwen2_5_VLForConditionalGeneration",
            text_type="qwen2_5_vl_text",
            layers=_under(
                "visual.",
                (
                    *_weight("v.blk.{}.ln1", "blocks.{}.norm1", "H"),
                    *_weight("v.blk.{}.ln2", "blocks.{}.norm2", "H"),
                    *_linear(_QKV, "blocks.{}.attn.qkv", "3*H H", stored="H H"),
                    *_linear("v.blk.{}.attn_out", "blocks.{}.attn.proj", "H H"),
                    *_linear("v.blk.{}.ffn_gate", "blocks.{}.mlp.gate_proj", "I H"),
                    *_linear("v.blk.{}.ffn_up", "blocks.{}.mlp.up_proj", "I H"),
                    *_linear("v.blk.{}.ffn_down", "blocks.{}.mlp.down_proj", "H I"),
                ),
            ),
            others=_under("visual.", (_FRAMES, *_weight("v.post_ln", "merger.ln_q", "H"), *_QWEN_MERGER)),
            processor="Qwen2_5_VLProcessor",
            activation="silu",
            sizes=_QWEN_TOWER | {"hidden_size": "H", "intermediate_size": "I", "out_hidden_size": "T"},
        ),
        ("qwen3vl_merger", "qwen3"): _QWEN3_VL,
        ("qwen3vl_merger", "qwen3_moe"): replace(
            _QWEN3_VL,
            model_type="qwen3_vl_moe",
            architecture="Qwen3VLMoeForConditionalGeneration",
            text_type="qwen3_vl_moe_text",
        ),
        ("qwen3vl_merger", "qwen3_5_text"): replace(
            _QWEN3_VL, model_type="qwen3_5", architecture="Qwen3_5ForConditionalGeneration", text_type=""
        ),
        ("qwen3vl_merger", "qwen3_5_moe_text"): replace(
            _QWEN3_VL, model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration", text_type=""
        ),
        ("internvl", ""): _INTERNVL,
        ("pixtral", ""): _PIXTRAL,
        ("pixtral merged", ""): replace(  # with fewer tokens than patches
            _PIXTRAL,
            model_type="mistral3",
            architecture="Mistral3ForConditionalGeneration",
            others=(
                *_PIXTRAL.others[:2],
                *_weight("mm.input_norm", "multi_modal_projector.norm", "H"),
                *_weight("mm.patch_merger", "multi_modal_projector.patch_merger.merging_layer", "H S*H"),
                *_weight("mm.1", "multi_modal_projector.linear_1", "T H"),
                *_weight("mm.2", "multi_modal_projector.linear_2", "T T"),
            ),
            config={
                "projector_hidden_act": "gelu",
                "multimodal_projector_bias": False,
                "vision_feature_layer": -1,
            },
            config_sizes={"spatial_merge_size": "merged"},
        ),
        ("mlp", ""): _LLAVA,
        ("mlp tiles", ""): replace(  # LLaVA 1.6
            _LLAVA,
            model_type="llava_next",
            architecture="LlavaNextForConditionalGeneration",
            others=(*_LLAVA.others, VisionTensor("v.image_newline|model.image_newline", "image_newline", "T")),
            image_processor="LlavaNextImageProcessor",
            processor="LlavaNextProcessor",
        ),
        ("gemma4v", "gemma4_text"): _GEMMA4,
        ("gemma4uv", "gemma4_text"): replace(
            _GEMMA4,
            model_type="gemma4_unified",
            architecture="Gemma4UnifiedForConditionalGeneration",
            text_type="gemma4_unified_text",
            layers=(),
            others=(
                VisionTensor(
                    *("v.patch_embd.weight", "model.vision_embedder.patch_dense.weight", "H 3*S*P*P", ""),
                    *("H 3 merged*P merged*P", (0, 2, 3, 1)),
                ),
                VisionTensor("v.patch_embd.bias", "model.vision_embedder.patch_dense.bias", "H"),
                *(
                    VisionTensor(
                        *(f"v.patch_norm.1.{end}", f"model.vision_embedder.patch_ln1.{end}", "3*S*P*P", ""),
                        *("3 merged*P merged*P", (1, 2, 0)),
                    )
                    for end in ("weight", "bias")
                ),
                *_linear("v.patch_norm.2", "model.vision_embedder.patch_ln2", "H"),
                *_linear("v.patch_norm.3", "model.vision_embedder.pos_norm", "H"),
                VisionTensor(
                    *("v.position_embd.weight", "model.vision_embedder.pos_embedding", "? 2 H", "2 ? H", ""), (1, 0, 2)
                ),
                *_weight("mm.input_projection", "model.embed_vision.embedding_projection", "T H"),
            ),
            image_processor="Gemma4UnifiedImageProcessor",
            processor="Gemma4UnifiedProcessor",
            sizes={"patch_size": "P", "pooling_kernel_size": "merged", "mm_embed_dim": "H", "output_proj_dims": "H"},
            vision={},
        ),
        ("lfm2", "lfm2"): _LFM2_VL,
        ("llama4", "llama4_text"): _LLAMA4,
        ("glm4v", "glm4"): _GLM4V,
        ("glm4v", "glm4_moe"): replace(
            _GLM4V,
            model_type="glm4v_moe",
            architecture="Glm4vMoeForConditionalGeneration",
            text_type="glm4v_moe_text",
        ),
    }
)
