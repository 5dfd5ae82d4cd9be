"""GPU time of the kernels from the profiler: their own durations, without launches and gaps.

python -m tools.kernel_time --shapes=4x2048x1024x16,8x2048x1536x16 --dtype=bfloat16
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.profiler import ProfileData
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pallas_scan
from pallas_scan import _compat
from tools import inputs

_SHAPES = flags.DEFINE_list("shapes", ["4x2048x1024x16"], "Shapes, batch x seq x dim x state.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "dtype of u, delta, B and C.")
flags.register_validator(_SHAPES, inputs.are_shapes)


@dataclasses.dataclass(frozen=True)
class KernelTime:
    median_ms: float  # of the calls' sums over their kernels
    q1_ms: float
    q3_ms: float
    by_kernel: dict[str, float]  # median ms a call, by the kernel's name


def kernel_time(call: Callable[..., Any], rotation: Sequence[Any], calls: int = 20) -> KernelTime:
    """Profiles `calls` calls, each on the next of `rotation`: give it several, larger together than the L2 cache.

    Raises:
      RuntimeError: the profiler saw no kernels, or not the same number in every call.
    """
    for x in rotation:
        jax.block_until_ready(call(x))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(calls):
                jax.block_until_ready(call(rotation[i % len(rotation)]))
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


def _forward(arguments: dict[str, Any]) -> Any:
    return pallas_scan.scan(**arguments, implementation="pallas")


def _gradients(arguments: dict[str, jax.Array]) -> dict[str, jax.Array]:
    out, pullback = jax.vjp(_forward, arguments)
    return pullback(jnp.ones_like(out))[0]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if not _compat.gpu_backend():
        raise app.UsageError(f"got the backend {jax.default_backend()}, expected an NVIDIA GPU")
    table = Table("batch x seq x dim x state", "mode", "ms", "q1", "q3", "of which")
    for text in track(_SHAPES.value, console=Console(stderr=True), transient=True):
        rotation = [inputs.mamba_inputs(inputs.parse_shape(text), _DTYPE.value, seed) for seed in range(3)]
        for mode, function in (("fwd", _forward), ("fwd_bwd", _gradients)):
            time = kernel_time(jax.jit(function), rotation)
            parts = ", ".join(f"{name} {ms:.4f}" for name, ms in time.by_kernel.items())
            table.add_row(text, mode, f"{time.median_ms:.4f}", f"{time.q1_ms:.4f}", f"{time.q3_ms:.4f}", parts)
    Console().print(table)


if __name__ == "__main__":
    app.run(main)
