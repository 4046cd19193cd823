"""What the compiler of a chip makes of a fused forward kernel, as far as that is foreseen.

The numbers were fitted to what it made of random points of the space; benchmarks/compile_sample.py
holds them against others. Bundles are about right, spilled registers are bounded from above. The
schedulers of a generation are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdagen.kernels.tiling import LANES

MIB = 1 << 20


@dataclass(frozen=True)
class Products:
    """Of what a kernel multiplies.

    Attributes:
      decay: the factorisation.
      exact: operands are float32.
      wide_inverse: the inverse is formed and applied in float32; true where ``exact``.
      key_dim, value_dim: K and V in whole registers.
    """

    decay: str
    exact: bool
    wide_inverse: bool
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Scheduler:
    """The compiler of one generation of chips.

    Attributes:
      loop: bundles of a loop whatever it does.
      unit: those of 64 tokens of a head at K = V = 128, by factorisation, of bfloat16 and of
        float32 operands.
      wide_inverse: what an inverse in float32 adds to bfloat16.
      spills: MiB whatever the kernel does.
      key_spills: f32 tensors [128, K] that a pack spills, by factorisation; past_spills: how many
        more of them, as far as K is above 128.
      chunk_spills, value_spills: f32 tensors [128, C] and [128, V], of a bfloat16 inverse, a
        float32 one, and float32 operands.
      state_spills: states, of every stream.
    """

    loop: int
    unit: dict[str, tuple[int, int]]
    wide_inverse: int
    spills: float
    key_spills: dict[str, float]
    past_spills: float
    chunk_spills: tuple[float, float, float]
    value_spills: tuple[float, float, float]
    state_spills: float

    def bundles(self, of: Products, units: float) -> int:
        """About how many a loop has that takes ``units`` times 64 tokens of a head."""
        unit = self.unit[of.decay][of.exact] * (of.key_dim + of.value_dim) / (2 * LANES)
        if of.wide_inverse and not of.exact:
            unit += self.wide_inverse
        return round(self.loop + units * unit)

    def spill_bytes(self, of: Products, *, chunk: int, packs: int, streams: int) -> int:
        """VMEM that registers of so many packs and streams are put aside in, at most."""
        held = of.wide_inverse + of.exact
        lanes = self.key_spills[of.decay] * of.key_dim + self.past_spills * (of.key_dim - LANES)
        lanes += self.chunk_spills[held] * chunk + self.value_spills[held] * of.value_dim
        states = self.state_spills * streams * of.key_dim * of.value_dim * 4
        return round(self.spills * MIB + packs * LANES * 4 * lanes + states)


_V4 = Scheduler(
    loop=800,
    unit={"bounded": (500, 1880), "unbounded": (540, 2000), "tree": (880, 2150)},
    wide_inverse=345,
    spills=0.42,
    key_spills={"bounded": 4.7, "unbounded": 6.3, "tree": 8.9},
    past_spills=4.3,
    chunk_spills=(4.2, 1.0, 1.0),
    value_spills=(0.0, 7.0, 8.6),
    state_spills=0.6,
)
_V5 = Scheduler(
    loop=1150,
    unit={"bounded": (310, 1300), "unbounded": (340, 1400), "tree": (480, 1460)},
    wide_inverse=200,
    spills=0.4,
    key_spills={"bounded": 1.2, "unbounded": 3.5, "tree": 10.1},
    past_spills=5.0,
    chunk_spills=(2.6, 6.0, 13.0),
    value_spills=(0.0, 2.4, 4.0),
    state_spills=1.35,
)
_V6 = Scheduler(
    loop=1130,
    unit={"bounded": (230, 1000), "unbounded": (260, 1100), "tree": (350, 1180)},
    wide_inverse=60,
    spills=0.32,
    key_spills={"bounded": 1.8, "unbounded": 3.8, "tree": 10.5},
    past_spills=6.7,
    chunk_spills=(2.2, 3.5, 18.3),
    value_spills=(0.0, 3.2, 4.9),
    state_spills=1.0,
)
SCHEDULERS = {"v4": _V4, "v5e": _V5, "v5p": _V5, "v6e": _V6, "v7x": _V6}
"""By the name of the chip."""
