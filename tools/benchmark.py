"""Times the implementations of the selective scan against each other, and reads their memory from the compiled program.

    python -m tools.benchmark                       # a table within two minutes
    python -m tools.benchmark --preset=seed         # every cell of the recorded CPU table
    python -m tools.benchmark --shapes=1x4096x512x16 --implementations=scan,chunked --compare=results/cpu.json

A cell is one shape in one mode. Its implementations take turns, sample by sample, so that a change in the machine's
speed reaches all of them; times are medians of samples, a sample being the mean of `inner` calls.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pallas_scan
from tools import inputs, recording

IMPLEMENTATIONS = ("scan", "assoc", "chunked")
MODES = ("fwd", "fwd_bwd")
MEBIBYTE = 2**20

_PRESETS = {
    "default": [(4, seq, dim, 16) for seq, dim in ((512, 256), (2048, 256), (512, 1024))],
    "seed": [(4, seq, dim, 16) for seq in (512, 2048, 8192) for dim in (256, 512, 1024)],
}
# associative_scan keeps gigabytes and needs seconds a call there; the recorded table leaves it out too.
_ASSOC_LIMIT = {"seed": 2048}

_PRESET = flags.DEFINE_enum("preset", "default", sorted(_PRESETS), "Which shapes to run, unless --shapes is given.")
_SHAPES = flags.DEFINE_list("shapes", None, "Shapes, batch x seq x dim x state: 4x512x256x16,4x2048x256x16.")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", list(IMPLEMENTATIONS), f"Any of {', '.join(IMPLEMENTATIONS)}.")
_MODES = flags.DEFINE_list("modes", list(MODES), f"Any of {', '.join(MODES)}.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "dtype of u, delta, B and C.")
_SAMPLES = flags.DEFINE_integer("samples", 7, "Samples a cell and implementation, at most.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 6.0, "Sampling a cell stops after this many seconds.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUT = flags.DEFINE_string("out", "benchmark.json", "Where to write the recording.")
_COMPARE = flags.DEFINE_string("compare", None, "Another recording, to put beside this one.")


def _each(allowed: tuple[str, ...]) -> Callable[[list[str]], bool]:
    return lambda values: bool(values) and set(values) <= set(allowed)


def _is_recording(path: str | None) -> bool:
    if path is None:
        return True
    try:
        return isinstance(recording.read_json(path)["results"], list)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise flags.ValidationError(f"{path}: not a recording ({error})") from error


flags.register_validator(_IMPLEMENTATIONS, _each(IMPLEMENTATIONS), message=f"expected any of {IMPLEMENTATIONS}")
flags.register_validator(_MODES, _each(MODES), message=f"expected any of {MODES}")
flags.register_validator(_SHAPES, inputs.are_shapes)
flags.register_validator(_COMPARE, _is_recording)


@dataclasses.dataclass
class Candidate:
    """One implementation of one cell, compiled."""

    name: str
    call: Callable[[], Any]
    memory: Any
    compile_s: float
    inner: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    def sample(self) -> None:
        start = time.perf_counter()
        for _ in range(self.inner):
            result = self.call()
        jax.block_until_ready(result)
        self.seconds.append((time.perf_counter() - start) / self.inner)


def function(implementation: str, mode: str) -> Callable[[dict[str, jax.Array]], Any]:
    """The program that is measured: out, or the gradients of every input of sum(out²) / 2."""

    def forward(arguments):
        return pallas_scan.scan(**arguments, implementation=implementation)

    def loss(arguments):
        return 0.5 * jnp.sum(jnp.square(forward(arguments).astype(jnp.float32)))

    return forward if mode == "fwd" else jax.grad(loss)


def prepare(implementation: str, mode: str, arguments: dict[str, jax.Array]) -> Candidate:
    """Compiles, runs once, and sets `inner` so that a sample takes about 20 ms."""
    lowered = jax.jit(function(implementation, mode)).lower(arguments)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start
    candidate = Candidate(implementation, lambda: compiled(arguments), compiled.memory_analysis(), compile_s)
    jax.block_until_ready(candidate.call())
    candidate.sample()
    candidate.inner = max(1, int(0.02 / candidate.seconds.pop()))
    return candidate


def relative_error(got: Any, want: Any) -> float:
    """max |got - want| / max |want|, the largest over the leaves."""

    def one(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))


def measure_cell(
    shape: inputs.Shape, mode: str, implementations: list[str], *, dtype: str, samples: int, seconds: float, seed: int
) -> Iterator[dict[str, Any] | None]:
    """Yields None after each step of work (for the progress bar) and at the end one row an implementation."""
    arguments = inputs.mamba_inputs(shape, dtype, seed)
    candidates = []
    errors = {}
    want = None
    for name in ["scan", *(n for n in implementations if n != "scan")]:
        candidate = prepare(name, mode, arguments)
        result = jax.block_until_ready(candidate.call())
        if name == "scan":
            want = result
        else:
            errors[name] = relative_error(result, want)
        if name in implementations:
            candidates.append(candidate)
            yield None
    del want, result
    start = time.perf_counter()
    for taken in range(samples):
        if taken >= 3 and time.perf_counter() - start > seconds:
            break
        for candidate in candidates:
            candidate.sample()
    for candidate in candidates:
        q1, median, q3 = np.quantile(np.array(candidate.seconds) * 1e3, (0.25, 0.5, 0.75))
        row = {
            "impl": candidate.name,
            "mode": mode,
            "shape": dict(zip(("batch", "seq", "dim", "state"), shape, strict=True)),
            "xla_temp_mb": round(candidate.memory.temp_size_in_bytes / MEBIBYTE, 2),
            "xla_arg_mb": round(candidate.memory.argument_size_in_bytes / MEBIBYTE, 2),
            "xla_out_mb": round(candidate.memory.output_size_in_bytes / MEBIBYTE, 2),
            "compile_s": candidate.compile_s,
            "inner": candidate.inner,
            "median_ms": float(median),
            "q1_ms": float(q1),
            "q3_ms": float(q3),
        }
        if candidate.name in errors:
            row["rel_err_vs_scan"] = errors[candidate.name]
        yield row


def table(results: list[dict[str, Any]], other: list[dict[str, Any]] | None = None) -> Table:
    """A row an implementation and cell; ratios are scan's figure over the implementation's, so more is better."""
    view = Table(title="ratios: scan's figure / this one's (more is better)", title_justify="left")
    columns = [
        "batch x seq x dim x state",
        "mode",
        "impl",
        "ms",
        "x scan",
        "temp MB",
        "x scan",
        "compile s",
        "rel. err",
    ]
    columns += ["other's ms", "x other", "other's temp MB", "other's x scan"] if other is not None else []
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i < 3 else "right")

    def key(row):
        return (*row["shape"].values(), row["mode"], row["impl"])

    theirs = {key(row): row for row in other or []}
    ours = {key(row): row for row in results}
    cell = None
    for row in results:
        base = ours.get((*key(row)[:-1], "scan"))
        if cell not in (None, key(row)[:-1]):
            view.add_section()
        fresh, cell = cell != key(row)[:-1], key(row)[:-1]
        cells = [
            " x ".join(str(v) for v in row["shape"].values()) if fresh else "",
            row["mode"] if fresh else "",
            row["impl"],
            f"{row['median_ms']:.1f}",
            _ratio(base, row, "median_ms"),
            f"{row['xla_temp_mb']:.2f}",
            _ratio(base, row, "xla_temp_mb"),
            f"{row['compile_s']:.2f}",
            f"{row['rel_err_vs_scan']:.1e}" if "rel_err_vs_scan" in row else "",
        ]
        if other is not None:
            match = theirs.get(key(row))
            their_base = theirs.get((*key(row)[:-1], "scan"))
            cells += [
                f"{match['median_ms']:.1f}" if match else "",
                _ratio(match, row, "median_ms"),
                f"{match['xla_temp_mb']:.2f}" if match else "",
                _ratio(their_base, match, "median_ms"),
            ]
        view.add_row(*cells)
    return view


def _ratio(base: dict[str, Any] | None, row: dict[str, Any] | None, key: str) -> str:
    return f"{base[key] / row[key]:.2f}" if base and row and row[key] else ""


def run(shapes: list[inputs.Shape], console: Console) -> list[dict[str, Any]]:
    names = [name for name in IMPLEMENTATIONS if name in _IMPLEMENTATIONS.value]
    limit = _ASSOC_LIMIT.get(_PRESET.value) if _SHAPES.value is None else None
    cells = []
    for shape in shapes:
        fitting = [n for n in names if n != "assoc" or limit is None or shape[1] <= limit]
        cells += [(shape, mode, fitting) for mode in MODES if mode in _MODES.value and fitting]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(c[2]) + 1 for c in cells))
        for shape, mode, fitting in cells:
            progress.update(task, description=f"{'x'.join(map(str, shape))} {mode}")
            steps = measure_cell(
                shape,
                mode,
                fitting,
                dtype=_DTYPE.value,
                samples=_SAMPLES.value,
                seconds=_SECONDS.value,
                seed=_SEED.value,
            )
            for row in steps:
                if row is None:
                    progress.advance(task)
                else:
                    results.append(row)
            progress.advance(task)
    return results


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    shapes = [inputs.parse_shape(s) for s in _SHAPES.value] if _SHAPES.value else _PRESETS[_PRESET.value]
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = run(shapes, Console(stderr=True))
    record = {
        "device": recording.device_record(),
        "config": {
            "batch": shapes[0][0],
            "state": shapes[0][3],
            "dtype": _DTYPE.value,
            "gpu_scan_config": None,
            "note": "rel_err = max|out-scan| / max|scan| (max over out or all grads)",
            "note_runs": f"implementations of a cell take turns; seed {_SEED.value}; preset {_PRESET.value}",
        },
        "results": results,
    }
    other = recording.read_json(_COMPARE.value)["results"] if _COMPARE.value else None
    console.print(table(results, other))
    recording.write_json(_OUT.value, record)
    console.print(f"wrote {_OUT.value}")


def command() -> None:
    try:
        app.run(main)
    except KeyboardInterrupt:
        print("interrupted; nothing was overwritten", file=sys.stderr, flush=True)
        os._exit(130)  # at once: XLA's threads are still at work, and an orderly exit under them can crash
    except OSError as error:
        sys.exit(f"{error}; nothing was overwritten")


if __name__ == "__main__":
    command()
