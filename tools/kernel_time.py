"""GPU time of a compiled function from the profiler: the kernels' own durations, without launches and gaps."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True)
class KernelTime:
    median_ms: float  # of the calls' sums over their kernels
    q1_ms: float
    q3_ms: float
    by_kernel: dict[str, float]  # median ms a call, by the kernel's name


def kernel_time(call: Callable[..., Any], inputs: Sequence[Any], calls: int = 20) -> KernelTime:
    """Profiles `calls` calls, each on the next of `inputs`: give it several, larger together than the L2 cache.

    Raises:
      RuntimeError: the profiler saw no kernels, or not the same number in every call.
    """
    for x in inputs:
        jax.block_until_ready(call(x))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(calls):
                jax.block_until_ready(call(inputs[i % len(inputs)]))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        events = _kernels(ProfileData.from_file(str(path)))
    if not events or len(events) % calls:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {calls} calls, expected a multiple of the calls")
    each = len(events) // calls
    rows = [events[i * each : (i + 1) * each] for i in range(calls)]
    sums = [sum(ms for _, ms in row) for row in rows]
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0.0] * calls)
    for i, row in enumerate(rows):
        for name, ms in row:
            by_kernel[name][i] += ms
    q1, median, q3 = statistics.quantiles(sums, n=4)
    return KernelTime(median, q1, q3, {name: statistics.median(ms) for name, ms in by_kernel.items()})


def _kernels(profile: ProfileData) -> list[tuple[str, float]]:
    """(name, ms) of every kernel on the GPU's streams, in the order they began."""
    found = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                found += [(event.start_ns, event.name, event.duration_ns / 1e6) for event in line.events]
    return [(name, ms) for _, name, ms in sorted(found)]
