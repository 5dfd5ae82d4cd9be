"""Argument checks: the one place where a call is refused, or brought into canonical form.

Nothing is broadcast, transposed or cast, save D and delta_bias, which become float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_scan.config import ScanConfig
from pallas_scan.problem import Operands

ACTIVATIONS = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("pallas", "chunked", "assoc", "scan")


def bind(
    u,
    delta,
    A,
    B,
    C,
    D,
    *,
    z,
    delta_bias,
    initial_state,
    segment_ids,
    delta_softplus: bool,
    return_final_state: bool,
    reverse: bool,
    axis_name: str | None,
    implementation: str | None,
    config: ScanConfig | None,
) -> Operands:
    """Checks every argument of `pallas_scan.scan` and returns the operands in canonical form.

    Raises:
      TypeError: an argument is not an array, or has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit the others, or a value that is not allowed.
    """
    for name, value in (
        ("delta_softplus", delta_softplus),
        ("return_final_state", return_final_state),
        ("reverse", reverse),
    ):
        _check_flag(name, value)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}, expected None or one of {IMPLEMENTATIONS}")
    if config is not None and not isinstance(config, ScanConfig):
        raise TypeError(f"config: got {config!r} of type {type(config).__name__}, expected a ScanConfig or None")

    if axis_name is not None:
        _check_axis_name(axis_name)

    check_array("u", u, ACTIVATIONS)
    if len(u.shape) != 3:
        raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, seq, dim)")
    batch, seq, dim = u.shape
    for size, axis in ((seq, "seq"), (dim, "dim")):
        if size < 1:
            raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, seq, dim) with {axis} at least 1")
    state = _states_of(A, dim)

    _check("delta", delta, ACTIVATIONS, "(batch, seq, dim)", (batch, seq, dim))
    if z is not None:
        _check("z", z, ACTIVATIONS, "(batch, seq, dim)", (batch, seq, dim))
    if initial_state is not None:
        _check("initial_state", initial_state, ("float32",), "(batch, dim, state)", (batch, dim, state))
    if segment_ids is not None:
        _check("segment_ids", segment_ids, ("int32",), "(batch, seq)", (batch, seq))
    return Operands(
        u=jnp.asarray(u),
        delta=jnp.asarray(delta),
        A=jnp.asarray(A)[None],
        B=_matrix("B", B, u, state),
        C=_matrix("C", C, u, state),
        D=vector("D", D, dim),
        z=None if z is None else jnp.asarray(z),
        delta_bias=vector("delta_bias", delta_bias, dim),
        initial_state=None if initial_state is None else jnp.asarray(initial_state),
        keep=None if segment_ids is None else _keep(jnp.asarray(segment_ids), reverse),
    )


def bind_step(state, u, delta, A, B, C, D, *, z, delta_bias, delta_softplus: bool, state_indices: Any) -> Operands:
    """Checks every argument of `pallas_scan.step` and returns the operands of a scan with seq = 1; `initial_state` is
    the state as given, which with `state_indices` is a cache.

    Raises:
      TypeError: an argument is not an array, or has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit the others.
    """
    _check_flag("delta_softplus", delta_softplus)
    check_array("u", u, ACTIVATIONS)
    if len(u.shape) != 2 or u.shape[1] < 1:
        raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, dim) with dim at least 1")
    batch, dim = u.shape
    size = _states_of(A, dim)
    check_array("state", state, ("float32",))
    if state_indices is None:
        check_shape("state", state, "(batch, dim, state)", (batch, dim, size))
    else:
        _check("state_indices", state_indices, ("int32",), "(batch,)", (batch,))
        if len(state.shape) != 3 or tuple(state.shape[1:]) != (dim, size):
            raise ValueError(
                f"state: got shape {tuple(state.shape)}, expected (slots, dim, state) = (any number, {dim}, {size})"
            )
    _check("delta", delta, ACTIVATIONS, "(batch, dim)", (batch, dim))
    if z is not None:
        _check("z", z, ACTIVATIONS, "(batch, dim)", (batch, dim))

    def matrix(name: str, x: Any):
        check_array(name, x, tuple(dict.fromkeys((u.dtype.name, "float32"))))
        shape = tuple(x.shape)
        x = jnp.asarray(x)
        if shape == (batch, size):
            return x[:, None, None]
        if len(shape) == 3 and (shape[0], shape[2]) == (batch, size) and shape[1] >= 1 and dim % shape[1] == 0:
            return x[:, None]
        raise ValueError(
            f"{name}: got shape {shape}, expected (batch, state) = {(batch, size)} or (batch, groups, state) = "
            f"({batch}, a divisor of {dim}, {size})"
        )

    return Operands(
        u=jnp.asarray(u)[:, None],
        delta=jnp.asarray(delta)[:, None],
        A=jnp.asarray(A)[None],
        B=matrix("B", B),
        C=matrix("C", C),
        D=vector("D", D, dim),
        z=None if z is None else jnp.asarray(z)[:, None],
        delta_bias=vector("delta_bias", delta_bias, dim),
        initial_state=jnp.asarray(state),
    )


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a bool")


def _check_axis_name(axis_name: Any) -> None:
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {axis_name!r} of type {type(axis_name).__name__}, expected a str or None")
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name: got {axis_name!r}, expected the name of a mesh axis of the jax.shard_map around the call"
        ) from None


def _states_of(A: Any, dim: int) -> int:
    """Checks A and returns its number of states."""
    check_array("A", A, ("float32",))
    if len(A.shape) != 2 or A.shape[0] != dim or A.shape[1] < 1:
        raise ValueError(f"A: got shape {tuple(A.shape)}, expected (dim, state) = ({dim}, at least 1)")
    return A.shape[1]


def check_array(name: str, x: Any, dtypes: tuple[str, ...] | None) -> None:
    """TypeError unless x is an array of one of the dtypes (None: any real number)."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
    if dtypes is None:
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise TypeError(f"{name}: got dtype {x.dtype}, expected a real number, float32 for choice")
    elif x.dtype.name not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected {' or '.join(dtypes)}")


def _check(name: str, x: Any, dtypes: tuple[str, ...] | None, axes: str, shape: tuple[int, ...]) -> None:
    check_array(name, x, dtypes)
    check_shape(name, x, axes, shape)


def check_shape(name: str, x: Any, axes: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {axes} = {shape}")


def vector(name: str, x: Any, dim: int):
    """D or delta_bias in canonical form, (1, dim) float32."""
    if x is None:
        return None
    _check(name, x, None, "(dim,)", (dim,))
    return jnp.asarray(x).astype(jnp.float32)[None]


def _matrix(name: str, x: Any, u: Any, state: int):
    """B or C in canonical form: (batch, seq, groups, state) if it varies, (1, dim, state) if it does not."""
    batch, seq, dim = u.shape
    check_array(name, x, tuple(dict.fromkeys((u.dtype.name, "float32"))))
    shape = tuple(x.shape)
    x = jnp.asarray(x)
    if shape == (dim, state):
        return x[None]
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


def _keep(segment_ids, reverse: bool):
    """r_t: whether the state passes from the step before t, in scan order. The first step takes the initial state."""
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    first = jnp.ones_like(segment_ids[:, :1], dtype=bool)
    return jnp.concatenate([same, first] if reverse else [first, same], axis=1)
