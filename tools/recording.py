"""Recorded measurements: the JSON files that the tools write and read."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
import tempfile
from importlib import metadata
from typing import Any

import jax

from pallas_scan import processor


def device_record() -> dict[str, Any]:
    """What the measurements ran on. Keys that do not apply are None."""
    gpu = _nvidia_smi()
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [str(d) for d in jax.devices()],
        "python": platform.python_version(),
        "device_kind": jax.devices()[0].device_kind,
        "gpu": gpu[0] if gpu else None,
        "driver": gpu[1] if gpu else None,
        "gpu_memory_gb": round(float(gpu[2]) / 1024, 1) if gpu else None,
        "torch": _version("torch"),
        "torch_cuda": (_version("torch") or "").partition("+cu")[2] or None,
    }


def processor_name() -> str | None:
    """With its identification: a name alone may be that of a whole line of products."""
    fields = processor.fields()
    if "model name" not in fields:
        return None
    return f"{fields['model name']}, family {fields.get('cpu family')}, model {fields.get('model')}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> list[str] | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = [field.strip() for field in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return fields if len(fields) == 3 else None


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Replaces path by the record, or leaves it as it was: an interrupt or a full disk never leaves half a file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """The record at path.

    Raises:
      OSError: path cannot be read.
      ValueError: path is not JSON.
    """
    return json.loads(pathlib.Path(path).read_text())


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a recording of tools.benchmark; older ones have one dtype for all, which they do not name.

    Raises:
      ValueError: path cannot be read, or is not a recording.
    """
    try:
        return [{"dtype": "float32"} | row for row in read_json(path)["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a recording ({error})") from error
