"""Times the implementations of the selective scan against each other, and reads their memory from the compiled program.

    python -m tools.benchmark                       # a table within two minutes
    python -m tools.benchmark --preset=seed         # every cell of the recorded CPU table
    python -m tools.benchmark --shapes=1x4096x512x16 --implementations=scan,chunked --compare=results/cpu.json
    python -m tools.benchmark --preset=gpu --dtypes=float32,bfloat16    # every cell of a GPU's table

A cell is one shape in one dtype and mode. Its implementations take turns, sample by sample, so that a change in the
machine's speed reaches all of them; times are medians of samples, a sample being the mean of `inner` calls. Where a
call takes less than a second, one that is not timed comes before a sample: the first after another implementation
pays for the pages that the system took back from it. Those that hold every state several times over, assoc and
mambapy, take turns with each other once the rest is done: what they free, the rest would pay for. One that runs out
of memory has an `error` and no times.

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
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

import pallas_scan
from pallas_scan import _compat
from tools import inputs, recording, roofline, torch_program
from tools.benchmark_table import table
from tools.errors import relative_errors
from tools.kernel_time import copies, kernel_times
from tools.progress import bar
from tools.torch_program import TorchProgram

IMPLEMENTATIONS = ("scan", "assoc", "chunked", "pallas", *torch_program.NAMES)
MODES = ("fwd", "fwd_bwd")
DTYPES = ("float32", "bfloat16", "float16")
MEBIBYTE = 2**20
LONG = 1.0  # seconds of a call that need no other before it
# Of gigabytes a call: on a virtual machine the host takes back what they free, and another's next call waits for pages.
_APART = ("assoc", "mambapy")

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
REFERENCE_LIMIT = 8192  # seq beyond which scan, when it was not asked for, is too slow to compare with
# Those whose kernels are profiled: the others launch too many.
_PROFILED = ("assoc", "pallas", *torch_program.NAMES)

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


class Cell(NamedTuple):
    shape: inputs.Shape
    dtype: str
    mode: str
    implementations: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.mode}"

    @property
    def programs(self) -> list[str]:
        """What to compile: scan first, which the others' results are compared with where it can be waited for."""
        others = [name for name in self.implementations if name != "scan"]
        return ["scan", *others] if "scan" in self.implementations or self.shape[1] <= REFERENCE_LIMIT else others


@dataclasses.dataclass
class Candidate:
    """One implementation of one cell, compiled."""

    name: str
    program: Any
    compile_s: float
    arguments: Any = None
    inner: int = 1
    alone: bool = False  # whether no call comes before a sample
    seconds: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None  # why it did not run

    def call(self) -> Any:
        """
        Raises:
          MemoryError: a CPU lacks the memory; the kernel would end the process, and not tell.
        """
        if not isinstance(self.program, TorchProgram) and not _compat.gpu_backend():
            needed, free = self.bytes_used()[0], available_bytes()
            if needed > free:
                raise MemoryError(f"out of memory: {needed / 1e9:.1f} GB of temporaries, {free / 1e9:.1f} GB free")
        return jax.block_until_ready(self.program(self.arguments))

    def sample(self) -> None:
        if not self.alone:
            self._repeat(1)
        self.seconds.append(self._repeat(self.inner))

    def _repeat(self, count: int) -> float:
        """Seconds a call."""
        torch = isinstance(self.program, TorchProgram)
        start = time.perf_counter()
        for _ in range(count):
            result = (self.program.launch if torch else self.program)(self.arguments)
        if torch:
            self.program.synchronize()
        else:
            jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    def warm_up(self) -> None:
        """Sets `inner` so that a sample takes about 20 ms."""
        seconds = self._repeat(1)
        self.inner, self.alone = max(1, int(0.02 / seconds)), seconds > LONG

    def quartiles_ms(self) -> list[float | None]:
        """Of the samples; None where it did not run."""
        if self.error is not None:
            return [None, None, None]
        return (np.quantile(self.seconds, (0.25, 0.5, 0.75)) * 1e3).tolist()

    def bytes_used(self) -> tuple[int, int, int]:
        """Of temporaries, arguments and results; torch tells only by running."""
        if isinstance(self.program, TorchProgram):
            return (0, 0, 0) if self.error is not None else self.program.bytes_used(self.arguments)
        memory = self.program.memory_analysis()
        return memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes


def available_bytes() -> float:
    """Memory that a new allocation can have without swapping; infinite where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return math.inf if kibibytes is None else 1024.0 * float(kibibytes)


def _is_out_of_memory(error: BaseException) -> bool:
    """What XLA and torch raise for it has no type in common."""
    told = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in told for words in ("resource_exhausted", "out of memory", "can't allocate memory")
    )


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


def measure_cell(cell: Cell, programs: list[Candidate], *, samples: int, seconds: float, seed: int) -> list[dict]:
    """One row an implementation."""
    arguments = inputs.mamba_inputs(cell.shape, cell.dtype, seed)
    errors = {}
    want = None
    for group in _groups(programs):
        for candidate in group:
            result = _first_call(candidate, arguments)
            if candidate.name == "scan":
                want = result
            elif result is not None and want is not None:
                difference = relative_errors(result, want)
                errors[candidate.name] = float(np.max(jax.tree.leaves(difference)))  # NaN stays
            del result
        _take_turns([c for c in group if c.name in cell.implementations and c.error is None], samples, seconds)
    del want
    chosen = [c for c in programs if c.name in cell.implementations]
    candidates = [c for c in chosen if c.error is None]
    rows = []
    for candidate in chosen:
        q1, median, q3 = candidate.quartiles_ms()
        temporary, given, returned = candidate.bytes_used()
        row: dict[str, Any] = {
            "impl": candidate.name,
            "mode": cell.mode,
            "dtype": cell.dtype,
            "shape": dict(zip(("batch", "seq", "dim", "state"), cell.shape, strict=True)),
            "xla_temp_mb": round(temporary / MEBIBYTE, 2),
            "xla_arg_mb": round(given / MEBIBYTE, 2),
            "xla_out_mb": round(returned / MEBIBYTE, 2),
            "compile_s": candidate.compile_s,
            "inner": candidate.inner,
            "median_ms": median,
            "q1_ms": q1,
            "q3_ms": q3,
        }
        if candidate.error is not None:
            row["error"] = candidate.error
        if candidate.name in errors:
            row["rel_err_vs_scan"] = errors[candidate.name]
        rows.append(row)
    if _compat.gpu_backend():
        _add_kernel_times(cell, candidates, [row for row in rows if "error" not in row])
    return rows


def _groups(programs: list[Candidate]) -> list[list[Candidate]]:
    """Those that are measured together, in the order of the groups."""
    return [[c for c in programs if (c.name in _APART) == apart] for apart in (False, True)]


def _first_call(candidate: Candidate, arguments: dict[str, jax.Array]) -> Any:
    """Its result; None, and `error` set, where memory does not suffice."""
    candidate.arguments = arguments
    start = time.perf_counter()
    try:
        result = candidate.call()
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        candidate.error = str(error).splitlines()[0]
        return None
    if isinstance(candidate.program, TorchProgram):
        candidate.compile_s = time.perf_counter() - start
    return result


def _take_turns(candidates: list[Candidate], samples: int, seconds: float) -> None:
    for candidate in candidates:
        candidate.warm_up()
    start = time.perf_counter()
    for taken in range(samples):
        if taken >= 3 and time.perf_counter() - start > seconds:
            break
        for candidate in candidates:
            candidate.sample()


def _add_kernel_times(cell: Cell, candidates: list[Candidate], rows: list[dict[str, Any]]) -> None:
    """The columns that a GPU's rows have on top."""
    floor = roofline.floor_ms(cell.shape, cell.mode, cell.dtype, roofline.ceilings())
    for row in rows:
        row["peak_mb"] = round(row["xla_temp_mb"] + row["xla_arg_mb"] + row["xla_out_mb"], 2)
        row["floor_ms"] = floor
    profiled = [(c, row) for c, row in zip(candidates, rows, strict=True) if c.name in _PROFILED]
    if not profiled:
        return
    rotation = copies(candidates[0].arguments)
    by_jax = [c.program for c, _ in profiled if not isinstance(c.program, TorchProgram)]
    times = iter(kernel_times(by_jax, rotation) if by_jax else ())
    for candidate, row in profiled:
        by_torch = isinstance(candidate.program, TorchProgram)
        try:
            measured = candidate.program.kernel_time(rotation) if by_torch else next(times)
        except RuntimeError as error:  # of torch's graph: it costs this column, not the recording
            row["kernel_error"] = str(error).splitlines()[0]
            print(f"{cell} {candidate.name}: no kernel time: {row['kernel_error']}", file=sys.stderr)
            continue
        row["kernel_ms"], row["kernel_q1_ms"], row["kernel_q3_ms"] = dataclasses.astuple(measured)[:3]
        row["x_floor"] = measured.median_ms / floor
        row["kernels"] = {name: ms for name, ms in measured.by_kernel.items() if ms > 0}


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
        f"{' and '.join(_APART)} after the others; seed {_SEED.value}; preset {_PRESET.value}; "
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
