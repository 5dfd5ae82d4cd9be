"""Configurations of the GPU kernels: small frozen records, checked when they are made."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp


class Sizes(NamedTuple):
    batch: int
    seq: int
    dim: int
    state: int


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How one kernel is cut up.

    Attributes:
      chunk: steps whose loads are issued together; a power of two.
      dim_block: channels a program handles; a power of two.
      num_warps: warps a program runs on; a power of two, at most 32.
      segment: steps a program handles; segments of one sequence run in parallel. A multiple of chunk.

    Raises:
      TypeError: a field is not an int.
      ValueError: a field is out of range.
    """

    chunk: int
    dim_block: int
    num_warps: int
    segment: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"KernelConfig.{field.name}: got {value!r}, expected an int")
            if value < 1:
                raise ValueError(f"KernelConfig.{field.name}: got {value}, expected at least 1")
        for name in ("chunk", "dim_block", "num_warps"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"KernelConfig.{name}: got {value}, expected a power of two")
        if self.num_warps > 32:
            raise ValueError(f"KernelConfig.num_warps: got {self.num_warps}, expected at most 32")
        if self.segment % self.chunk:
            raise ValueError(
                f"KernelConfig.segment: got {self.segment}, expected a multiple of chunk, which is {self.chunk}"
            )


@dataclasses.dataclass(frozen=True)
class ScanConfig:
    """The configurations of the forward and of the backward kernels."""

    fwd: KernelConfig
    bwd: KernelConfig

    def __post_init__(self) -> None:
        for name in ("fwd", "bwd"):
            if not isinstance(getattr(self, name), KernelConfig):
                raise TypeError(f"ScanConfig.{name}: got {getattr(self, name)!r}, expected a KernelConfig")


def rules(sizes: Sizes, multiprocessors: int) -> ScanConfig:
    """The configuration for a shape on a device of that size."""
    return ScanConfig(fwd=_forward(sizes, multiprocessors), bwd=_backward(sizes, multiprocessors))


# What the rules below rest on was measured on an H200 (docs/performance-notes.md).


def _forward(sizes: Sizes, multiprocessors: int) -> KernelConfig:
    # Rows and channels alone give every multiprocessor 8 warps of narrow tiles: one pass, half the exps of two.
    if sizes.batch * -(-sizes.dim // 16) >= 8 * multiprocessors:
        return KernelConfig(chunk=8, dim_block=16, num_warps=1, segment=-(-sizes.seq // 8) * 8)
    # Wide tiles have the fewest instructions, where that leaves enough of them.
    if sizes.batch * -(-sizes.dim // 128) * -(-sizes.seq // 64) >= 4 * multiprocessors:
        return _segmented(128, sizes, programs=24 * multiprocessors, shortest=64)
    return _segmented(32, sizes, programs=24 * multiprocessors, shortest=32)


def _backward(sizes: Sizes, multiprocessors: int) -> KernelConfig:
    enough = sizes.batch * -(-sizes.dim // 32) * -(-sizes.seq // 64) >= 4 * multiprocessors
    return _segmented(32 if enough else 16, sizes, programs=16 * multiprocessors, shortest=64)


def _segmented(dim_block: int, sizes: Sizes, *, programs: int, shortest: int) -> KernelConfig:
    """As many segments as come to `programs` programs, none shorter than `shortest` steps."""
    a_segment = max(1, sizes.batch * -(-sizes.dim // dim_block))
    segment = max(shortest, -(-sizes.seq // -(-programs // a_segment)))
    return KernelConfig(chunk=4, dim_block=dim_block, num_warps=1, segment=-(-segment // 4) * 4)


def save_every(dtype: Any) -> int:
    """Steps between saved states: at 16 states they take two activations' bytes, in float32 as in half precision."""
    return 8 if jnp.dtype(dtype).itemsize == 4 else 16
