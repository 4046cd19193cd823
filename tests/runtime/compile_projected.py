"""A layer whose projections give [B, T, H * D], compiled for a chip: what XLA moves around it.

Run as a program it prints, as JSON, the operations of the compiled forward and gradient that only
move data and whose result is as large as a whole query: [opcode, shape].
"""

from __future__ import annotations

import json
import re
import sys
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from kdagen.chips import get_chip
from kdagen.compiler import aot
from kdagen.runtime.kda import kimi_delta_attention

BATCH, TOKENS, HEADS, WIDTH, MODEL = 2, 512, 4, 128, 256
MOVES = ("copy", "copy-start", "transpose", "reshape", "concatenate", "pad")


def layer(implementation: str, weights: dict[str, Any], x: Any) -> Any:
    """Projections of x [B, T, M], attention in layout BTHD, and the projection back."""
    split = lambda y: y.reshape(BATCH, TOKENS, HEADS, WIDTH)  # noqa: E731
    tensors = {name: split(x @ weights[name]) for name in ("query", "key", "value", "gate")}
    beta = jax.nn.sigmoid(x @ weights["beta"])
    output, _ = kimi_delta_attention(
        **tensors,
        beta=beta,
        a_log=weights["a_log"],
        use_gate_in_kernel=True,
        lower_bound=-5.0,
        use_qk_l2norm=True,
        layout="BTHD",
        implementation=implementation,
    )
    return output.reshape(BATCH, TOKENS, HEADS * WIDTH) @ weights["output"]


def moves(text: str, whole: int = BATCH * TOKENS * HEADS * WIDTH) -> list[tuple[str, str]]:
    """Opcode and result of every operation of a compiled program that moves ``whole`` elements.

    An operation inside a fusion counts as well: a fused transpose is one all the same.
    """
    found = []
    for shape, opcode in re.findall(r"= \(?(\w+\[[\d,]*\])\S* ([\w-]+)\(", text):
        sizes = [int(n) for n in re.findall(r"\d+", shape.split("[")[1])]
        if opcode in MOVES and prod(sizes) >= whole:
            found.append((opcode, shape))
    return found


def main(chip: str, implementation: str) -> None:
    bf16 = jnp.bfloat16
    wide = HEADS * WIDTH
    weights = {n: ((MODEL, wide), bf16) for n in ("query", "key", "value", "gate")}
    weights |= {"beta": ((MODEL, HEADS), bf16), "output": ((wide, MODEL), bf16)}
    weights |= {"a_log": ((HEADS,), jnp.float32)}
    x = ((BATCH, TOKENS, MODEL), bf16)

    def forward(weights: dict[str, Any], x: Any) -> Any:
        return layer(implementation, weights, x)

    def gradient(weights: dict[str, Any], x: Any) -> Any:
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), (0, 1))(weights, x)

    programs = {"forward": forward, "gradient": gradient}
    texts = {n: aot.compile_for(get_chip(chip), f, [weights, x]).text for n, f in programs.items()}
    print(json.dumps({name: moves(text) for name, text in texts.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
