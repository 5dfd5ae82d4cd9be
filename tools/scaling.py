"""The scan over several devices: checked against one, then timed.

    python -m tools.scaling                                   on a CPU: forced devices, which share its cores
    python -m tools.scaling --out=results/nvidia-h200-x8.json on a machine with GPUs
    python -m tools.scaling --estimate=results/nvidia-h200.json   no device: from the times of one GPU and a link's

First every layout (batch, dim and sequence over the devices) runs on every number of devices with an initial state,
packed sequences across a border and reverse; out, final state and all gradients have to agree with one device's. Then
the sequence layout is timed: strong scaling (one length, cut into parts) and weak (one length a device).

Efficiency is the time that perfect scaling would take over the time taken. Devices that share one CPU's cores have the
same work to do together as one alone, so there it is the time of one device over that of all. A CPU's rows take three
turns, and the fastest counts: on a virtual machine a program pays for seconds for pages that the host took back.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import pallas_scan
from pallas_scan import _compat, sequence_sharding
from pallas_scan.problem import Operands, Options
from tools import inputs, link_model, recording
from tools.errors import relative_errors
from tools.kernel_time import kernel_times
from tools.progress import bar

MODES = ("fwd", "fwd_bwd")
LAYOUTS = ("batch", "dim", "seq")
TIMED = ("u", "delta", "B", "C", "z", "segment_ids")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-7}  # max |got - want| / max |want|
CHECKED = (8, 512, 64, 16)  # batch, seq, dim, state
CPU_TURNS = 3

_DEVICES = flags.DEFINE_integer("devices", 8, "Devices to make of a CPU; GPUs are taken as they are.", lower_bound=1)
_PARTS = flags.DEFINE_list("parts", ["1", "2", "4", "8"], "Numbers of devices; more than there are is left out.")
_BATCH = flags.DEFINE_integer("batch", None, "Rows: 1 on GPUs, 4 on a CPU if not given.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", None, "Channels: 1024 on GPUs, 256 on a CPU if not given.", lower_bound=1)
_STATE = flags.DEFINE_integer("state", 16, "States a channel.", lower_bound=1)
_STRONG = flags.DEFINE_list("strong", None, "Lengths cut into parts: 524288,2097152 on GPUs, 4096 on a CPU.")
_WEAK = flags.DEFINE_integer("weak", None, "Length a device: 131072 on GPUs, 1024 on a CPU.", lower_bound=1)
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "float32, bfloat16 or both.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "To time a row for, a turn; at least three calls.", lower_bound=0.0)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.")
_PLOT = flags.DEFINE_string("plot", None, "Picture of the efficiencies to write.")
_ESTIMATE = flags.DEFINE_string("estimate", None, "A recording of one GPU to estimate from, instead of measuring.")

for _flag in (_PARTS, _STRONG):
    flags.register_validator(
        _flag, lambda v: v is None or (bool(v) and all(x.isdigit() and int(x) for x in v)), message="expected numbers"
    )
flags.register_validator(_DTYPES, lambda v: bool(v) and set(v) <= set(TOLERANCE), message="expected float32, bfloat16")


@dataclasses.dataclass(frozen=True)
class Row:
    """One length, number of devices, dtype and mode; ms are medians."""

    scaling: str  # "strong" or "weak"
    parts: int
    shape: inputs.Shape
    dtype: str
    mode: str


def mesh_of(parts: int, axis: str) -> Mesh:
    return jax.make_mesh((parts,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:parts])


def specs(layout: str, names: Any) -> dict[str, P]:
    """How each argument lies on the mesh, whose one axis is called as the layout."""
    if layout == "seq":
        return {name: P(None, "seq") if name in TIMED else P() for name in names}
    if layout == "batch":
        return {name: P("batch") if name in (*TIMED, "initial_state") else P() for name in names}
    on_dim = {"u": 3, "delta": 3, "z": 3, "A": 1, "D": 1, "delta_bias": 1, "initial_state": 2}
    return {name: P(*[None] * (on_dim[name] - 1), "dim") if name in on_dim else P() for name in names}


def program(layout: str, mesh: Mesh, arguments: Any, mode: str, **options: Any) -> Any:
    """A jitted function of sharded arguments: out and the final state; with "fwd_bwd" every gradient too."""

    def scan(arguments, axis_name=None):
        return pallas_scan.scan(**arguments, return_final_state=True, axis_name=axis_name, **options)

    def split(arguments):
        local = functools.partial(scan, axis_name="seq")
        of = specs("seq", arguments)
        return jax.shard_map(local, mesh=mesh, in_specs=(of,), out_specs=(P(None, "seq"), P()))(arguments)

    forward = split if layout == "seq" and mesh.size > 1 else scan

    def both(arguments):
        ids = {k: v for k, v in arguments.items() if k == "segment_ids"}
        floats = {k: v for k, v in arguments.items() if k not in ids}
        results, pullback = jax.vjp(lambda x: forward(x | ids), floats)
        return results, pullback(results)[0]

    placed = {k: NamedSharding(mesh, spec) for k, spec in specs(layout, arguments).items()}
    return jax.jit(forward if mode == "fwd" else both, in_shardings=(placed,))


def place(layout: str, mesh: Mesh, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` makes, made where it lies."""
    placed = {k: NamedSharding(mesh, spec) for k, spec in specs(layout, jax.eval_shape(make)).items()}
    return jax.jit(make, out_shardings=placed)()


# --- the check ---


def checked_inputs(dtype: str) -> dict[str, Any]:
    """Every option; sequences begin at the middle, where two devices' parts meet, and cross the other borders."""
    batch, seq, dim, state = CHECKED
    key = jax.random.split(jax.random.key(1), 3)
    begins = jnp.zeros((batch, seq), jnp.int32).at[:, jnp.array([5, seq // 2, seq - 9])].set(1)
    return inputs.mamba_inputs(CHECKED, dtype) | {
        "z": jax.random.normal(key[0], (batch, seq, dim)).astype(dtype),
        "delta_bias": 0.1 * jax.random.normal(key[1], (dim,)),
        "initial_state": jax.random.normal(key[2], (batch, dim, state)),
        "segment_ids": jnp.cumsum(begins, axis=1),
    }


def _checked(layout: str, parts: int, dtype: str, reverse: bool) -> Any:
    mesh = mesh_of(parts, layout)
    arguments = place(layout, mesh, functools.partial(checked_inputs, dtype))
    run = program(layout, mesh, arguments, "fwd_bwd", reverse=reverse, delta_softplus=True)
    return jax.tree.map(np.asarray, run(arguments))


@functools.cache
def _one_device(dtype: str, reverse: bool) -> Any:
    return _checked("seq", 1, dtype, reverse)


def check(parts: int, dtype: str) -> dict[str, float]:
    """The worst relative error of each layout, forward and reverse.

    Raises:
      RuntimeError: one is over the tolerance, or NaN.
    """
    worst: dict[str, float] = {}
    for layout in LAYOUTS:
        for reverse in (False, True):
            got, want = _checked(layout, parts, dtype, reverse), _one_device(dtype, reverse)
            errors = jax.tree.leaves(relative_errors(got, want))
            worst[layout] = float(np.max([worst.get(layout, 0.0), *errors]))  # NaN stays
        if not worst[layout] <= TOLERANCE[dtype]:
            raise RuntimeError(
                f"{layout} over {parts} devices, {dtype}: off by {worst[layout]:.1e}, at most {TOLERANCE[dtype]:.1e}"
            )
    return worst


# --- the times ---


def measure(row: Row, seconds: float) -> dict[str, Any]:
    mesh = mesh_of(row.parts, "seq")
    arguments = place("seq", mesh, functools.partial(inputs.mamba_inputs, row.shape, row.dtype))
    compiled = program("seq", mesh, arguments, row.mode).lower(arguments).compile()
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    result = dataclasses.asdict(row) | {
        "shape": dict(zip(("batch", "seq", "dim", "state"), row.shape, strict=True)),
        "median_ms": 1e3 * _median_s(lambda: compiled(arguments), seconds),
        "exchange_ms": 1e3 * _median_s(_exchange(mesh, row.shape), seconds / 4) if row.parts > 1 else 0.0,
        "peak_mb_a_device": round(peak / 2**20, 2),
    }
    if _compat.gpu_backend():
        (measured,) = kernel_times([compiled], [arguments])
        result["kernel_ms"] = measured.median_ms
        result["nccl_ms"] = sum(ms for name, ms in measured.by_kernel.items() if "nccl" in name.lower())
    return result


def _median_s(call: Callable[[], Any], seconds: float) -> float:
    jax.block_until_ready(call())
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _exchange(mesh: Mesh, shape: inputs.Shape) -> Callable[[], Any]:
    """One exchange alone: what devices do between their own passes, once forward and once backward."""
    batch, _, dim, state = shape
    given = jnp.ones((batch, dim, state)), jnp.ones((batch, dim)), -jnp.ones((1, dim, state))

    def local(end, total, A):
        ops = Operands(u=None, delta=None, A=A, B=None, C=None)
        return sequence_sharding.incoming(ops, Options(axis_name="seq"), end, total=total)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(),) * 3, out_specs=P("seq"), check_vma=False))
    return lambda: run(*given)


def rows(parts: list[int], strong: list[int], weak: int, batch: int, dim: int) -> Iterator[Row]:
    for dtype in _DTYPES.value:
        for mode in MODES:
            for count in parts:
                for seq in strong:
                    yield Row("strong", count, (batch, seq, dim, _STATE.value), dtype, mode)
                yield Row("weak", count, (batch, weak * count, dim, _STATE.value), dtype, mode)


def _length(row: dict[str, Any]) -> int:
    """What the rows of one line share: the sequence's length (strong) or that of a part (weak)."""
    return row["shape"]["seq"] // (row["parts"] if row["scaling"] == "weak" else 1)


def add_efficiencies(results: list[dict[str, Any]], *, shared_cores: bool) -> None:
    """Against the row of one device, of the same length (strong) or the same length a device (weak)."""

    def key(row):
        return row["scaling"], row["dtype"], row["mode"], _length(row)

    alone = {key(row): row for row in results if row["parts"] == 1}
    for row in results:
        if key(row) in alone:
            gain = alone[key(row)]["median_ms"] / row["median_ms"]
            work = row["parts"] if row["scaling"] == "weak" else 1  # of one device's
            row["efficiency"] = gain * work / (1 if shared_cores else row["parts"])


def plot(results: list[dict[str, Any]], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, scaling in zip(axes, ("strong", "weak"), strict=True):
        lines: dict[Any, list[tuple[int, float]]] = {}
        for row in results:
            if row["scaling"] == scaling and "efficiency" in row:
                lines.setdefault((_length(row), row["dtype"], row["mode"]), []).append(
                    (row["parts"], row["efficiency"])
                )
        for (length, dtype, mode), points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{length:,} {dtype} {mode}")
        axis.set(title=f"{scaling} scaling", xlabel="devices", xscale="log")
        axis.set_xticks(sorted({row["parts"] for row in results}), sorted({row["parts"] for row in results}))
        axis.minorticks_off()
        axis.legend(fontsize="small")
    axes[0].set(ylabel="efficiency", ylim=(0, None))
    figure.suptitle(title)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(results: list[dict[str, Any]]) -> Table:
    view = Table()
    for column in ("scaling", "batch x seq x dim x state", "dtype", "mode"):
        view.add_column(column)
    for column in ("devices", "ms", "exchange ms", "efficiency", "MB a device", "kernel ms", "nccl ms"):
        view.add_column(column, justify="right")
    for row in results:
        shape = " x ".join(map(str, row["shape"].values()))
        figures = [f"{row['median_ms']:.3f}", f"{row['exchange_ms']:.3f}", f"{row.get('efficiency', float('nan')):.2f}"]
        kernels = [f"{row[name]:.3f}" if name in row else "" for name in ("kernel_ms", "nccl_ms")]
        cells = (*figures, str(row["peak_mb_a_device"]), *kernels)
        view.add_row(row["scaling"], shape, row["dtype"], row["mode"], str(row["parts"]), *cells)
    return view


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if _ESTIMATE.value:
        link_model.show(recording.read_json(_ESTIMATE.value))
        return
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    on_gpu = _compat.gpu_backend()
    batch, dim = _BATCH.value or (1 if on_gpu else 4), _DIM.value or (1024 if on_gpu else 256)
    strong = [int(s) for s in _STRONG.value or (["524288", "2097152"] if on_gpu else ["4096"])]
    weak = _WEAK.value or (131072 if on_gpu else 1024)
    parts = sorted({int(p) for p in _PARTS.value if int(p) <= jax.device_count()})
    uneven = [length for length in (*strong, CHECKED[0], CHECKED[2]) if any(length % p for p in parts)]
    if not parts or uneven:
        raise app.UsageError(f"got --parts={_PARTS.value}, expected numbers of devices that divide {uneven or parts}")

    checks, planned = [], list(rows(parts, strong, weak, batch, dim))
    turns = 1 if on_gpu else CPU_TURNS
    fastest: dict[Row, dict[str, Any]] = {}
    with bar() as progress:
        several = [p for p in parts if p > 1]
        task = progress.add_task("", total=turns * len(planned) + len(several) * len(_DTYPES.value))
        for dtype in _DTYPES.value:
            for count in several:
                progress.update(task, description=f"checking {count} devices, {dtype}")
                checks.append({"parts": count, "dtype": dtype, "worst_relative_error": check(count, dtype)})
                progress.advance(task)
        for row in planned * turns:
            progress.update(task, description=f"{row.scaling} {row.parts} x {row.shape[1]} {row.dtype} {row.mode}")
            result = measure(row, _SECONDS.value)
            fastest[row] = min(fastest.get(row, result), result, key=lambda r: r["median_ms"])
            progress.advance(task)
    results = list(fastest.values())
    add_efficiencies(results, shared_cores=not on_gpu)
    Console(width=150).print(table(results))
    if _OUT.value:
        record = {"device": recording.device_record(), "shared_cores": not on_gpu, "checks": checks, "results": results}
        recording.write_json(_OUT.value, record)
    if _PLOT.value:
        where = "forced devices of one CPU" if not on_gpu else jax.devices()[0].device_kind
        plot(results, _PLOT.value, f"A sequence over {where}, batch {batch}, dim {dim}, state {_STATE.value}")


if __name__ == "__main__":
    app.run(main)
