"""Times the implementations of the selective scan against each other, and reads their memory from the compiled program.

    python -m tools.benchmark                       # a table within two minutes
    python -m tools.benchmark --preset=seed         # every cell of the recorded CPU table
    python -m tools.benchmark --shapes=1x4096x512x16 --implementations=scan,chunked --compare=results/cpu.json
    python -m tools.benchmark --preset=gpu --dtypes=float32,bfloat16    # every cell of a GPU's table

A cell is one shape in one dtype and mode; tools/measurement.py says how its implementations are measured.

On a GPU `median_ms` is the host's time and `kernel_ms` the kernels' own, from the profiler, on inputs that rotate
through more memory than the L2 cache. `floor_ms` is tools/roofline.py's. Programs are compiled several at once, so
`compile_s` is no more than a hint there.

The rows so far lie beside the recording, in its name with .partial behind, until it is written: hours are not lost to
an interrupt.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from absl import app, flags
from rich.console import Console

import pallas_scan
from pallas_scan import _compat
from tools import inputs, recording, roofline, torch_program
from tools.benchmark_table import table
from tools.measurement import APART, Candidate, Cell, measure_cell
from tools.progress import bar
from tools.torch_program import TorchProgram

IMPLEMENTATIONS = ("scan", "assoc", "chunked", "pallas", *torch_program.NAMES)
MODES = ("fwd", "fwd_bwd")
DTYPES = ("float32", "bfloat16", "float16")

_PRESETS = {
    "default": [(4, seq, dim, 16) for seq, dim in ((512, 256), (2048, 256), (512, 1024))],
    "seed": [(4, seq, dim, 16) for seq in (512, 2048, 8192) for dim in (256, 512, 1024)],
    "gpu": [
        *((4, seq, dim, 16) for seq, dim in ((512, 256), (512, 1024), (2048, 256), (2048, 512), (2048, 1024))),
        *((4, 8192, dim, 16) for dim in (256, 1024)),
        *((8, 2048, dim, 16) for dim in (1536, 5120)),
        (1, 65536, 1536, 16),
        (4, 2048, 1024, 64),
        *((1, 2**n, 1024, 16) for n in range(9, 20)),  # the Mamba paper's sweep, its appendix E.5
    ],
}
# The longest seq of an implementation in a preset: associative_scan keeps gigabytes and needs seconds a call beyond,
# and a plain lax.scan launches kernels for every step.
_LIMITS = {"seed": {"assoc": 2048, "mambapy": 2048}, "gpu": {"assoc": 2048, "scan": 8192}}
_PRESET = flags.DEFINE_enum("preset", "default", sorted(_PRESETS), "Which shapes to run, unless --shapes is given.")
_SHAPES = flags.DEFINE_list("shapes", None, "Shapes, batch x seq x dim x state: 4x512x256x16,4x2048x256x16.")
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    None,
    f"Any of {', '.join(IMPLEMENTATIONS)}; by default scan, assoc, on a CPU chunked and mambapy, on a GPU pallas and "
    f"{', '.join(torch_program.NAMES)}, as far as they can be imported.",
)
_MODES = flags.DEFINE_list("modes", list(MODES), f"Any of {', '.join(MODES)}.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], f"dtypes of u, delta, B and C: any of {', '.join(DTYPES)}.")
_SAMPLES = flags.DEFINE_integer("samples", 7, "Samples a cell and implementation, at most.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 6.0, "Sampling those of a cell that take turns stops after this many seconds.", lower_bound=0.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUT = flags.DEFINE_string("out", "benchmark.json", "Where to write the recording.")
_COMPARE = flags.DEFINE_string("compare", None, "Another recording, to put beside this one.")


def _each(allowed: tuple[str, ...]) -> Callable[[list[str]], bool]:
    return lambda values: values is None or (bool(values) and set(values) <= set(allowed))


def _is_recording(path: str | None) -> bool:
    try:
        if path is not None:
            recording.read_results(path)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
    return True


flags.register_validator(_IMPLEMENTATIONS, _each(IMPLEMENTATIONS), message=f"expected any of {IMPLEMENTATIONS}")
flags.register_validator(_MODES, _each(MODES), message=f"expected any of {MODES}")
flags.register_validator(_DTYPES, _each(DTYPES), message=f"expected any of {DTYPES}")
flags.register_validator(_SHAPES, inputs.are_shapes)
flags.register_validator(_COMPARE, _is_recording)


def function(implementation: str, mode: str) -> Callable[[dict[str, jax.Array]], Any]:
    """The program that is measured: out, or the gradients of every input of sum(out²) / 2."""

    def forward(arguments):
        return pallas_scan.scan(**arguments, implementation=implementation)

    def gradients(arguments):
        out, pullback = jax.vjp(forward, arguments)
        return pullback(out)[0]

    return forward if mode == "fwd" else gradients


def _compile(name: str, lowered: Any) -> Candidate:
    start = time.perf_counter()
    return Candidate(name, lowered.compile(), time.perf_counter() - start)


def compiled(cells: list[Cell], threads: int) -> Iterator[tuple[Cell, list[Candidate]]]:
    """Each cell with its programs. On several threads the following cells' are under way."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        waiting: collections.deque = collections.deque()

        def submit(cell: Cell) -> None:
            arguments = jax.eval_shape(functools.partial(inputs.mamba_inputs, cell.shape, cell.dtype))
            jobs: list[concurrent.futures.Future[Candidate]] = []
            for name in cell.programs:
                if name in torch_program.NAMES:  # compiled at their first call
                    jobs.append(pool.submit(Candidate, name, TorchProgram(name, cell.mode), 0.0))
                else:
                    jobs.append(pool.submit(_compile, name, jax.jit(function(name, cell.mode)).lower(arguments)))
            waiting.append((cell, jobs))

        ahead = threads if threads > 1 else 0
        for i in range(len(cells) + ahead):
            if i < len(cells):
                submit(cells[i])
            if i >= ahead and waiting:
                cell, futures = waiting.popleft()
                yield cell, [future.result() for future in futures]


def plan(shapes: list[inputs.Shape]) -> list[Cell]:
    names = _IMPLEMENTATIONS.value
    if names is None:
        names = ["scan", "assoc", "chunked", *filter(torch_program.importable, ["mambapy"])]
        if _compat.gpu_backend():
            names = ["scan", "assoc", "pallas", *filter(torch_program.importable, torch_program.NAMES)]
    limits = _LIMITS.get(_PRESET.value, {}) if _SHAPES.value is None else {}
    cells = []
    for shape, dtype, mode in itertools.product(shapes, _DTYPES.value, MODES):
        fitting = tuple(n for n in IMPLEMENTATIONS if n in names and shape[1] <= limits.get(n, shape[1]))
        if fitting and mode in _MODES.value:
            cells.append(Cell(shape, dtype, mode, fitting))
    return cells


def _emptied(cells: collections.deque) -> Iterator[Any]:
    """A cell is let go before the next, with its arrays."""
    while cells:
        yield cells.popleft()


def run(cells: list[Cell], console: Console, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Every cell's rows; `keep` is handed those so far after each cell."""
    results: list[dict[str, Any]] = []
    on_gpu = _compat.gpu_backend()
    threads = max(1, (os.cpu_count() or 1) - 1) if on_gpu else 1
    with bar(console) as progress:
        task = progress.add_task("compiling", total=len(cells))
        work: Iterable[tuple[Cell, list[Candidate]]] = compiled(cells, threads)
        if on_gpu:  # all before the first is measured: XLA tries variants on the GPU as it compiles
            work = _emptied(collections.deque(progress.track(work, total=len(cells), description="compiling")))
        for cell, programs in work:
            progress.update(task, description=str(cell))
            start = time.perf_counter()
            results += measure_cell(cell, programs, samples=_SAMPLES.value, seconds=_SECONDS.value, seed=_SEED.value)
            keep(results)
            progress.advance(task)
            if not console.is_terminal:  # where a bar shows nothing before its end
                print(f"{cell}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return results


def record(shapes: list[inputs.Shape], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The recording. Its config's keys are those of the first recordings, which had one batch, state and dtype."""
    config: dict[str, Any] = {
        "batch": shapes[0][0],
        "state": shapes[0][3],
        "dtype": _DTYPES.value[0] if len(_DTYPES.value) == 1 else None,
        "gpu_scan_config": None,
        "note": "rel_err = max|out-scan| / max|scan| (max over out or all grads)",
        "note_runs": "implementations of a cell take turns, "
        f"{' and '.join(APART)} after the others; seed {_SEED.value}; preset {_PRESET.value}; "
        f"processor {recording.processor_name()}",
    }
    if _compat.gpu_backend():
        config["ceilings"] = dataclasses.asdict(roofline.ceilings())
    return {"device": recording.device_record(), "config": config, "results": results}


def write(path: str | os.PathLike[str], value: Any) -> None:
    """recording.write_json cleans up behind a KeyboardInterrupt, but not behind `_interrupted`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    recording.write_json(path, value)
    signal.signal(signal.SIGINT, before)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    shapes = [inputs.parse_shape(s) for s in _SHAPES.value] if _SHAPES.value else _PRESETS[_PRESET.value]
    console = Console(width=None if sys.stdout.isatty() else 150)
    cells = plan(shapes)
    print(f"{len(cells)} cells, to be written to {_OUT.value}", file=sys.stderr, flush=True)
    partial = pathlib.Path(f"{_OUT.value}.partial")
    results = run(cells, Console(stderr=True), lambda rows: write(partial, {"results": rows}))
    other = recording.read_results(_COMPARE.value) if _COMPARE.value else None
    console.print(table(results, other))
    write(_OUT.value, record(shapes, results))
    partial.unlink(missing_ok=True)
    console.print(f"wrote {_OUT.value}")


def _interrupted(*_: Any) -> None:
    """At once: a KeyboardInterrupt raised inside a callback of XLA's is lost, and an orderly exit while its threads are
    at work can crash."""
    print("interrupted; nothing was overwritten", file=sys.stderr, flush=True)
    os._exit(130)


def command() -> None:
    signal.signal(signal.SIGINT, _interrupted)
    try:
        app.run(main)
    except KeyboardInterrupt:
        _interrupted()
    except OSError as error:
        sys.exit(f"{error}; nothing was overwritten")


if __name__ == "__main__":
    command()
