"""`selective_scan`: check the arguments, then the operator."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int32, Real
from torch import Tensor

from triton_ref import arguments, launch, ops


def selective_scan(
    u: Float[Tensor, "batch seq dim"],
    delta: Float[Tensor, "batch seq dim"],
    A: Float32[Tensor, "dim state"],
    B: Float[Tensor, "batch seq state"] | Float[Tensor, "batch seq groups state"] | Float[Tensor, "dim state"],
    C: Float[Tensor, "batch seq state"] | Float[Tensor, "batch seq groups state"] | Float[Tensor, "dim state"],
    D: Real[Tensor, " dim"] | None = None,
    *,
    z: Float[Tensor, "batch seq dim"] | None = None,
    delta_bias: Real[Tensor, " dim"] | None = None,
    delta_softplus: bool = False,
    initial_state: Float32[Tensor, "batch dim state"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int32[Tensor, "batch seq"] | None = None,
    reverse: bool = False,
) -> Float[Tensor, "batch seq dim"] | tuple[Float[Tensor, "batch seq dim"], Float32[Tensor, "batch dim state"]]:
    """The selective scan (S6), the core of Mamba-1, on torch tensors of any strides.

    For batch b, time t, channel d and state n, in float32 whatever the inputs' dtype:

        δ_t = delta_t + delta_bias, through softplus with delta_softplus
        h_t = r_t exp(δ_t A) ⊙ h_{t-1} + δ_t u_t B_t,  h_0 = initial_state
        y_t = Σ_n C_t h_t + D u_t
        out_t = y_t silu(z_t), cast to u's dtype

    r_t is 0 where `segment_ids` changes, else 1. Every floating-point argument has a gradient, the same bits on every
    run; the final state's cotangent counts. There is no second derivative. Works under `torch.compile(fullgraph=True)`.
    On CPU tensors it needs Triton's interpreter: the environment variable TRITON_INTERPRET=1 before the first import.

    Args:
      u: input, float32, bfloat16 or float16.
      delta: step size before bias and softplus, float32, bfloat16 or float16.
      A: state matrix, float32, real. Negative for a stable system.
      B: input matrix, u's dtype or float32; (dim, state) where it does not vary with time; groups divide dim.
      C: output matrix, as B.
      D: skip connection; cast to float32. None leaves it out.
      z: gate, float32, bfloat16 or float16. None leaves it out.
      delta_bias: added to delta; cast to float32.
      delta_softplus: whether δ goes through softplus.
      initial_state: the state before the first step, float32; zero if None.
      return_final_state: whether to return the state after the last step too.
      segment_ids: int32; a change marks where a new sequence begins inside a row (packed sequences).
      reverse: scan from the end. The first step is then the last token.

    Returns:
      out, in u's dtype and memory layout; with `return_final_state` the pair of out and the final state, float32.

    Raises:
      TypeError: an argument has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit, or is on another device; seq = 0.
      RuntimeError: the tensors are on the CPU, without the interpreter.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv 2312.00752,
    section 3; the backward is derived in docs/derivation.md.
    """
    bound = arguments.bind(
        u,
        delta,
        A,
        B,
        C,
        D,
        z=z,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        return_final_state=return_final_state,
        segment_ids=segment_ids,
        reverse=reverse,
    )
    require_device(u)
    save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in bound)
    out, final, _ = ops.selective_scan(*bound, save)
    return (out, final.transpose(1, 2).contiguous()) if return_final_state else out


def require_device(u: Tensor) -> None:
    """RuntimeError where no kernel can run on u."""
    if u.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError(
            "triton_ref: got tensors on the CPU, expected a GPU's, or the environment variable TRITON_INTERPRET=1 set "
            "before triton_ref is imported"
        )
