"""Draws time against seq, log-log, from the recordings of `tools.benchmark`: every implementation, and the roofline.

    python -m tools.plot                                                        # the H200's, with its peers'
    python -m tools.plot --recordings=results/cpu.json --out=results/cpu.png    # the CPU's

A line is one implementation at one batch, dim and state: by default those with the most lengths recorded, the smallest
batch first and the largest dim. On a GPU it is the kernels' time, and the host's, dashed, where they were not profiled.
"""

from __future__ import annotations

import collections
from typing import Any

from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools import inputs, recording

_RECORDINGS = flags.DEFINE_list(
    "recordings", ["results/nvidia-h200.json", "results/nvidia-h200-peers.json"], "Recordings, drawn into one picture."
)
_SIZE = flags.DEFINE_string("size", None, "batch x dim x state of what is drawn: 1x1024x16.")
_OUT = flags.DEFINE_string("out", "results/nvidia-h200.png", "Where to write the picture: .png, .svg or .pdf.")

Size = tuple[int, int, int]  # batch, dim, state
ROOFLINE, HOST = "roofline", " (host's time)"
COLOURS = {
    "pallas": "tab:blue",
    "chunked": "tab:blue",
    "triton_ref": "tab:cyan",
    "mamba_ssm": "tab:red",
    "nitrix": "tab:purple",
    "mambapy": "tab:purple",
    "assoc": "tab:green",
    "scan": "tab:olive",
}


def rank(name: str) -> tuple[bool, int, str]:
    """Sorts implementations: ours, peers, textbook forms, those unknown here; the roofline last."""
    known = list(COLOURS)
    return name == ROOFLINE, known.index(name) if name in known else len(known), name


def size_of(row: dict[str, Any]) -> Size:
    return row["shape"]["batch"], row["shape"]["dim"], row["shape"]["state"]


def parse_size(text: str) -> Size:
    batch, dim, state = inputs.parse_sizes(text, ("batch", "dim", "state"), "1x1024x16")
    return batch, dim, state


def longest_series(rows: list[dict[str, Any]]) -> Size:
    lengths = collections.defaultdict(set)
    for row in rows:
        lengths[size_of(row)].add(row["shape"]["seq"])
    return max(lengths, key=lambda size: (len(lengths[size]), -size[0], size[1]))


def time_ms(row: dict[str, Any]) -> float:
    return row.get("kernel_ms") or row["median_ms"]


def draw(rows: list[dict[str, Any]], size: Size) -> Figure:
    """A panel a dtype and mode."""
    rows = [row for row in rows if size_of(row) == size and (row.get("kernel_ms") or row.get("median_ms"))]
    on_gpu = any("floor_ms" in row for row in rows)
    dtypes = sorted({row["dtype"] for row in rows}, reverse=True)
    modes = [mode for mode in ("fwd", "fwd_bwd") if any(row["mode"] == mode for row in rows)]
    figure = Figure(figsize=(4.6 * len(modes), 3.3 * len(dtypes) + 0.4), layout="constrained")
    panels = figure.subplots(len(dtypes), len(modes), sharex=True, sharey="row", squeeze=False)
    names: dict[str, Any] = {}
    for dtype, line in zip(dtypes, panels, strict=True):
        for mode, panel in zip(modes, line, strict=True):
            names |= _panel(panel, [row for row in rows if (row["dtype"], row["mode"]) == (dtype, mode)], on_gpu)
            panel.set_title(f"{dtype}, {'forward' if mode == 'fwd' else 'forward + backward'}", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("seq")
    for panel in panels[:, 0]:
        panel.set_ylabel("kernel time, ms" if on_gpu else "time, ms")
    labels = sorted(names, key=lambda label: rank(label.removesuffix(HOST)))
    figure.legend([names[label] for label in labels], labels, loc="outside right upper", fontsize=8)
    figure.suptitle("batch {}, dim {}, state {}".format(*size), fontsize=11)
    return figure


def _panel(panel: Axes, rows: list[dict[str, Any]], on_gpu: bool) -> dict[str, Any]:
    """The lines by their names."""
    by_name: dict[str, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
    for row in rows:
        by_name[row["impl"]][row["shape"]["seq"]] = row
    lines = {}
    for name in sorted(by_name, key=rank):
        points = sorted(by_name[name].items())
        profiled = not on_gpu or all("kernel_ms" in row for _, row in points)
        label = name if profiled else name + HOST
        (lines[label],) = panel.plot(
            [seq for seq, _ in points],
            [time_ms(row) for _, row in points],
            "o-" if profiled else "o--",
            ms=3,
            lw=1.2,
            color=COLOURS.get(name),
        )
    if floors := sorted({(row["shape"]["seq"], row["floor_ms"]) for row in rows if "floor_ms" in row}):
        (lines[ROOFLINE],) = panel.plot(*zip(*floors, strict=True), "k:", lw=1)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
    return lines


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    rows = []
    for path in _RECORDINGS.value:
        try:
            rows += recording.read_results(path)
        except ValueError as error:
            raise app.UsageError(f"--recordings={error}") from error
    try:
        size = longest_series(rows) if _SIZE.value is None else parse_size(_SIZE.value)
    except ValueError as error:
        raise app.UsageError(f"--size: {error}") from error
    if size not in map(size_of, rows):
        raise app.UsageError(
            f"got --size={_SIZE.value}, expected one that is recorded: {sorted(set(map(size_of, rows)))}"
        )
    draw(rows, size).savefig(_OUT.value, dpi=130)
    print(f"wrote {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
