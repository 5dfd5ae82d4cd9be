"""The benchmark's table on the screen."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(results: list[dict[str, Any]], other: list[dict[str, Any]] | None = None) -> Table:
    """A row an implementation and cell; ratios are scan's figure over the implementation's, so more is better."""
    view = Table(title="x scan: scan's figure / this one's (more is better)", title_justify="left")
    on_gpu = any("floor_ms" in row for row in results)
    left = ["batch x seq x dim x state", "dtype", "mode", "impl"]
    right = ["ms", "x scan", "temp MB", "x scan", "compile s", "rel. err"]
    right += ["kernel ms", "x floor", "peak MB"] if on_gpu else []
    right += ["other's ms", "x other", "other's temp MB", "other's x scan"] if other is not None else []
    for column in left:
        view.add_column(column)
    for column in right:
        view.add_column(column, justify="right")

    def key(row):
        return (*row["shape"].values(), row["dtype"], row["mode"], row["impl"])

    theirs = {key(row): row for row in other or []}
    ours = {key(row): row for row in results}
    cell = None
    for row in results:
        base = ours.get((*key(row)[:-1], "scan"))
        if cell not in (None, key(row)[:-1]):
            view.add_section()
        fresh, cell = cell != key(row)[:-1], key(row)[:-1]
        error = row.get("rel_err_vs_scan")
        cells = [" x ".join(str(v) for v in row["shape"].values()), row["dtype"], row["mode"]] if fresh else [""] * 3
        cells += [
            row["impl"],
            "no memory" if "error" in row else f"{row['median_ms']:.3f}" if on_gpu else f"{row['median_ms']:.1f}",
            _ratio(base, row, "median_ms"),
            f"{row['xla_temp_mb']:.2f}",
            _ratio(base, row, "xla_temp_mb"),
            f"{row['compile_s']:.2f}",
            f"{error:.1e}" if error is not None else "",
        ]
        if on_gpu:
            profiled = "kernel_ms" in row
            cells += [f"{row['kernel_ms']:.4f}", f"{row['x_floor']:.2f}"] if profiled else ["", ""]
            cells.append(f"{row['peak_mb']:.1f}" if "peak_mb" in row else "")
        if other is not None:
            match = theirs.get(key(row))
            their_base = theirs.get((*key(row)[:-1], "scan"))
            cells += [
                f"{match['median_ms']:.1f}" if match and match["median_ms"] else "",
                _ratio(match, row, "median_ms"),
                f"{match['xla_temp_mb']:.2f}" if match else "",
                _ratio(their_base, match, "median_ms"),
            ]
        view.add_row(*cells)
    return view


def _ratio(base: dict[str, Any] | None, row: dict[str, Any] | None, key: str) -> str:
    return f"{base[key] / row[key]:.2f}" if base and row and base[key] and row[key] else ""
