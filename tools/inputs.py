"""Inputs as a Mamba layer has them at initialisation, seeded: what every tool measures on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_scan.problem import Operands

Shape = tuple[int, int, int, int]  # batch, seq, dim, state


def mamba_inputs(shape: Shape, dtype: str = "float32", seed: int = 0) -> dict[str, jax.Array]:
    """u, delta, A, B, C, D: A = -(1..state), delta log-uniform in [0.001, 0.1], D = 1, the rest standard normal."""
    batch, seq, dim, state = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    log_delta = jax.random.uniform(keys[1], (batch, seq, dim), minval=np.log(1e-3), maxval=np.log(1e-1))
    return {
        "u": jax.random.normal(keys[0], (batch, seq, dim)).astype(dtype),
        "delta": jnp.exp(log_delta).astype(dtype),
        "A": -jnp.broadcast_to(jnp.arange(1.0, state + 1.0), (dim, state)),
        "B": jax.random.normal(keys[2], (batch, seq, state)).astype(dtype),
        "C": jax.random.normal(keys[3], (batch, seq, state)).astype(dtype),
        "D": jnp.ones(dim),
    }


def operands(shape: Shape, dtype: str = "float32", seed: int = 0) -> Operands:
    """The same as the kernels take them."""
    given = mamba_inputs(shape, dtype, seed)
    parameters = {name: given[name][None] for name in ("A", "D")}
    matrices = {name: given[name][:, :, None] for name in ("B", "C")}
    return Operands(u=given["u"], delta=given["delta"], **parameters, **matrices)


def parse_sizes(text: str, axes: tuple[str, ...], example: str) -> tuple[int, ...]:
    """'4x512' -> (4, 512), a size for each of the axes.

    Raises:
      ValueError: text is not as many positive integers.
    """
    parts = text.split("x")
    if len(parts) != len(axes) or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"got {text!r}, expected {' x '.join(axes)}, such as {example}")
    return tuple(map(int, parts))


def parse_shape(text: str) -> Shape:
    """'4x512x256x16' -> (batch, seq, dim, state).

    Raises:
      ValueError: text is not four positive integers.
    """
    batch, seq, dim, state = parse_sizes(text, ("batch", "seq", "dim", "state"), "4x512x256x16")
    return batch, seq, dim, state


def are_shapes(texts: list[str] | None) -> bool:
    """A flag's validator: None, or shapes as `parse_shape` takes them."""
    try:
        return texts is None or (bool(texts) and all(parse_shape(text) for text in texts))
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
