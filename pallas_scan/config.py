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


# Recorded on an RTX 3090 (sm_86) at (4, 512..8192, 256..1024, 16), float32.
_RTX_3090 = ScanConfig(
    fwd=KernelConfig(chunk=8, dim_block=32, num_warps=2, segment=256),
    bwd=KernelConfig(chunk=4, dim_block=32, num_warps=2, segment=256),
)
DEVICE_TABLE = {"NVIDIA GeForce RTX 3090": _RTX_3090}


def choose(sizes: Sizes, device_kind: str, multiprocessors: int) -> ScanConfig:
    """The configuration for a shape on a device: its entry in the table, or one from the device's size."""
    if device_kind in DEVICE_TABLE:
        return DEVICE_TABLE[device_kind]
    return ScanConfig(
        fwd=_sized(KernelConfig(chunk=4, dim_block=128, num_warps=1, segment=4), sizes, multiprocessors),
        bwd=_sized(KernelConfig(chunk=4, dim_block=32, num_warps=1, segment=4), sizes, multiprocessors),
    )


def _sized(base: KernelConfig, sizes: Sizes, multiprocessors: int) -> KernelConfig:
    """base with as many segments as give every multiprocessor 8 programs, of 64 steps at least.

    A second pass doubles the exps, so there is one segment where batch and dim alone come to half of that.
    """
    wanted = 8 * multiprocessors
    programs = max(1, sizes.batch * -(-sizes.dim // base.dim_block))
    segments = 1 if 2 * programs >= wanted else -(-wanted // programs)
    segment = max(64, -(-sizes.seq // segments))
    return dataclasses.replace(base, segment=-(-segment // base.chunk) * base.chunk)


def save_every(dtype: Any) -> int:
    """Steps between saved states: at 16 states they take two activations' bytes, in float32 as in half precision."""
    return 8 if jnp.dtype(dtype).itemsize == 4 else 16
