"""From which length a sequence pays to be split, on paper: times of one GPU and a link, no device.

A part takes what a sequence of its length takes on one GPU; each exchange adds its latency and what every device
receives over the link. Nothing here is measured but the first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from rich.console import Console
from rich.table import Table

SHAPE = {"batch": 1, "dim": 1024, "state": 16}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs of one sequence, and an all_gather between them."""

    name: str
    parts: int
    bytes_a_second: float  # that a GPU receives
    latency_s: float  # of one all_gather of little, launch and combining included

    def exchange_s(self) -> float:
        pair = 4 * SHAPE["batch"] * SHAPE["dim"] * (SHAPE["state"] + 1)
        return self.latency_s + (self.parts - 1) * pair / self.bytes_a_second


# Assumed: NVLink 4 at two thirds of its 450 GB/s a direction; 400 Gb/s InfiniBand a GPU at four fifths.
CLUSTERS = (
    Cluster("8 GPUs of one host, NVLink", 8, 300e9, 40e-6),
    Cluster("64 GPUs of 8 hosts, 400 Gb/s each", 64, 40e9, 100e-6),
)


def one_gpu(record: dict[str, Any], dtype: str, mode: str) -> list[tuple[int, float]]:
    """(seq, seconds) of the recorded lengths.

    Raises:
      ValueError: the recording has fewer than two.
    """
    found = []
    for row in record["results"]:
        shape = dict(row["shape"])
        seq = shape.pop("seq")
        if (row["impl"], row.get("dtype"), row["mode"], shape) == ("pallas", dtype, mode, SHAPE) and "kernel_ms" in row:
            found.append((seq, row["kernel_ms"] / 1e3))
    if len(found) < 2:
        raise ValueError(f"got {len(found)} rows of pallas, {dtype}, {mode} at {SHAPE}, expected at least 2")
    return sorted(found)


def seconds(times: list[tuple[int, float]], seq: float) -> float:
    """Between the recorded lengths along straight lines in logarithms; beyond them in proportion, below them level."""
    (first, shortest), (last, longest) = times[0], times[-1]
    if seq <= first:
        return shortest
    if seq >= last:
        return longest * seq / last
    for (a, at_a), (b, at_b) in itertools.pairwise(times):
        if a <= seq <= b:
            return at_a * (at_b / at_a) ** (math.log(seq / a) / math.log(b / a))
    raise AssertionError(seq)


def efficiency(times: list[tuple[int, float]], cluster: Cluster, seq: float, exchanges: int) -> float:
    split = seconds(times, seq / cluster.parts) + exchanges * cluster.exchange_s()
    return seconds(times, seq) / (cluster.parts * split)


def least_length(times: list[tuple[int, float]], cluster: Cluster, exchanges: int, wanted: float) -> int:
    """The least power of two with an efficiency of at least `wanted`."""
    seq = 2 * cluster.parts
    while efficiency(times, cluster, seq, exchanges) < wanted:
        seq *= 2
    return seq


def show(record: dict[str, Any]) -> None:
    view = Table(
        title=f"{SHAPE}: least length (a power of two) that is faster than one GPU, and at an efficiency of 0.9"
    )
    for column in ("cluster", "dtype", "mode", "exchange us", "faster from", "0.9 from", "at 524,288"):
        view.add_column(column)
    for cluster in CLUSTERS:
        for dtype in ("float32", "bfloat16"):
            for mode, exchanges in (("fwd", 1), ("fwd_bwd", 2)):
                times = one_gpu(record, dtype, mode)
                lengths = (least_length(times, cluster, exchanges, e) for e in (1 / cluster.parts, 0.9))
                at = efficiency(times, cluster, 524288, exchanges)
                cells = (f"{1e6 * cluster.exchange_s():.0f}", *(f"{n:,}" for n in lengths), f"{at:.2f}")
                view.add_row(cluster.name, dtype, mode, *cells)
    Console(width=150).print(view)
