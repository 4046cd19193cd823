"""The space of backward kernels that a search goes through."""

from __future__ import annotations

from typing import Any

from kdagen import space as forward
from kdagen.chips import Chip
from kdagen.gradient.plan import ORDERS
from kdagen.gradient.step import CUTS
from kdagen.gradient.variant import keeps_corrected, keeps_inverse, sub_blocks
from kdagen.problem import Problem


def space(problem: Problem, chip: Chip) -> dict[str, tuple[Any, ...]]:
    """Every parameter with the ordered values that a search over this problem tries.

    The product holds illegal points; ``kdagen.gradient.variant.check`` tells. Cuts have the values
    that they have in a forward.
    """
    of_forward = forward.space(problem, chip)
    return {
        **{name: of_forward[name] for name in CUTS},
        "sub_block": sub_blocks(problem),
        "inverse_block": of_forward["inverse_block"],
        "weight_depth": of_forward["weight_depth"],
        "inverse_dtype": of_forward["inverse_dtype"],
        "keep_inverse": keeps_inverse(problem),
        "keep_corrected": keeps_corrected(problem),
        "span": (4, 6, 8, 10, 12, 16),
        "lag": (0, 2, 4, 6),
        "order": tuple(ORDERS),
        "vmem_limit_mib": of_forward["vmem_limit_mib"],
    }
