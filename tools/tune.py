"""Finds the fastest configurations for given shapes on this GPU, and writes them where the library reads them.

    python -m tools.tune --shapes=4x2048x1024x16
    python -m tools.tune --shapes=4x2048x1024x16 --dtypes=bfloat16 --parts=bwd --dim_block=16,32 --segment=64,128,256

A search is one shape, dtype and part: the forward, or the backward from saved states. Its candidates are the sweep's
combinations that differ once fitted to the shape and leave every multiprocessor a reasonable number of warps; the
configuration in use is one of them, so that a faster one is never replaced. A candidate's result has to agree with the
`chunked` form's before it is timed; one that fails to compile or disagrees is reported and left out. The file and its
format are described in pallas_scan/tuning.py; `--out` names another.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from pallas_scan import _compat, chunked, pallas_backward, pallas_cut, pallas_forward, pallas_triton, tuning
from pallas_scan.config import KernelConfig, ScanConfig, Sizes, save_every
from pallas_scan.problem import Operands, Options
from tools import inputs, recording
from tools.errors import relative_errors
from tools.kernel_time import copies, kernel_times
from tools.progress import bar

PARTS = ("fwd", "bwd")
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # max |got - want| / max |want|
WARPS = (2, 64)  # of a multiprocessor that a candidate has to come to: fewer leave it idle, more are too short

_SHAPES = flags.DEFINE_list("shapes", ["4x2048x1024x16"], "Shapes, batch x seq x dim x state.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], f"Any of {', '.join(DTYPES)}.")
_PARTS = flags.DEFINE_list("parts", list(PARTS), "fwd, bwd or both.")
_CHUNK = flags.DEFINE_list("chunk", ["2", "4", "8"], "Steps whose loads are issued together.")
_DIM_BLOCK = flags.DEFINE_list("dim_block", ["8", "16", "32", "64", "128"], "Channels a program.")
_NUM_WARPS = flags.DEFINE_list("num_warps", ["1", "8", "16"], "Warps a program; several hold segments side by side.")
_SEGMENT = flags.DEFINE_list(
    "segment", ["16", "32", "64", "128", "192", "256", "512", "all"], "Steps a program; 'all' for one segment."
)
_THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "Compilations at once.", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 10, "Timed calls a candidate.", lower_bound=3)
_OUT = flags.DEFINE_string("out", None, "File to write; the user's own for this device if not given.")
_LOG = flags.DEFINE_string("log", None, "File to write every candidate's outcome to, as JSON.")


def _numbers(values: list[str]) -> bool:
    return bool(values) and all(v.isdigit() and int(v) and not int(v) & (int(v) - 1) for v in values)


flags.register_validator(_SHAPES, inputs.are_shapes)
flags.register_validator(_DTYPES, lambda v: bool(v) and set(v) <= set(DTYPES), message=f"expected any of {DTYPES}")
flags.register_validator(_PARTS, lambda v: bool(v) and set(v) <= set(PARTS), message=f"expected any of {PARTS}")
for _flag in (_CHUNK, _DIM_BLOCK, _NUM_WARPS):
    flags.register_validator(_flag, _numbers, message="expected powers of two")
flags.register_validator(
    _SEGMENT,
    lambda v: bool(v) and all(s == "all" or (s.isdigit() and int(s)) for s in v),
    message="expected steps, or 'all'",
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The values to combine. None among segments is one segment."""

    chunk: tuple[int, ...]
    dim_block: tuple[int, ...]
    num_warps: tuple[int, ...]
    segment: tuple[int | None, ...]


@dataclasses.dataclass
class Outcome:
    """What became of a candidate: a time, or a failure."""

    config: KernelConfig
    ms: float | None = None
    failure: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """One shape, dtype and part, and what to try for it; the configuration in use comes first."""

    shape: Sizes
    dtype: str
    part: str
    candidates: tuple[KernelConfig, ...]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.part}"


def candidates(
    sweep: Sweep, ops: Operands, options: Options, part: str, in_use: KernelConfig, multiprocessors: int
) -> tuple[KernelConfig, ...]:
    """in_use, and the sweep's combinations that are not the same once fitted to the shape."""
    thread = pallas_forward.THREAD if part == "fwd" else pallas_backward.THREAD

    def fitted(config: KernelConfig) -> pallas_cut.Cut:
        return pallas_cut.fit(config, ops, options, thread=thread, interpret=False, intervals=part == "bwd")

    found = {fitted(in_use): in_use}
    for chunk, dim_block, num_warps, segment in itertools.product(
        sweep.chunk, sweep.dim_block, sweep.num_warps, sweep.segment
    ):
        steps = -(-(segment or ops.sizes.seq) // chunk) * chunk
        config = KernelConfig(chunk, dim_block, num_warps, steps)
        cut = fitted(config)
        warps = float(np.prod(cut.grid)) * cut.num_warps / multiprocessors
        if (cut.dim_block, cut.num_warps) == (dim_block, num_warps) and WARPS[0] <= warps <= WARPS[1]:
            found.setdefault(cut, config)
    return tuple(found.values())


class Problem:
    """A search's data on the device, and the programs that run on it."""

    def __init__(self, shape: Sizes, dtype: str, part: str) -> None:
        self.part, self.dtype = part, dtype
        self.ops = inputs.operands(shape, dtype)
        self.options = Options(save_every=save_every(dtype), implementation="pallas")
        self.interpret = not _compat.gpu_backend()
        self.dout = self.ops.u

    def given(self) -> tuple[Any, ...]:
        """What `program` takes."""
        if self.part == "fwd":
            return (self.ops,)

        def forward(ops):
            return pallas_triton.forward(ops, self.options, save=True, interpret=self.interpret)

        _, _, saved = jax.jit(forward)(self.ops)
        return self.ops, saved, self.dout

    def program(self, config: KernelConfig) -> Callable[[tuple[Any, ...]], Any]:
        options = dataclasses.replace(self.options, config=ScanConfig(config, config))

        def fwd(given):
            (ops,) = given
            out, final, _ = pallas_triton.forward(ops, options, save=False, interpret=self.interpret)
            return {"out": out, "final": final}

        def bwd(given):
            ops, saved, dout = given
            return _named(pallas_triton.backward(ops, options, saved, dout, None, interpret=self.interpret))

        return fwd if self.part == "fwd" else bwd

    def reference(self) -> Any:
        """The same results from the chunked form."""
        options = dataclasses.replace(self.options, save_every=chunked.BLOCK, implementation="chunked")

        @jax.jit
        def run(ops, dout):
            out, final, saved = chunked.forward(ops, options, save=self.part == "bwd")
            if self.part == "fwd":
                return {"out": out, "final": final}
            assert saved is not None
            return _named(chunked.backward(ops, options, saved, dout, None))

        return run(self.ops, self.dout)


def _named(gradients: Operands) -> dict[str, Any]:
    return {f"d{name}": x for name, x in gradients._asdict().items() if x is not None}


def disagreement(got: Any, want: Any, tolerance: float) -> str | None:
    """Which tensors differ by more than the tolerance; NaN never agrees."""
    errors = {name: float(e) for name, e in relative_errors(got, want).items()}
    wrong = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    return ", ".join(wrong) or None


def run(search: Search, pool: concurrent.futures.Executor, calls: int) -> Iterator[Outcome]:
    """Yields each candidate's outcome once compiled and checked; times are filled in at the end."""
    problem = Problem(search.shape, search.dtype, search.part)
    given = problem.given()
    compiling = []
    for config in search.candidates:
        try:
            lowered = jax.jit(problem.program(config)).lower(given)
            compiling.append((Outcome(config), pool.submit(lowered.compile)))
        except Exception as error:  # whatever a candidate dies of, the others go on
            yield Outcome(config, failure=_first_line(error))
    want = problem.reference()
    sound = []
    for outcome, future in compiling:
        try:
            program = future.result()
            outcome.failure = disagreement(program(given), want, TOLERANCE[search.dtype])
        except Exception as error:
            outcome.failure = _first_line(error)
        if outcome.failure is None:
            sound.append((outcome, program))
        yield outcome
    del want
    times = kernel_times([program for _, program in sound], copies(given), calls=calls) if sound else []
    for (outcome, _), time in zip(sound, times, strict=True):
        outcome.ms = time.median_ms


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def plan(shapes: list[inputs.Shape], dtypes: list[str], parts: list[str], sweep: Sweep) -> Iterator[Search]:
    kind, multiprocessors = _compat.gpu()
    for shape, dtype, part in itertools.product(shapes, dtypes, parts):
        sizes = Sizes(*shape)
        ops = jax.eval_shape(functools.partial(inputs.operands, shape, dtype))
        options = Options(save_every=save_every(dtype))
        in_use = getattr(tuning.choose(sizes, dtype, kind, multiprocessors), part)
        yield Search(sizes, dtype, part, candidates(sweep, ops, options, part, in_use, multiprocessors))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if not _compat.gpu_backend():
        raise app.UsageError(f"got the backend {jax.default_backend()}, expected an NVIDIA GPU")
    kind, _ = _compat.gpu()
    path = pathlib.Path(_OUT.value) if _OUT.value else tuning.user_folder() / tuning.file_name(kind)
    numbers = {f.name: tuple(int(v) for v in f.value) for f in (_CHUNK, _DIM_BLOCK, _NUM_WARPS)}
    sweep = Sweep(**numbers, segment=tuple(None if s == "all" else int(s) for s in _SEGMENT.value))
    searches = list(plan([inputs.parse_shape(s) for s in _SHAPES.value], _DTYPES.value, _PARTS.value, sweep))
    log: list[dict[str, Any]] = []
    view = Table("batch x seq x dim x state", "dtype", "part", "in use", "ms", "fastest", "ms", "tried", "failed")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    with (
        bar(console) as progress,
        concurrent.futures.ThreadPoolExecutor(_THREADS.value) as pool,
    ):
        task = progress.add_task("", total=sum(len(s.candidates) for s in searches))
        for search in searches:
            progress.update(task, description=str(search))
            outcomes = []
            for outcome in run(search, pool, _CALLS.value):
                outcomes.append(outcome)
                progress.advance(task)
            for outcome in outcomes:
                if outcome.failure:
                    console.print(f"{search} {_short(outcome.config)}: {outcome.failure}", markup=False)
                log.append({"search": str(search), **dataclasses.asdict(outcome)})
            timed = sorted((o for o in outcomes if o.ms is not None), key=lambda o: o.ms or 0.0)
            if timed:  # written after every search: an interrupt loses one
                entry = tuning.Entry(search.shape, search.dtype, **{search.part: timed[0].config})
                entries = tuning.merged(tuning.read(path), entry)
                recording.write_json(path, tuning.record(kind, entries))
            view.add_row(*_cells(search, outcomes, timed))
            if _LOG.value:
                recording.write_json(_LOG.value, log)
    Console(width=None if sys.stdout.isatty() else 150).print(view, f"wrote {path}")


def _short(config: KernelConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _cells(search: Search, outcomes: list[Outcome], timed: list[Outcome]) -> list[str]:
    def of(outcome: Outcome | None) -> list[str]:
        if outcome is None or outcome.ms is None:
            return ["", ""]
        return ["x".join(map(str, dataclasses.astuple(outcome.config))), f"{outcome.ms:.4f}"]

    in_use = next((o for o in outcomes if o.config == search.candidates[0]), None)
    failed = sum(o.failure is not None for o in outcomes)
    name = " x ".join(map(str, search.shape))
    best = timed[0] if timed else None
    return [name, search.dtype, search.part, *of(in_use), *of(best), str(len(outcomes)), str(failed)]


if __name__ == "__main__":
    app.run(main)
