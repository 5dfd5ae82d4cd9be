"""The canonical form of one selective scan: what every implementation takes and returns.

`arguments.bind` brings a user's call into this form once; no implementation checks or reshapes arguments again.

Parameters that a layer shares over its batch carry a leading axis of 1, or of batch where `jax.vmap` gave every
example its own. That one convention lets every batching rule fold its axis into batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_scan.config import ScanConfig, Sizes

# Arrays carry `Any` here since the same tuple also holds avals, tangents and cotangents of the arrays.
Arrayish = Any


class Operands(NamedTuple):
    """Arrays of one scan. Also the shape of its tangents and of its cotangents (then keep is None)."""

    u: Arrayish  # (batch, seq, dim)
    delta: Arrayish  # (batch, seq, dim)
    A: Arrayish  # (1 or batch, dim, state) float32
    B: Arrayish  # (batch, seq, groups, state), or (1 or batch, dim, state) where it does not vary
    C: Arrayish  # as B
    D: Arrayish | None = None  # (1 or batch, dim) float32
    z: Arrayish | None = None  # (batch, seq, dim)
    delta_bias: Arrayish | None = None  # (1 or batch, dim) float32
    initial_state: Arrayish | None = None  # (batch, dim, state) float32
    keep: Arrayish | None = None  # (batch, seq) bool; False where a new sequence begins: r_t of the recurrence

    def is_parameter(self, name: str) -> bool:
        """Whether `name` has the (1 or batch) leading axis."""
        return name in ("A", "D", "delta_bias") or (name in ("B", "C") and getattr(self, name).ndim == 3)

    def rows(self) -> Operands:
        """The operands with parameters one a batch row and float32: as `backward` returns gradients."""

        def a_row_each(name: str, x: Arrayish) -> Arrayish:
            if x is None or not self.is_parameter(name):
                return x
            return jnp.broadcast_to(x.astype(jnp.float32), (self.sizes.batch, *x.shape[1:]))

        return Operands(**{name: a_row_each(name, x) for name, x in self._asdict().items()})

    @property
    def sizes(self) -> Sizes:
        batch, seq, dim = self.u.shape
        return Sizes(batch, seq, dim, self.A.shape[-1])


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything about a scan that is not an array; hashable, so it can be a primitive's parameter."""

    delta_softplus: bool = False
    reverse: bool = False
    implementation: str = "auto"  # "auto": "pallas" when lowered for a GPU, "chunked" elsewhere
    save_every: int = 8  # steps between the states that the forward saves for the backward
    config: ScanConfig | None = None
    axis_name: str | None = None  # the mesh axis that seq is split over, inside shard_map
