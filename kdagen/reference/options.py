"""The static part of a call, shared by the references and by what wraps them."""

from dataclasses import dataclass

PER_TOKEN = ("query", "key", "value", "gate", "beta")
"""The operands that have tokens, in the order of the public function."""


@dataclass(frozen=True)
class Options:
    """What the computation is told beside its arrays.

    Attributes:
      scale: factor of the query.
      use_qk_l2norm: query and key are L2-normalised first.
      use_gate_in_kernel: the gate operand is raw and has to be activated.
      lower_bound: of a raw gate, in [-5, 0), or None for the softplus activation.
      output_final_state: the caller wants the final state.
      residuals: "save" keeps chunk-start states for the backward, "rematerialize" the inputs only;
        None leaves it to the implementation.
      layout: of what is per token: "HBTD" is [H, B, T, D] and "BTHD" is [B, T, H, D]. Operands,
        output and gradients all have it; an implementation converts what it looks at, and no more.
    """

    scale: float
    use_qk_l2norm: bool = False
    use_gate_in_kernel: bool = False
    lower_bound: float | None = None
    output_final_state: bool = True
    residuals: str | None = None
    layout: str = "HBTD"
