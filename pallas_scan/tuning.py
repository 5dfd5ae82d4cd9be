"""Measured configurations: JSON that `python -m tools.tune` writes, one file a device kind.

A file is looked for in the folder that the environment variable PALLAS_SCAN_TUNED names (without it, in
`$XDG_CONFIG_HOME/pallas_scan`, which is `~/.config/pallas_scan` by default), then among those that the package brings
(`pallas_scan/tuned/`). Its name is the device kind in lower case with dashes: `nvidia-h200.json`.

    {"device_kind": "NVIDIA H200",
     "entries": [{"shape": {"batch": 4, "seq": 2048, "dim": 1024, "state": 16}, "dtype": "bfloat16",
                  "fwd": {"chunk": 4, "dim_block": 128, "num_warps": 1, "segment": 64},
                  "bwd": {"chunk": 4, "dim_block": 32, "num_warps": 1, "segment": 128}}]}

An entry may hold fwd or bwd alone. It serves the shapes near its own; the others get config.py's rules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from typing import Any

import jax.numpy as jnp

from pallas_scan.config import KernelConfig, ScanConfig, Sizes, rules
from pallas_scan.pallas_cut import segments_together

VARIABLE = "PALLAS_SCAN_TUNED"
PACKAGED = pathlib.Path(__file__).parent / "tuned"
NEAR = 1.0  # how far from its own shape an entry serves, in octaves of steps
# Rows of channels (batch x dim) count for as much more: with them changes how many waves the programs are.
ROWS = 4.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was found fastest at one shape. dtype is that of u; an entry serves all dtypes of its width."""

    shape: Sizes
    dtype: str
    fwd: KernelConfig | None = None
    bwd: KernelConfig | None = None


def file_name(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".json"


def user_folder() -> pathlib.Path:
    named = os.environ.get(VARIABLE)
    if named:
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config") / "pallas_scan"


def choose(sizes: Sizes, dtype: Any, device_kind: str, multiprocessors: int) -> ScanConfig:
    """The configuration of a shape on a device: a measured one, or one from the device's size.

    Raises:
      ValueError: a file of measured configurations for the device is there and cannot be read.
    """
    by_rule = rules(sizes, multiprocessors)
    return ScanConfig(
        fwd=nearest(sizes, dtype, device_kind, "fwd") or by_rule.fwd,
        bwd=nearest(sizes, dtype, device_kind, "bwd") or by_rule.bwd,
    )


def nearest(sizes: Sizes, dtype: Any, device_kind: str, part: str) -> KernelConfig | None:
    """The configuration of the nearest entry for `part`, "fwd" or "bwd", if one is near."""
    width = jnp.dtype(dtype).itemsize
    best: tuple[tuple[float, float], KernelConfig] | None = None
    for folder in (user_folder(), PACKAGED):  # on a tie the user's own stays
        for entry in read(folder / file_name(device_kind)):
            config = getattr(entry, part)
            if config is None or jnp.dtype(entry.dtype).itemsize != width:
                continue
            far = _distance(entry.shape, sizes)
            if far[0] <= NEAR and (best is None or far < best[0]):
                best = far, _at(sizes.seq, config, entry.shape, part)
    return best[1] if best else None


def _at(seq: int, config: KernelConfig, measured: Sizes, part: str) -> KernelConfig:
    """A configuration measured at another seq: what went over it at once, in one segment or in those that a forward's
    program has side by side, does so here."""
    at_once = segments_together(config.num_warps, config.dim_block, measured.state) if part == "fwd" else 1
    if at_once * config.segment < measured.seq:
        return config
    return dataclasses.replace(config, segment=-(-seq // (at_once * config.chunk)) * config.chunk)


def _distance(a: Sizes, b: Sizes) -> tuple[float, float]:
    """Between two shapes, and between their batches, which decides where rows and steps are alike; the state must fill
    the same tile."""
    if (a.state - 1).bit_length() != (b.state - 1).bit_length() or min(b) < 1:
        return math.inf, math.inf
    rows = ROWS * abs(math.log2(a.batch * a.dim / (b.batch * b.dim)))
    return rows + abs(math.log2(a.seq / b.seq)), abs(math.log2(a.batch / b.batch))


def read(path: pathlib.Path) -> tuple[Entry, ...]:
    """The entries of a file; none where there is no file.

    Raises:
      ValueError: the file is not what tools.tune writes.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return ()
    return _read(path, changed)


@functools.lru_cache(maxsize=32)
def _read(path: pathlib.Path, changed: int) -> tuple[Entry, ...]:
    try:
        return tuple(_entry(e) for e in json.loads(path.read_text())["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected tuned configurations as tools.tune writes them, got {error!r}") from error


def _entry(record: dict[str, Any]) -> Entry:
    parts = {part: _config(record[part]) for part in ("fwd", "bwd") if part in record}
    return Entry(Sizes(**record["shape"]), str(jnp.dtype(record["dtype"])), **parts)


def _config(record: dict[str, Any]) -> KernelConfig:
    return KernelConfig(**{field.name: record[field.name] for field in dataclasses.fields(KernelConfig)})


def merged(entries: tuple[Entry, ...], new: Entry) -> tuple[Entry, ...]:
    """The entries with a new one, whose parts replace those of the same shape and dtype."""
    kept = []
    for entry in entries:
        if (entry.shape, entry.dtype) == (new.shape, new.dtype):
            new = dataclasses.replace(new, fwd=new.fwd or entry.fwd, bwd=new.bwd or entry.bwd)
        else:
            kept.append(entry)
    return (*kept, new)


def record(device_kind: str, entries: tuple[Entry, ...]) -> dict[str, Any]:
    """As JSON."""

    def one(entry: Entry) -> dict[str, Any]:
        parts = {p: dataclasses.asdict(getattr(entry, p)) for p in ("fwd", "bwd") if getattr(entry, p)}
        return {"shape": entry.shape._asdict(), "dtype": entry.dtype, **parts}

    ordered = sorted(entries, key=lambda e: (e.dtype, e.shape))
    return {"device_kind": device_kind, "entries": [one(entry) for entry in ordered]}
