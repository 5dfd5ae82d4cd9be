"""Every implementation against a float64 loop on one seeded grid: out, final state and every gradient.

    python -m tools.agreement                                     # the grid of tests/cases.py, a table, agreement.json
    python -m tools.agreement --cases=everything --implementations=pallas --seed=3

Exits with 1 where one disagrees, naming the case and the command that reproduces it. Without a GPU "pallas" and
"triton_ref" run in their interpreters. mamba_ssm is among them where it is built, in the cases whose options it has.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

if jax.default_backend() != "gpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from tests import cases, test_agreement
from tools import recording, torch_program
from tools.progress import bar

JAX_IMPLEMENTATIONS = test_agreement.IMPLEMENTATIONS
PRESENT = (*JAX_IMPLEMENTATIONS, *filter(torch_program.importable, ("triton_ref", "mamba_ssm")))
GRID = {case.name: case for case in cases.CASES}

_CASES = flags.DEFINE_list("cases", list(GRID), "Names of cases in tests/cases.py.")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", list(PRESENT), f"Any of {', '.join(PRESENT)}.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.", lower_bound=0)
_OUT = flags.DEFINE_string("out", "agreement.json", "Where to write the errors.")

flags.register_validator(
    _IMPLEMENTATIONS, lambda names: bool(names) and set(names) <= set(PRESENT), message=f"expected any of {PRESENT}"
)
flags.register_validator(
    _CASES, lambda names: bool(names) and set(names) <= set(GRID), message=f"expected any of {', '.join(GRID)}"
)


class Found(NamedTuple):
    """How far one tensor of one case is off, relative to its largest value."""

    implementation: str
    case: str
    tensor: str
    dtype: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


def errors_of(implementation: str, case: cases.Case, seed: int) -> dict[str, float]:
    """By tensor; none where it has not the case's options."""
    if implementation in JAX_IMPLEMENTATIONS:
        return test_agreement.errors(case, implementation, seed=seed)
    from tests import torch_cases

    if implementation == "triton_ref":
        return torch_cases.errors(case, seed=seed)
    return torch_cases.mamba_ssm_errors(case, seed=seed) if torch_cases.mamba_ssm_takes(case) else {}


def compared(names: list[str], implementations: list[str], seed: int) -> Iterator[list[Found]]:
    """The errors of one case and implementation after another."""
    for name in names:
        case = GRID[name]
        for implementation in implementations:
            errors = errors_of(implementation, case, seed)
            yield [
                Found(
                    implementation,
                    name,
                    tensor,
                    test_agreement.dtype_of(case, tensor),
                    error,
                    test_agreement.tolerance(case, tensor),
                )
                for tensor, error in errors.items()
            ]


def worst(found: list[Found]) -> dict[tuple[str, str, str], Found]:
    """By tensor, dtype and implementation."""
    result: dict[tuple[str, str, str], Found] = {}
    for one in found:
        key = (one.tensor, one.dtype, one.implementation)
        if key not in result or not one.error <= result[key].error:
            result[key] = one
    return result


def table(found: list[Found], implementations: list[str]) -> Table:
    view = Table(title="worst relative error against float64", title_justify="left")
    for column in ("tensor", "dtype"):
        view.add_column(column)
    for column in (*implementations, "tolerance"):
        view.add_column(column, justify="right")
    by_key = worst(found)
    for tensor, dtype in dict.fromkeys((one.tensor, one.dtype) for one in found):
        cells = [by_key.get((tensor, dtype, name)) for name in implementations]
        texts = ["" if c is None else f"{c.error:.1e}" if c.agrees else f"[red]{c.error:.1e}[/red]" for c in cells]
        view.add_row(tensor, dtype, *texts, f"{cases.TOLERANCE[dtype]:.1e}")
    return view


def reproduced_by(one: Found, seed: int) -> str:
    parts = ["python", "-m", "tools.agreement", f"--cases={one.case}", f"--implementations={one.implementation}"]
    return shlex.join([*parts, f"--seed={seed}"])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    names, implementations, seed = _CASES.value, _IMPLEMENTATIONS.value, _SEED.value
    found: list[Found] = []
    with bar() as progress:
        task = progress.add_task("comparing", total=len(names) * len(implementations))
        for errors in compared(names, implementations, seed):
            found += errors
            progress.update(task, advance=1, description=errors[0].case if errors else "comparing")
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(found, implementations))
    record: dict[str, Any] = {
        "device": recording.device_record(),
        "seed": seed,
        "cases": names,
        "worst": [one._asdict() for one in worst(found).values()],
        "disagreements": [one._asdict() for one in found if not one.agrees],
    }
    recording.write_json(_OUT.value, record)
    console.print(f"wrote {_OUT.value}")
    bad = [one for one in found if not one.agrees]
    for one in bad:
        print(
            f"{one.implementation} disagrees in case {one.case}: {one.tensor} ({one.dtype}) is off by {one.error:.1e}, "
            f"expected at most {one.tolerance:.1e}\n    {reproduced_by(one, seed)}",
            file=sys.stderr,
        )
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
