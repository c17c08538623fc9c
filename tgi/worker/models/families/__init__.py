"""The supported model families as data: what config.json leaves implicit for each model_type.

family      ModelFamily; read this first
readings    readings of keys that families of several modules have
llama       dense models with the layers of a llama
gemma       the Gemma family
gpt         GPT-2 and its kin: learned positions, ALiBi, parallel layers
experts     mixtures of experts, and the readings of experts
latent      latent attention
recurrent   recurrent layers

To add a family that DecoderConfig can express, add an entry to FAMILIES of the module of its kin, with the reading of
what is its own. Models of other types run through transformers (transformers_model.py).
"""

from tgi.worker.models.families import experts, gemma, gpt, latent, llama, recurrent
from tgi.worker.models.families.family import COMMON_KEYS, ModelFamily, Values, Variant

__all__ = ("COMMON_KEYS", "FAMILIES", "VARIANTS", "WITH_TEXT_PART", "ModelFamily", "Values", "Variant")

_MODULES = (llama, gemma, gpt, experts, latent, recurrent)
FAMILIES: dict[str, ModelFamily] = {kind: one for module in _MODULES for kind, one in module.FAMILIES.items()}
VARIANTS: dict[str, Variant] = {
    name: one for module in (llama, experts, latent) for name, one in module.VARIANTS.items()
}

# Multimodal models whose text part computes what a model of text alone does. Their images: hub/vision_towers.py.
WITH_TEXT_PART = (
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe", "idefics2", "idefics3", "internvl",
    "kimi_k25", "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "mllama", "paligemma",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
