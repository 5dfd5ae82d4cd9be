"""How far two results are apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def relative_errors(got: Any, want: Any) -> Any:
    """max |got - want| / max |want| of each leaf, float32; NaN where either has one."""

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)

    return jax.tree.map(one, got, want)
