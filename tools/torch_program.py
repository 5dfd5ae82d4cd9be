"""PyTorch's implementations for the benchmark: triton_ref, and mamba_ssm and mamba.py where they are installed.

They take and return the JAX arrays of the benchmark's other programs, without copies.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from tools.kernel_time import KernelTime

# Each with what has to be importable; mambapy is mamba.py's package.
NEEDED = {
    "triton_ref": ("torch", "triton"),
    "mamba_ssm": ("torch", "mamba_ssm", "selective_scan_cuda"),
    "mambapy": ("torch", "mambapy"),
}
NAMES = tuple(NEEDED)
WINDOW = 20  # calls a graph


def importable(name: str) -> bool:
    return all(importlib.util.find_spec(module) for module in NEEDED[name])


class TorchProgram:
    """One of NAMES, forward or with the gradients of every input of sum(out²) / 2, as a function of `arguments`."""

    def __init__(self, name: str, mode: str) -> None:
        import torch

        self.torch, self.name, self.mode = torch, name, mode
        self._inputs: dict[int, dict[str, Any]] = {}

    def __call__(self, arguments: dict[str, jax.Array]) -> Any:
        result = self.launch(arguments)
        self.synchronize()
        return jax.tree.map(lambda x: jax.dlpack.from_dlpack(x.detach().contiguous()), result)

    def launch(self, arguments: dict[str, jax.Array]) -> Any:
        """As torch tensors, not waited for: out, or a dict of gradients."""
        inputs = self.inputs(arguments)
        if self.mode == "fwd":
            with self.torch.no_grad():
                return self._moved("u", self._scan(inputs))
        out = self._scan(inputs)
        grads = self.torch.autograd.grad(out, list(inputs.values()), out.detach())
        return {name: self._moved(name, grad) for name, grad in zip(inputs, grads, strict=True)}

    def synchronize(self) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def inputs(self, arguments: dict[str, jax.Array]) -> dict[str, Any]:
        """The arguments as leaves of torch, in the implementation's own layout, made once."""
        if id(arguments) not in self._inputs:
            shared = {name: self.torch.utils.dlpack.from_dlpack(x) for name, x in arguments.items()}
            moved = {name: self._moved(name, x).contiguous() for name, x in shared.items()}
            self._inputs[id(arguments)] = {name: x.detach().requires_grad_() for name, x in moved.items()}
        return self._inputs[id(arguments)]

    def _moved(self, name: str, x: Any) -> Any:
        """mamba_ssm has the sequence last."""
        return x.transpose(1, 2) if self.name == "mamba_ssm" and name in ("u", "delta", "B", "C") else x

    def _scan(self, inputs: dict[str, Any]) -> Any:
        if self.name == "triton_ref":
            from triton_ref import selective_scan

            return selective_scan(**inputs)
        if self.name == "mambapy":
            return self._mambapy(**inputs)
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        return selective_scan_fn(*(inputs[name] for name in ("u", "delta", "A", "B", "C", "D")))

    def _mambapy(self, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
        """mamba.py has the recurrence alone: its operands and its result are (batch, seq, dim, state)."""
        from mambapy.pscan import pscan

        states = pscan((delta[..., None] * A).exp(), (delta * u)[..., None] * B[:, :, None])
        return (self.torch.einsum("bldn,bln->bld", states, C.to(states.dtype)) + D * u).to(u.dtype)

    def bytes_used(self, arguments: dict[str, jax.Array]) -> tuple[int, int, int]:
        """Temporary, argument and result bytes of a call; on a CPU, where torch does not count, temporaries are 0."""
        given = sum(x.nbytes for x in arguments.values())
        if not self.torch.cuda.is_available():
            return 0, given, sum(x.nbytes for x in jax.tree.leaves(self(arguments)))
        self.inputs(arguments)
        self.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        result = self.launch(arguments)
        self.synchronize()
        returned = sum(x.numel() * x.element_size() for x in jax.tree.leaves(result))
        return self.torch.cuda.max_memory_allocated() - before - returned, given, returned

    def kernel_time(self, rotation: Sequence[dict[str, jax.Array]], *, windows: int = 5) -> KernelTime:
        """By events around the replay of one CUDA graph of WINDOW calls, which take turns in `rotation`: kernels and
        the gaps between them, without the host."""
        cuda = self.torch.cuda
        turns = [rotation[i % len(rotation)] for i in range(WINDOW)]
        graph = self._captured(turns)
        times = []
        for _ in range(windows):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # keeps the device busy while the next is queued
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / WINDOW)
        del graph
        cuda.empty_cache()  # for JAX's allocator
        q1, median, q3 = statistics.quantiles(times, n=4)
        return KernelTime(median, q1, q3, {})

    def _captured(self, turns: Sequence[dict[str, jax.Array]]) -> Any:
        cuda = self.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # what a first call compiles and allocates may not be in a graph
            for arguments in {id(x): x for x in turns}.values():
                self.launch(arguments)
        cuda.current_stream().wait_stream(side)
        self.synchronize()
        cuda.empty_cache()  # the graph's memory is its own, and where it lacks some, nothing can be freed any more
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, capture_error_mode="thread_local"):  # JAX's threads may allocate meanwhile
            for arguments in turns:
                self.launch(arguments)
        return graph
