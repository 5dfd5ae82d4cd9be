"""What Linux says of this machine's processor."""

from __future__ import annotations

import functools
import pathlib

PROCESSORS = pathlib.Path("/proc/cpuinfo")


@functools.cache
def fields() -> dict[str, str]:
    """The first processor's entry: "vendor_id" ("GenuineIntel", "AuthenticAMD"), "model name" and more, which Arm's
    lack. Empty where there is no Linux to tell."""
    try:
        lines = PROCESSORS.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
