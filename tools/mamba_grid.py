"""mamba_ssm's published test grid, all 6,240 cases, and how many of them each implementation passes.

    python -m tools.mamba_grid                                            # a GPU: pallas, triton_ref; a CPU: chunked
    python -m tools.mamba_grid --implementations=triton_ref --minutes=8   # stops after 8 minutes; again, and it goes on

The grid, its tolerances and what counts as "rounding" are in tests/mamba_grid.py. Hours of compiling on two cores:
what is done is kept in --out, and the same command goes on from there. Exits with 1 where a case fails.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import multiprocessing
import os
import pathlib
import sys
import time
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests import mamba_grid
from tools import recording, torch_program
from tools.progress import bar

IMPLEMENTATIONS = ("scan", "assoc", "chunked", "pallas", "triton_ref")
PIECE = len(mamba_grid.SEQS)  # cases that one worker takes: the lengths of one set of options, which share kernels
VERDICTS = ("passed", "rounding", "failed")

_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    None,
    f"Any of {', '.join(IMPLEMENTATIONS)}; by default pallas and triton_ref on a GPU, else chunked.",
)
_MINUTES = flags.DEFINE_float("minutes", math.inf, "No case begins after so many minutes.", lower_bound=0.0)
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.", lower_bound=0)
_OUT = flags.DEFINE_string("out", "mamba_grid.json", "Where the counts are kept.")

flags.register_validator(
    _IMPLEMENTATIONS,
    lambda names: names is None or (bool(names) and set(names) <= set(IMPLEMENTATIONS)),
    message=f"expected any of {IMPLEMENTATIONS}",
)


def judge(implementation: str, first: int, seed: int) -> list[dict[str, mamba_grid.Margin]]:
    """The margins of the PIECE cases from `first`. In a worker."""
    if jax.default_backend() != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    jax.clear_caches()  # nothing of the piece before is used again
    return [mamba_grid.margins(case, implementation, seed) for case in mamba_grid.GRID[first : first + PIECE]]


class Counts:
    """What is known of one implementation: so many cases of the grid, from its first, in order."""

    def __init__(self, kept: dict[str, Any] | None) -> None:
        kept = kept or {"cases": 0, "by_dtype": {}, "not_passed": [], "largest_margin": {}}
        self.cases: int = kept["cases"]
        self.by_dtype = {dtype: collections.Counter(counts) for dtype, counts in kept["by_dtype"].items()}
        self.not_passed: list[dict[str, Any]] = kept["not_passed"]
        self.largest: dict[str, float] = kept["largest_margin"]

    def add(self, case: mamba_grid.GridCase, margins: dict[str, mamba_grid.Margin]) -> None:
        """A case passes where all its tensors do, and fails where one does."""
        verdicts = {tensor: margin.verdict for tensor, margin in margins.items()}
        verdict = max(verdicts.values(), key=VERDICTS.index)
        self.cases += 1
        self.by_dtype.setdefault(case.dtype, collections.Counter())[verdict] += 1
        for tensor, margin in margins.items():
            key = f"{tensor} {case.dtype}"
            self.largest[key] = max(self.largest.get(key, 0.0), margin.got)
            if verdicts[tensor] != "passed":
                self.not_passed.append(
                    {"case": str(case), "tensor": tensor, "verdict": verdicts[tensor], **margin._asdict()}
                )

    def record(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "by_dtype": {
                dtype: {verdict: counts[verdict] for verdict in VERDICTS} for dtype, counts in self.by_dtype.items()
            },
            "largest_margin": self.largest,
            "not_passed": self.not_passed,
        }


def _kept(path: str, seed: int) -> dict[str, Any]:
    """What an earlier run of this seed on this kind of device left at path."""
    device = recording.device_record()
    fresh = {"device": device, "seed": seed, "grid": len(mamba_grid.GRID), "implementations": {}}
    if not pathlib.Path(path).exists():
        return fresh
    try:
        kept = recording.read_json(path)
        pairs = (
            ("seed", kept["seed"], seed),
            ("device_kind", kept["device"]["device_kind"], device["device_kind"]),
            ("jax", kept["device"]["jax"], device["jax"]),
        )
        for one in kept["implementations"].values():
            Counts(one)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise app.UsageError(f"--out={path}: not counts of this grid ({error!r}): name another") from error
    for name, got, expected in pairs:
        if got != expected:
            raise app.UsageError(
                f"--out={path} holds a run with {name} {got!r}, this one has {expected!r}: name another"
            )
    return kept


def run(implementation: str, counts: Counts, workers: int, until: float, seed: int, progress: Progress) -> None:
    """Adds cases to counts, in the grid's order, until all are there or the time is over."""
    task = progress.add_task(implementation, total=len(mamba_grid.GRID), completed=counts.cases)
    left = iter(range(counts.cases, len(mamba_grid.GRID), PIECE))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = collections.deque(
            (first, pool.submit(judge, implementation, first, seed)) for first in itertools.islice(left, 2 * workers)
        )
        while pending:
            first, future = pending.popleft()
            for case, margins in zip(mamba_grid.GRID[first : first + PIECE], future.result(), strict=True):
                counts.add(case, margins)
            progress.update(task, completed=counts.cases)
            following = next(left, None) if time.monotonic() < until else None
            if following is not None:
                pending.append((following, pool.submit(judge, implementation, following, seed)))


def table(implementations: dict[str, dict[str, Any]]) -> Table:
    result = Table("implementation", "dtype", "cases", *VERDICTS, title=f"of {len(mamba_grid.GRID)} cases")
    for name, record in implementations.items():
        for dtype, counts in record["by_dtype"].items():
            result.add_row(name, dtype, str(sum(counts.values())), *(str(counts[verdict]) for verdict in VERDICTS))
    return result


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got arguments {argv[1:]}, expected flags only")
    names = _IMPLEMENTATIONS.value
    if names is None:
        peers = filter(torch_program.importable, ["triton_ref"])
        names = ["pallas", *peers] if jax.default_backend() == "gpu" else ["chunked"]
    until = time.monotonic() + 60.0 * _MINUTES.value
    record = _kept(_OUT.value, _SEED.value)
    console = Console()
    with bar(transient=False) as progress:
        for name in names:
            counts = Counts(record["implementations"].get(name))
            try:
                run(name, counts, _WORKERS.value, until, _SEED.value, progress)
            finally:
                record["implementations"][name] = counts.record()
                recording.write_json(_OUT.value, record)
    console.print(table(record["implementations"]))
    console.print(f"wrote {_OUT.value}")
    failed = [
        one for name in names for one in record["implementations"][name]["not_passed"] if one["verdict"] == "failed"
    ]
    for one in failed:
        print(f"{one['case']}: {one['tensor']} is {one['got']:.2f} of its tolerance", file=sys.stderr)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
