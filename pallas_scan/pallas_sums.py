"""The last kernel of a backward: sums of its programs' partial gradients, all of them in one launch.

Every partial array is (outer, rows, columns) and is summed over rows. A thread has one column and adds its rows in
their order, loads of `TOGETHER` rows in flight at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_scan.pallas_tile import launch, load

LANES = 128  # columns of a program
TOGETHER = 32  # rows


@dataclasses.dataclass(frozen=True)
class Partial:
    """A sum to be made."""

    array: Float32[Array, "outer rows columns"]
    dtype: Any  # of the sum

    @property
    def programs(self) -> int:
        outer, _, columns = self.array.shape
        return outer * pl.cdiv(columns, LANES)


def over_rows(partials: dict[str, Partial], *, interpret: bool) -> dict[str, Float[Array, "outer columns"]]:
    """The sums, by the names of their partials."""
    alone = {name: p.array[:, 0].astype(p.dtype) for name, p in partials.items() if p.array.shape[1] == 1}
    several = {name: p for name, p in partials.items() if name not in alone and p.array.size}
    if not several:
        return alone
    results = launch(
        lambda refs: _kernel(refs, several),
        {name: p.array for name, p in several.items()},
        {f"sum_{name}": jax.ShapeDtypeStruct(p.array.shape[::2], p.dtype) for name, p in several.items()},
        name="selective_scan_bwd_sums",
        grid=(sum(p.programs for p in several.values()),),
        num_warps=LANES // 32,
        interpret=interpret,
    )
    return alone | {name: results[f"sum_{name}"] for name in several}


def _kernel(refs: dict[str, Any], partials: dict[str, Partial]) -> None:
    program, first = pl.program_id(0), 0
    for name, partial in partials.items():
        here = (first <= program) & (program < first + partial.programs)
        pl.when(here)(functools.partial(_sum, refs[name], refs[f"sum_{name}"], program - first))
        first += partial.programs


def _sum(ref: Any, result: Any, program: Array) -> None:
    _, rows, columns = ref.shape
    blocks = jnp.int32(pl.cdiv(columns, LANES))
    outer, block = lax.div(program, blocks), lax.rem(program, blocks)
    lanes = block * LANES + lax.iota(jnp.int32, LANES)
    mask = None if columns % LANES == 0 else lanes < columns

    def add(total: Array, numbers: Sequence[Array | int]) -> Array:
        for x in [load(ref, outer, row, lanes, mask=mask) for row in numbers]:
            total = total + x
        return total

    def some(i: Array, total: Array) -> Array:
        return add(total, [i * TOGETHER + k for k in range(TOGETHER)])

    total = lax.fori_loop(0, rows // TOGETHER, some, jnp.zeros((LANES,), jnp.float32))
    total = add(total, range(rows - rows % TOGETHER, rows))
    plgpu.store(result.at[outer, lanes], total.astype(result.dtype), mask=mask)
