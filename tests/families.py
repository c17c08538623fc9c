"""Which variants of each family of models a run of the tests has.

A variant (a number of ranks, a type, a kind of kernels) concerns code that families share, so a run has one for each
family, in turn: each variant has its share of the families. With TGI_ALL_VARIANTS each family has all variants:
`scripts/check_families.py --variants` runs those tests.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

ALL = bool(os.environ.get("TGI_ALL_VARIANTS"))


def with_variants(families: Iterable[str], variants: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each family with one of the variants, or with all."""
    if ALL:
        return [(family, variant) for family in families for variant in variants]
    return [(family, variants[number % len(variants)]) for number, family in enumerate(families)]
