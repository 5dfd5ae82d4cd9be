"""What the GPU kernels compile to, on a machine with no GPU: registers, spills, shared memory, instructions.

    python -m tools.inspect_kernels
    python -m tools.inspect_kernels --devices="NVIDIA GeForce RTX 3090" --architectures=86 --fail_on_spill

Each kernel is lowered by JAX to Triton's IR, compiled by the `triton` package for the architecture, and read back with
its cuobjdump and nvdisasm. The hot loop is the longest loop with no loop inside; instructions and exps (MUFU.EX2) are
those a state element: one batch row, step, channel and state. XLA bundles its own Triton, so counts can differ a little
from a run's.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax._src.lib.mlir import ir
from jax._src.pallas.triton import lowering as triton_lowering
from jaxtyping import Array
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pallas_scan import _compat, config, pallas_backward, pallas_cut, pallas_forward, tuning
from pallas_scan.problem import Operands, Options
from tools import inputs, recording

DEVICES = {"NVIDIA GeForce RTX 3090": 82, "NVIDIA H200": 132}  # and their multiprocessors

_ARCHITECTURES = flags.DEFINE_list("architectures", ["80", "86", "89", "90"], "Compute capabilities, without the dot.")
_DEVICES = flags.DEFINE_list("devices", list(DEVICES), f"Any of {', '.join(DEVICES)}.")
_SHAPE = flags.DEFINE_string("shape", "4x2048x1024x16", "batch x seq x dim x state.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "dtypes of the activations.")
_OUT = flags.DEFINE_string("out", None, "Where to write the table as JSON.")
_FAIL_ON_SPILL = flags.DEFINE_bool("fail_on_spill", False, "Exit with status 1 if a kernel spills registers.")


flags.register_validator(_SHAPE, lambda text: inputs.are_shapes([text]))
flags.register_validator(
    _ARCHITECTURES, lambda v: bool(v) and all(a.isdigit() for a in v), message="expected numbers such as 86"
)
flags.register_validator(
    _DEVICES,
    lambda v: bool(v) and set(v) <= set(DEVICES),
    message=f"expected any of {', '.join(DEVICES)}",
)
flags.register_validator(
    _DTYPES,
    lambda v: bool(v) and set(v) <= {"float32", "bfloat16", "float16"},
    message="expected any of float32, bfloat16, float16",
)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One kernel as Triton IR."""

    name: str
    num_warps: int
    num_stages: int
    ttir: str


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One kernel as machine code. spills: instructions that move a register to or from local memory."""

    device: str
    kernel: str
    dtype: str
    architecture: int
    registers: int
    spills: int
    shared_bytes: int
    instructions_per_element: float
    exps_per_element: float


def lower(function: Any, *arguments: Any) -> list[Lowered]:
    """The kernels of a jitted function, lowered for a GPU that need not be there."""
    with _compat.lowering_for_gpu():
        module = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    assert module is not None
    return [_kernel(op) for op in _operations(module.operation) if "triton" in _target(op)]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _target(operation: Any) -> str:
    return str(operation.attributes["call_target_name"]) if operation.name == "stablehlo.custom_call" else ""


def _kernel(operation: Any) -> Lowered:
    fields = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    with triton_lowering._new_ir_context():
        ttir = str(ir.Module.parse(ir.StringAttr(fields["ir"]).value_bytes))
    return Lowered(
        ir.StringAttr(fields["name"]).value,
        ir.IntegerAttr(fields["num_warps"]).value,
        ir.IntegerAttr(fields["num_stages"]).value,
        ttir,
    )


def machine_code(kernel: Lowered, architecture: int) -> tuple[int, int, list[str], dict[str, int]]:
    """Registers, bytes of shared memory, the instructions, and where each label points among them."""
    import triton
    from triton.backends.compiler import GPUTarget

    binaries = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.ttir")
        source.write_text(kernel.ttir)
        options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        compiled = triton.compile(str(source), target=GPUTarget("cuda", architecture, 32), options=options)
        cubin = pathlib.Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])

        def run(*command: str) -> str:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = run(str(binaries / "cuobjdump"), "-res-usage", str(cubin))
        listing = run(str(binaries / "nvdisasm"), "-c", str(cubin))
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no register count: {usage!r}")
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    return int(registers[1]), compiled.metadata.shared, instructions, labels


def hot_loop(instructions: list[str], labels: dict[str, int]) -> list[str]:
    """The longest loop that has none inside."""
    loops = []
    for end, instruction in enumerate(instructions):
        branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        if branch and labels.get(branch[1], end) < end:
            loops.append((labels[branch[1]], end))
    innermost = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    start, end = max(innermost, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return instructions[start : end + 1]


def kernels(shape: inputs.Shape, dtype: str, device: str) -> Iterator[tuple[Lowered, int]]:
    """Each kernel of a forward and a backward with several segments, and the state elements a thread has a chunk."""
    batch, seq, dim, state = shape

    def array(*sizes: int, of: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(of))

    ops = jax.eval_shape(lambda: inputs.operands(shape, dtype))
    chosen = tuning.choose(ops.sizes, dtype, device, DEVICES[device])
    options = Options(save_every=config.save_every(dtype))
    forward = pallas_cut.fit(chosen.fwd, ops, options, thread=pallas_forward.THREAD, interpret=False, intervals=False)
    backward = pallas_cut.fit(chosen.bwd, ops, options, thread=pallas_backward.THREAD, interpret=False, intervals=True)
    saved = array(batch, -(-seq // options.save_every), state, dim)

    def elements(cut: pallas_cut.Cut) -> int:
        return cut.chunk * cut.values_a_thread

    for kernel in lower(lambda ops: pallas_forward.scan(ops, options, forward, save=True), ops):
        yield kernel, elements(forward)
    dout = array(batch, seq, dim, of=dtype)

    def gradients(ops: Operands, saved: Array, dout: Array) -> Operands:
        return pallas_backward.gradients(ops, options, backward, saved, dout, None)

    for kernel in lower(gradients, ops, saved, dout):
        yield kernel, elements(backward)


def inspect(kernel: Lowered, elements: int, device: str, dtype: str, architecture: int) -> Inspected:
    registers, shared, instructions, labels = machine_code(kernel, architecture)
    loop = hot_loop(instructions, labels)
    return Inspected(
        device=device,
        kernel=kernel.name,
        dtype=dtype,
        architecture=architecture,
        registers=registers,
        spills=sum(bool(re.search(r"\b(STL|LDL)\b", i)) for i in instructions),
        shared_bytes=shared,
        instructions_per_element=round(len(loop) / elements, 2),
        exps_per_element=round(sum("MUFU.EX2" in i for i in loop) / elements, 2),
    )


def table(rows: list[Inspected]) -> Table:
    view = Table(title="instructions and exps: a state element in the hot loop", title_justify="left")
    for field in dataclasses.fields(Inspected):
        name = field.name.replace("_per_element", "").replace("_", " ")
        view.add_column(name, justify="left" if field.type == "str" else "right")
    for row in rows:
        view.add_row(*(str(value) for value in dataclasses.astuple(row)))
    return view


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # as XLA compiles: a product and a sum stay two instructions
    shape = inputs.parse_shape(_SHAPE.value)
    work = [
        (kernel, elements, device, dtype, int(architecture))
        for device in _DEVICES.value
        for dtype in _DTYPES.value
        for kernel, elements in kernels(shape, dtype, device)
        for architecture in _ARCHITECTURES.value
    ]
    rows = []
    with tempfile.TemporaryDirectory() as cache, Progress(console=Console(stderr=True), transient=True) as progress:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        for item in progress.track(work, description="compiling"):
            rows.append(inspect(*item))
    Console(width=None if sys.stdout.isatty() else 150).print(table(rows))
    if _OUT.value:
        recording.write_json(_OUT.value, {"shape": shape, "kernels": [dataclasses.asdict(row) for row in rows]})
    spilled = [row for row in rows if row.spills]
    if spilled and _FAIL_ON_SPILL.value:
        sys.exit("registers spilled in " + ", ".join(f"{r.kernel} ({r.dtype}, sm_{r.architecture})" for r in spilled))


if __name__ == "__main__":
    app.run(main)
