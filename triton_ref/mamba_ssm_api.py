"""mamba_ssm's own signatures and layouts, so that code written for its CUDA build runs without one."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triton_ref import ops
from triton_ref.api import require_device, selective_scan
from triton_ref.arguments import ACTIVATIONS, check_flag, check_tensor


def selective_scan_fn(
    u: Float[Tensor, "batch dim seq"],
    delta: Float[Tensor, "batch dim seq"],
    A: Float[Tensor, "dim state"],
    B: Float[Tensor, "dim state"] | Float[Tensor, "batch state seq"] | Float[Tensor, "batch groups state seq"],
    C: Float[Tensor, "dim state"] | Float[Tensor, "batch state seq"] | Float[Tensor, "batch groups state seq"],
    D: Float[Tensor, " dim"] | None = None,
    z: Float[Tensor, "batch dim seq"] | None = None,
    delta_bias: Float[Tensor, " dim"] | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Float[Tensor, "batch dim seq"] | tuple[Float[Tensor, "batch dim seq"], Float[Tensor, "batch dim state"]]:
    """The selective scan with the arguments and the layout of mamba_ssm's function of this name.

    The sequence comes last. No input is copied to another layout: the kernels take any strides. out has u's.

    Args:
      u: input, float32, bfloat16 or float16.
      delta: step size before bias and softplus, float32, bfloat16 or float16.
      A: state matrix, real; cast to float32.
      B: input matrix, u's dtype or float32; groups divide dim.
      C: output matrix, as B.
      D: skip connection; cast to float32.
      z: gate, float32, bfloat16 or float16.
      delta_bias: added to delta; cast to float32.
      delta_softplus: whether δ goes through softplus.
      return_last_state: whether to return the state after the last step too, float32.

    Raises:
      TypeError: an argument has a dtype that is not allowed; a complex A, which Mamba-1 does not use.
      ValueError: an argument has a shape that does not fit.

    Source: mamba_ssm/ops/selective_scan_interface.py of state-spaces/mamba documents the signature.
    """
    for name, x in (("u", u), ("delta", delta), *((("z", z),) if z is not None else ())):
        check_tensor(name, x, None, ACTIVATIONS)
        if x.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (batch, dim, seq)")
    check_tensor("A", A, u, ACTIVATIONS)
    check_flag("return_last_state", return_last_state)
    result = selective_scan(
        u.transpose(1, 2),
        delta.transpose(1, 2),
        A.float(),
        _seq_second("B", B),
        _seq_second("C", C),
        D,
        z=None if z is None else z.transpose(1, 2),
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        return_final_state=return_last_state,
    )
    if isinstance(result, tuple):
        out, last_state = result
        return out.transpose(1, 2), last_state
    return result.transpose(1, 2)


def _seq_second(name: str, x: Tensor) -> Tensor:
    """B or C from mamba_ssm's order to `selective_scan`'s: (batch, seq, state) or (batch, seq, groups, state)."""
    check_tensor(name, x, None, ACTIVATIONS)
    if x.dim() == 2:
        return x
    if x.dim() == 3:
        return x.transpose(1, 2)
    if x.dim() == 4:
        return x.permute(0, 3, 1, 2)
    raise ValueError(
        f"{name}: got shape {tuple(x.shape)}, expected (dim, state), (batch, state, seq) or (batch, groups, state, seq)"
    )


def selective_state_update(
    state: Float[Tensor, "batch dim state"] | Float[Tensor, "batch heads dim state"],
    x: Float[Tensor, "batch dim"] | Float[Tensor, "batch heads dim"],
    dt: Float[Tensor, "batch dim"] | Float[Tensor, "batch heads dim"],
    A: Float[Tensor, "dim state"] | Float[Tensor, "heads dim state"],
    B: Float[Tensor, "batch state"] | Float[Tensor, "batch groups state"],
    C: Float[Tensor, "batch state"] | Float[Tensor, "batch groups state"],
    D: Float[Tensor, " dim"] | Float[Tensor, "heads dim"] | None = None,
    z: Float[Tensor, "batch dim"] | Float[Tensor, "batch heads dim"] | None = None,
    dt_bias: Float[Tensor, " dim"] | Float[Tensor, "heads dim"] | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch dim"] | Float[Tensor, "batch heads dim"]:
    """One token, with the arguments of mamba_ssm's function of this name: `state` is changed in place.

    Every floating-point tensor may have its own dtype, float32, bfloat16 or float16, and any strides. There is no
    gradient.

    Args:
      state: the state before the token; with state_batch_indices a cache whose first axis is slots.
      x: input.
      dt: step size before bias and softplus.
      A: state matrix, real.
      B: input matrix; groups divide heads where there are heads, else dim.
      C: output matrix, as B.
      D: skip connection. z: gate. dt_bias: added to dt. dt_softplus: whether δ goes through softplus.
      state_batch_indices: each row's slot in the cache, int32 or int64. A row with a negative one is skipped: its
        state is not touched and its out is 0.

    Returns:
      out, in x's dtype.

    Raises:
      TypeError: an argument has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit.

    Source: mamba_ssm/ops/triton/selective_state_update.py of state-spaces/mamba documents the signature.
    """
    check_flag("dt_softplus", dt_softplus)
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    for name, value in given.items():
        if value is not None or name in ("state", "x", "dt", "A", "B", "C"):
            check_tensor(name, value, None if name == "state" else state, ACTIVATIONS)
    if x.dim() not in (2, 3):
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (batch, dim) or (batch, heads, dim)")
    batch, *channels = x.shape
    if A.dim() != x.dim() or tuple(A.shape[:-1]) != tuple(channels):
        axes = "(dim, state)" if x.dim() == 2 else "(heads, dim, state)"
        raise ValueError(f"A: got shape {tuple(A.shape)}, expected {axes} with {tuple(channels)} before state")
    size = A.shape[-1]
    if state_batch_indices is None:
        _expect("state", state, (batch, *channels, size))
    else:
        check_tensor("state_batch_indices", state_batch_indices, state, (torch.int32, torch.int64))
        _expect("state_batch_indices", state_batch_indices, (batch,))
        _expect("state", state, (state.shape[0], *channels, size))
    _expect("dt", dt, (batch, *channels))
    for name, value in (("D", D), ("dt_bias", dt_bias)):
        if value is not None:
            _expect(name, value, tuple(channels))
    if z is not None:
        _expect("z", z, (batch, *channels))
    B, C = (_grouped(name, value, batch, size, channels[0]) for name, value in (("B", B), ("C", C)))
    require_device(x)

    def headed(value: Tensor | None, axis: int) -> Tensor | None:
        """With an axis of one channel a head where there are no heads: dim is then what groups divide."""
        return value if value is None or x.dim() == 3 else value.unsqueeze(axis)

    out = ops.selective_state_update(
        headed(state, 2), headed(x, 2), headed(dt, 2), headed(A, 1), B, C, headed(D, 1), headed(z, 2),
        headed(dt_bias, 1), dt_softplus, state_batch_indices,
    )  # fmt: skip
    return out if x.dim() == 3 else out.squeeze(2)


def _expect(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {shape}")


def _grouped(name: str, x: Tensor, batch: int, size: int, divided: int) -> Tensor:
    """B or C as (batch, groups, state)."""
    x = x.unsqueeze(1) if x.dim() == 2 else x
    if x.dim() != 3 or (x.shape[0], x.shape[2]) != (batch, size) or x.shape[1] < 1 or divided % x.shape[1]:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected (batch, state) = {(batch, size)} or (batch, groups, state) "
            f"= ({batch}, a divisor of {divided}, {size})"
        )
    return x
