"""Which variants of each family of models a run of the tests has.

A variant (a number of ranks, a type, a kind of kernels) concerns code that families share, so a run has one for each
family, in turn: each variant has its share of the families. With TGI_ALL_VARIANTS each family has all variants:
`scripts/check_families.py --variants` runs those tests.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

ALL = bool(os.environ.get("TGI_ALL_VARIANTS"))
# A family of each kind of layer that has recurrent states: convolutions, the delta rule, state spaces; and of the other
# kinds: soft caps and windows, sinks and experts, alibi, chunks, streams, keys of an earlier layer, latent attention.
RECURRENT_STRUCTURES = ("lfm2", "qwen3_next", "mamba2")
STRUCTURES = (
    *("gemma2", "gpt_oss", "bloom", "llama4_text", "gemma3n_text", "gemma4_text", "deepseek_v3"),
    *RECURRENT_STRUCTURES,
)


def in_depth(families: Iterable[str], chosen: Sequence[str] = STRUCTURES) -> list[str]:
    """Those of the families that are chosen, or all."""
    return [family for family in families if ALL or family in chosen]


def with_variants(families: Iterable[str], variants: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each family with one of the variants, or with all."""
    if ALL:
        return [(family, variant) for family in families for variant in variants]
    return [(family, variants[number % len(variants)]) for number, family in enumerate(families)]
