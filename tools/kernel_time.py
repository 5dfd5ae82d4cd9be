"""GPU time of kernels from the profiler: their own durations, without launches and gaps.

One profile holds many programs, since starting it takes longer than most of them: a marker kernel stands before each
call. A program is called on one set of inputs after another, together larger than the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.profiler import ProfileData

CACHE_BYTES = 2**27  # twice the L2 cache of the largest card we know, an H200's 60 MB
MARKER = "kernel_time_marker"


@dataclasses.dataclass(frozen=True)
class KernelTime:
    median_ms: float  # of the calls' sums over their kernels
    q1_ms: float
    q3_ms: float
    by_kernel: dict[str, float]  # median ms a call, by the kernel's name


def copies(arguments: Any) -> list[Any]:
    """The arguments and as many copies as are larger than the L2 cache together."""
    size = sum(x.nbytes for x in jax.tree.leaves(arguments))
    return [arguments, *(jax.tree.map(jnp.copy, arguments) for _ in range(min(63, max(1, CACHE_BYTES // size))))]


def kernel_times(
    programs: Sequence[Callable[[Any], Any]], rotation: Sequence[Any], *, calls: int = 20
) -> list[KernelTime]:
    """Profiles `calls` calls of each program, each on the next of `rotation`.

    Raises:
      RuntimeError: the profiler lost calls, or saw no kernel in one.
    """
    mark = _marker()
    for program in programs:
        jax.block_until_ready(program(rotation[0]))
    jax.block_until_ready(mark())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for program in programs:
                for i in range(calls):
                    mark()
                    result = program(rotation[i % len(rotation)])
                jax.block_until_ready(result)
                del result
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        events = _kernels(ProfileData.from_file(str(path)))
    marks = [i for i, (name, _) in enumerate(events) if MARKER in name]
    if len(marks) != calls * len(programs):
        raise RuntimeError(f"the profiler saw {len(marks)} of {calls * len(programs)} calls")
    by_call = [events[a + 1 : b] for a, b in zip(marks, [*marks[1:], len(events)], strict=True)]
    if not all(by_call):
        raise RuntimeError("the profiler saw no kernel in a call")
    return [_summary(by_call[i : i + calls]) for i in range(0, len(by_call), calls)]


def _summary(by_call: list[list[tuple[str, float]]]) -> KernelTime:
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(by_call))
    for i, kernels in enumerate(by_call):
        for name, ms in kernels:
            by_kernel[name][i] += ms
    q1, median, q3 = statistics.quantiles([sum(ms for _, ms in kernels) for kernels in by_call], n=4)
    return KernelTime(median, q1, q3, {name: statistics.median(ms) for name, ms in by_kernel.items()})


@functools.cache
def _marker() -> Callable[[], Any]:
    def body(out):
        out[0] = jnp.float32(0.0)

    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    parameters = plgpu.CompilerParams(num_warps=1, num_stages=1)
    return jax.jit(pl.pallas_call(body, out_shape=shape, compiler_params=parameters, name=MARKER))


def _kernels(profile: ProfileData) -> list[tuple[str, float]]:
    """(name, ms) of every kernel on the first GPU's streams, in the order they began."""
    found = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                found += [(event.start_ns, event.name, event.duration_ns / 1e6) for event in line.events]
    return [(name, ms) for _, name, ms in sorted(found)]
