"""Argument checks of `selective_scan`: a TypeError for a dtype, a ValueError for a shape or a value.

Nothing is broadcast or cast, save D and delta_bias, which become float32.
"""

from __future__ import annotations

from typing import Any

import torch

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a bool")


def check_tensor(name: str, x: Any, like: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] | None) -> None:
    """TypeError unless x is a tensor of one of the dtypes (None: any real number), ValueError unless it is where like
    is."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if dtypes is None:
        if x.dtype.is_complex or x.dtype == torch.bool:
            raise TypeError(f"{name}: got dtype {_name(x.dtype)}, expected a real number, float32 for choice")
    elif x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {_name(x.dtype)}, expected {' or '.join(map(_name, dtypes))}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: got device {x.device}, expected u's, {like.device}")


def check(name: str, x: Any, like: torch.Tensor, dtypes, axes: str, shape: tuple[int, ...]) -> None:
    check_tensor(name, x, like, dtypes)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {axes} = {shape}")


def bind(
    u, delta, A, B, C, D, *, z, delta_bias, delta_softplus, initial_state, return_final_state, segment_ids, reverse
):
    """The arguments of the operator in ops.py, up to `save`.

    Raises:
      TypeError: an argument is no tensor, or has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit the others, or a value that is not allowed.
    """
    flags = {"delta_softplus": delta_softplus, "return_final_state": return_final_state, "reverse": reverse}
    for name, value in flags.items():
        check_flag(name, value)
    check_tensor("u", u, None, ACTIVATIONS)
    if u.dim() != 3:
        raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, seq, dim)")
    batch, seq, dim = u.shape
    for size, axis in ((seq, "seq"), (dim, "dim")):
        if size < 1:
            raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, seq, dim) with {axis} at least 1")
    check_tensor("A", A, u, (torch.float32,))
    if A.dim() != 2 or A.shape[0] != dim or A.shape[1] < 1:
        raise ValueError(f"A: got shape {tuple(A.shape)}, expected (dim, state) = ({dim}, at least 1)")
    state = A.shape[1]
    check("delta", delta, u, ACTIVATIONS, "(batch, seq, dim)", (batch, seq, dim))
    if z is not None:
        check("z", z, u, ACTIVATIONS, "(batch, seq, dim)", (batch, seq, dim))
    if initial_state is not None:
        check("initial_state", initial_state, u, (torch.float32,), "(batch, dim, state)", (batch, dim, state))
    if segment_ids is not None:
        check("segment_ids", segment_ids, u, (torch.int32,), "(batch, seq)", (batch, seq))
    return (
        u,
        delta,
        A,
        _matrix("B", B, u, state),
        _matrix("C", C, u, state),
        vector("D", D, u, dim),
        z,
        vector("delta_bias", delta_bias, u, dim),
        None if initial_state is None else initial_state.transpose(1, 2).contiguous(),
        segment_ids,
        delta_softplus,
        reverse,
    )


def vector(name: str, x: Any, u: torch.Tensor, dim: int) -> torch.Tensor | None:
    """D or delta_bias as contiguous float32."""
    if x is None:
        return None
    check(name, x, u, None, "(dim,)", (dim,))
    return x.to(torch.float32).contiguous()


def _matrix(name: str, x: Any, u: torch.Tensor, state: int) -> torch.Tensor:
    """B or C as (batch, seq, groups, state) if it varies, (dim, state) if it does not."""
    batch, seq, dim = u.shape
    check_tensor(name, x, u, tuple(dict.fromkeys((u.dtype, torch.float32))))
    shape = tuple(x.shape)
    if shape == (dim, state):
        return x
    if shape == (batch, seq, state):
        return x[:, :, None]
    if len(shape) == 4 and (shape[0], shape[1], shape[3]) == (batch, seq, state):
        if shape[2] < 1 or dim % shape[2]:
            raise ValueError(
                f"{name}: got {shape[2]} groups (shape {shape}), expected a number that divides dim = {dim}"
            )
        return x
    raise ValueError(
        f"{name}: got shape {shape}, expected (batch, seq, state) = {(batch, seq, state)}, (batch, seq, groups, state) "
        f"= ({batch}, {seq}, a divisor of {dim}, {state}) or, not varying, (dim, state) = {(dim, state)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
