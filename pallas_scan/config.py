"""Configurations of the GPU kernels: small frozen records, checked when they are made."""

from __future__ import annotations

import dataclasses


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
