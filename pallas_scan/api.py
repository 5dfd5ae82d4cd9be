"""`scan`, the library's one operation: check the arguments, then hand over to an implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32, Real

from pallas_scan import _compat, arguments, chunked, primitives, sequence_sharding
from pallas_scan.config import ScanConfig, save_every
from pallas_scan.problem import Operands, Options


def scan(
    u: Float[Array, "batch seq dim"],
    delta: Float[Array, "batch seq dim"],
    A: Float32[Array, "dim state"],
    B: Float[Array, "batch seq state"] | Float[Array, "batch seq groups state"] | Float[Array, "dim state"],
    C: Float[Array, "batch seq state"] | Float[Array, "batch seq groups state"] | Float[Array, "dim state"],
    D: Real[Array, " dim"] | None = None,
    *,
    z: Float[Array, "batch seq dim"] | None = None,
    delta_bias: Real[Array, " dim"] | None = None,
    delta_softplus: bool = False,
    initial_state: Float32[Array, "batch dim state"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int32[Array, "batch seq"] | None = None,
    reverse: bool = False,
    axis_name: str | None = None,
    implementation: str | None = None,
    config: ScanConfig | None = None,
) -> Float[Array, "batch seq dim"] | tuple[Float[Array, "batch seq dim"], Float32[Array, "batch dim state"]]:
    """The selective scan (S6), the core of Mamba-1.

    For batch b, time t, channel d and state n, in float32 whatever the inputs' dtype:

        δ_t = delta_t + delta_bias, through softplus with delta_softplus
        h_t = r_t exp(δ_t A) ⊙ h_{t-1} + δ_t u_t B_t,  h_0 = initial_state
        y_t = Σ_n C_t h_t + D u_t
        out_t = y_t silu(z_t), cast to u's dtype

    r_t is 0 where `segment_ids` changes, else 1. Every floating-point argument has a gradient, `initial_state` too, and
    the final state's cotangent counts. jit, vmap, grad, jvp and their compositions work.

    Args:
      u: input, float32, bfloat16 or float16.
      delta: step size before bias and softplus, float32, bfloat16 or float16.
      A: state matrix, float32, real. Negative for a stable system (-1 to -state at Mamba's initialisation).
      B: input matrix, u's dtype or float32; (dim, state) where it does not vary with time; groups divide dim.
      C: output matrix, as B.
      D: skip connection; cast to float32. None leaves it out.
      z: gate, float32, bfloat16 or float16. None leaves it out.
      delta_bias: added to delta; cast to float32.
      delta_softplus: whether δ goes through softplus.
      initial_state: the state before the first step; zero if None.
      return_final_state: whether to return the state after the last step too.
      segment_ids: a change marks where a new sequence begins inside a row (packed sequences).
      reverse: scan from the end. The first step is then the last token, and the final state is the state at token 0.
      axis_name: the mesh axis that seq is split over, inside `jax.shard_map`.
      implementation: "pallas" (GPU kernels; on the CPU in Pallas's interpret mode), "chunked" (pure JAX with the
        hand-derived backward), "assoc" (associative scan) or "scan" (`lax.scan`). None: "pallas" on a GPU, "chunked"
        elsewhere.
      config: how the GPU kernels are cut up. None: the tuned configuration of the device.

    Returns:
      out, in u's dtype; with `return_final_state` the pair of out and the final state, float32.

    Raises:
      TypeError: an argument has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit, or a value that is not allowed; seq = 0.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv 2312.00752,
    section 3; the backward is derived in docs/derivation.md.
    """
    ops = arguments.bind(
        u,
        delta,
        A,
        B,
        C,
        D,
        z=z,
        delta_bias=delta_bias,
        initial_state=initial_state,
        segment_ids=segment_ids,
        delta_softplus=delta_softplus,
        return_final_state=return_final_state,
        reverse=reverse,
        axis_name=axis_name,
        implementation=implementation,
        config=config,
    )
    kernels = implementation == "pallas" or (implementation is None and _compat.gpu_backend())
    options = Options(
        delta_softplus=delta_softplus,
        reverse=reverse,
        implementation=implementation or "auto",
        save_every=save_every(ops.u.dtype) if kernels else chunked.BLOCK,
        config=config,
        axis_name=axis_name,
    )
    if ops.keep is not None and segment_ids is not None and axis_name is not None:
        ops = ops._replace(keep=sequence_sharding.across_border(ops.keep, segment_ids, options))
    out, final = primitives.scan(_alike(ops, axis_name), options)
    if not return_final_state:
        return out
    return out, final if axis_name is None else sequence_sharding.of_last(final, options)


def _alike(ops: Operands, axis_name: str | None) -> Operands:
    """Inside a `jax.shard_map` that checks varying axes, the operands varying over the same."""
    axes = frozenset[str]().union(*(_compat.varying_axes(x) for x in ops if x is not None))
    if axes and axis_name is not None:
        axes = axes | {axis_name}
    return Operands(*(None if x is None else _compat.vary(x, axes) for x in ops))
