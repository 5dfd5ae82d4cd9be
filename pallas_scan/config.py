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


# What the rules below rest on was measured on an H200 (docs/performance-notes.md). Every card since sm_70 has 65,536
# registers a multiprocessor, which hold 8 one-warp programs that use all 255 they can.
RESIDENT = 8  # programs of a multiprocessor
UNIT = 16  # a segment's steps are a multiple


def _forward(sizes: Sizes, multiprocessors: int) -> KernelConfig:
    resident = RESIDENT * multiprocessors
    # One pass, half the exps of two, where narrow tiles of 8 values a thread come to that many programs alone.
    dim_block = max(1, 256 // (1 << (sizes.state - 1).bit_length()))
    if 16 * _programs(dim_block, sizes, sizes.seq) >= 15 * resident:
        return KernelConfig(chunk=8, dim_block=dim_block, num_warps=1, segment=-(-sizes.seq // 8) * 8)
    # Wide tiles have the fewest instructions, where segments of 32 steps leave half the programs or more.
    if 2 * _programs(128, sizes, 32) >= resident:
        return _segmented(128, sizes, resident=resident, shortest=32, idle=0.0)
    return _segmented(32, sizes, resident=2 * resident, shortest=16, idle=0.0)


def _backward(sizes: Sizes, multiprocessors: int) -> KernelConfig:
    resident = RESIDENT * multiprocessors
    dim_block = 32 if 2 * _programs(32, sizes, 32) >= resident else 16
    return _segmented(dim_block, sizes, resident=resident, shortest=32, idle=0.12)


def _programs(dim_block: int, sizes: Sizes, segment: int) -> int:
    return sizes.batch * -(-sizes.dim // dim_block) * -(-sizes.seq // segment)


def _segmented(dim_block: int, sizes: Sizes, *, resident: int, shortest: int, idle: float) -> KernelConfig:
    """Segments, none shorter than `shortest` steps, whose programs fill whole waves of `resident`: a wave's last
    programs take as long as its first, however few they are.

    Args:
      idle: the part of a wave that is lost at the end, when programs of unlike length finish one by one.
    """
    rows = _programs(dim_block, sizes, sizes.seq) / resident
    best: tuple[float, int] | None = None
    for count in range(1, max(1, sizes.seq // shortest) + 1):
        segment = -(-sizes.seq // (count * UNIT)) * UNIT
        waves = -(-_programs(dim_block, sizes, segment) // resident)
        # In steps of a full wave: a program's own and its start, masks where the last segment ends early, and the
        # summaries, combined one after another.
        steps = (waves + idle) * (segment * (1.1 if sizes.seq % segment else 1.0) + 4.0)
        cost = steps + count * (0.4 + 2.5 * rows)
        if best is None or cost < best[0]:
            best = cost, segment
        if waves > 8:
            break
    assert best is not None
    return KernelConfig(chunk=4, dim_block=dim_block, num_warps=1, segment=best[1])


def save_every(dtype: Any) -> int:
    """Steps between saved states: at 16 states they take 2 activations' bytes in float32, 2.7 in half precision, what
    the backward may keep within 1.5 times the bytes of u, delta, dy, du and ddelta."""
    return 8 if jnp.dtype(dtype).itemsize == 4 else 12
