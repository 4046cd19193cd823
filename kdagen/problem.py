"""What is asked for: the static facts of one Kimi Delta Attention call, and files of them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.errors import KdagenError

DTYPES = ("bfloat16", "float32")
GATES = ("log_decay", "softplus", "bounded")
LAYOUTS = ("HBTD", "BTHD")
RESIDUAL_POLICIES = ("save", "rematerialize")
TUNED = "tuned"
"""In place of a residual policy: the one that tuning finds the faster."""
PRECISIONS = ("default", "high", "highest")
MAX_HEAD_DIM = 256

# At 16 channels 5e-3 of the output is lost to roundings, at 4 channels 7e-3.
_LEAST_BFLOAT16_KEY_DIM = 32

# With an inverse in bfloat16 and chunks of 64, the output of 1024 tokens of hardly any decay is off
# by 5.2e-3 at 48 channels and by 4.9e-3 at 64; with one above bfloat16 by 3.7e-3 at 32. Where
# writes reflect, the final state at 64 channels is off by 9e-3 under a bounded gate and by 1.1e-2
# under a softplus, of 1e-2.
_LEAST_BFLOAT16_INVERSE_KEY_DIM = {"bounded": 64, "softplus": 80, "log_decay": 80}

# Facts a kernel is not specialised on: it walks chunks whatever the length or batch, and takes the
# bound as an operand. They are kept in a Problem because a modelled time needs them.
_NOT_IN_KEY = ("batch", "tokens", "lower_bound")


class ProblemError(KdagenError, ValueError):
    """A problem that no call can have; the message names the field."""


@dataclass(frozen=True)
class Problem:
    """The static facts of a call, in the words of the public function.

    Attributes:
      tokens: sequence length T, at least 1.
      heads: query and key heads H on one chip.
      batch: rows B.
      value_heads: value heads HV, a multiple of ``heads``; 0 (the default) means ``heads``.
      key_dim: K, 1 to 256.
      value_dim: V, 1 to 256.
      dtype: of query, key and value.
      gate: "log_decay" (the gate operand is ln alpha), "softplus" (raw, -exp(a_log) *
        softplus(x)) or "bounded" (raw, lower_bound * sigmoid(exp(a_log) * x)).
      lower_bound: the bound of a "bounded" gate, in [-5, 0); None otherwise.
      gate_dtype, beta_dtype: of those operands; "" (the default) means ``dtype``.
      qk_l2norm: queries and keys are normalised first.
      initial_state, final_state: whether the call passes and asks for them.
      segments: None, or the packing: a number of equal segments, or their lengths.
      layout: "HBTD" or "BTHD".
      residuals: of a call that is differentiated, a training step, its residual policy: "save",
        "rematerialize", or "tuned" for whichever tuning finds the faster; None for inference.
      precision: of products in bfloat16. "high" asks that nearly parallel and repeated keys keep
        their accuracy, which takes an inverse above bfloat16; "highest" that products be those of
        float32 operands. float32 has both always.

    Raises:
      ProblemError: a field is out of range or of the wrong type.
    """

    tokens: int
    heads: int
    batch: int = 1
    value_heads: int = 0
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    gate: str = "log_decay"
    lower_bound: float | None = None
    gate_dtype: str = ""
    beta_dtype: str = ""
    qk_l2norm: bool = False
    initial_state: bool = False
    final_state: bool = False
    segments: int | tuple[int, ...] | None = None
    layout: str = "HBTD"
    residuals: str | None = None
    precision: str = "default"

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if _is_int(self.value_heads) and self.value_heads == 0:
            put("value_heads", self.heads)
        for name in ("gate_dtype", "beta_dtype"):
            if getattr(self, name) == "":
                put(name, self.dtype)
        if isinstance(self.segments, list):
            put("segments", tuple(self.segments))
        if self.gate == "bounded" and isinstance(self.lower_bound, int):
            put("lower_bound", float(self.lower_bound))
        for name in ("tokens", "heads", "batch", "value_heads"):
            self._require(
                name,
                _is_int(getattr(self, name)) and getattr(self, name) >= 1,
                "an integer of 1 or more",
            )
        for name in ("key_dim", "value_dim"):
            value = getattr(self, name)
            self._require(
                name,
                _is_int(value) and 1 <= value <= MAX_HEAD_DIM,
                f"an integer from 1 to {MAX_HEAD_DIM}",
            )
        self._require(
            "value_heads", self.value_heads % self.heads == 0, f"a multiple of heads ({self.heads})"
        )
        for name in ("dtype", "gate_dtype", "beta_dtype"):
            self._require(name, getattr(self, name) in DTYPES, _one_of(DTYPES))
        self._require("gate", self.gate in GATES, _one_of(GATES))
        self._require("layout", self.layout in LAYOUTS, _one_of(LAYOUTS))
        self._require("precision", self.precision in PRECISIONS, _one_of(PRECISIONS))
        for name in ("qk_l2norm", "initial_state", "final_state"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        self._require(
            "residuals",
            self.residuals is None or self.residuals in (*RESIDUAL_POLICIES, TUNED),
            "null, " + _one_of((*RESIDUAL_POLICIES, TUNED)),
        )
        if self.gate == "bounded":
            bound = self.lower_bound
            ok = isinstance(bound, float) and -5.0 <= bound < 0.0
            self._require("lower_bound", ok, "a number in [-5, 0) for a bounded gate")
        else:
            self._require("lower_bound", self.lower_bound is None, f"absent for a {self.gate} gate")
        self._require_segments()

    def _require(self, name: str, ok: bool, takes: str) -> None:
        if not ok:
            raise ProblemError(f"{name}: got {getattr(self, name)!r}; it must be {takes}")

    def _require_segments(self) -> None:
        segments = self.segments
        if segments is None:
            return
        if isinstance(segments, tuple):
            ok = all(_is_int(n) and n >= 0 for n in segments) and sum(segments) <= self.tokens
            takes = f"lengths of 0 or more that add up to at most tokens ({self.tokens})"
        else:
            ok = _is_int(segments) and 1 <= segments <= self.tokens
            takes = f"a count from 1 to tokens ({self.tokens}), or a list of lengths"
        self._require("segments", ok, takes)

    @property
    def packed(self) -> bool:
        """Whether there are segments."""
        return self.segments is not None

    @property
    def segment_states(self) -> bool:
        """Whether segments have states of their own."""
        return self.packed and (self.initial_state or self.final_state)

    @property
    def slots(self) -> int:
        """State slots N of a call: one for each segment."""
        if self.segments is None:
            return 1
        return self.segments if isinstance(self.segments, int) else len(self.segments)

    @property
    def exact(self) -> bool:
        """Whether a kernel multiplies float32 operands: for float32, where it is asked for, and for
        keys so narrow that roundings to bfloat16 do not average out over the channels."""
        narrow = self.key_dim < _LEAST_BFLOAT16_KEY_DIM
        return self.dtype == "float32" or self.precision == "highest" or narrow

    @property
    def operand(self) -> str:
        """Dtype of what a kernel multiplies, and of what its stages hand over and keep."""
        return "float32" if self.exact else "bfloat16"

    @property
    def trained(self) -> bool:
        """Whether it is a training step: a forward and its gradient."""
        return self.residuals is not None

    @property
    def wide_inverse(self) -> bool:
        """Whether a kernel must form and apply its inverse above bfloat16: for hard keys, where
        they are asked for, and for narrow ones."""
        narrow = self.key_dim < _LEAST_BFLOAT16_INVERSE_KEY_DIM[self.gate]
        return self.exact or self.precision == "high" or narrow

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-able values, in the order of their declaration."""
        fields = dataclasses.asdict(self)
        if isinstance(self.segments, tuple):
            fields["segments"] = list(self.segments)
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Problem:
        """The inverse of ``to_dict``; fields that are absent take their defaults.

        Raises:
          ProblemError: an unknown field, a missing one, or a bad value.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ProblemError(
                    f"{name}: not a field of a problem; the fields are {', '.join(known)}"
                )
        for name in ("tokens", "heads"):
            if name not in fields:
                raise ProblemError(f"{name}: missing; every problem needs it")
        return cls(**fields)

    def to_json(self) -> str:
        """The canonical form: every hash and row of a problem derives from it."""
        return canonical_json(self.to_dict())

    def key(self) -> str:
        """Canonical JSON of the facts that change the generated code or its speed per chunk.

        Tokens, batch and the value of the bound are left out: kernels walk chunks whatever their
        number, and take the bound as a constant that costs the same whatever it is. Of a packing
        only the fact that there is one is kept.
        """
        fields = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_KEY}
        fields["segments"] = self.packed
        return canonical_json(fields)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def load_shapes(path: str | Path) -> dict[str, Problem]:
    """Reads a shapes file: a YAML mapping from a name to the fields of a ``Problem``.

    Anchors and merge keys work: ``b: {<<: *a, tokens: 4096}`` is ``a`` of another length.

    Raises:
      ProblemError: no such file, not such a mapping, or a bad field; the message names the file,
        the shape and the field.
    """
    import yaml  # the runtime imports this module and must not pay for a YAML reader

    class UniqueKeys(yaml.SafeLoader):
        """YAML's own loader keeps the last of two equal keys and loses the first in silence."""

        # As written: with its merge keys (<<) resolved, a mapping may rightly hold a field twice.
        def compose_mapping_node(self, anchor):
            node = super().compose_mapping_node(anchor)
            names = [str(key.value) for key, _ in node.value]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ProblemError(f"{', '.join(twice)}: stands there twice; a name may stand once")
            return node

    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except ProblemError as error:
        raise ProblemError(f"shapes file {path}: {error}") from None
    except OSError as error:
        raise ProblemError(f"shapes file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProblemError(f"shapes file {path}: not YAML: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ProblemError(
            f"shapes file {path}: it must map names of shapes to their fields; it does not"
        )
    shapes = {}
    for name, fields in content.items():
        if not isinstance(name, str) or not isinstance(fields, dict):
            raise ProblemError(
                f"shapes file {path}, shape {name!r}: got {fields!r}; it must map fields to values"
            )
        try:
            shapes[name] = Problem.from_dict(fields)
        except ProblemError as error:
            raise ProblemError(f"shapes file {path}, shape {name!r}: {error}") from None
    return shapes


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(values: tuple[str, ...]) -> str:
    return "one of " + ", ".join(repr(v) for v in values)
