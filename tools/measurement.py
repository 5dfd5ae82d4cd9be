"""Measures one cell of the benchmark: one shape in one dtype and mode, in several implementations.

They take turns, sample by sample, so that a change in the machine's speed reaches all of them; times are medians of
samples, a sample being the mean of `inner` calls. Where a call takes less than a second, one that is not timed comes
before a sample: the first after another implementation pays for the pages that the system took back from it. Those
that hold every state several times over, assoc and mambapy, take turns with each other once the rest is done: what
they free, the rest would pay for. One that runs out of memory has an `error` and no times.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_scan import _compat
from tools import inputs, roofline, torch_program
from tools.errors import relative_errors
from tools.kernel_time import copies, kernel_times
from tools.torch_program import TorchProgram

MEBIBYTE = 2**20
LONG = 1.0  # seconds of a call that need no other before it
REFERENCE_LIMIT = 8192  # seq beyond which scan, when it was not asked for, is too slow to compare with
# Of gigabytes a call: on a virtual machine the host takes back what they free, and another's next call waits for pages.
APART = ("assoc", "mambapy")
# Those whose kernels are profiled: the others launch too many.
_PROFILED = ("assoc", "pallas", *torch_program.NAMES)


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
    return [[c for c in programs if (c.name in APART) == apart] for apart in (False, True)]


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
