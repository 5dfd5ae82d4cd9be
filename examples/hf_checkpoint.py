"""Hugging Face's checkpoint folders, config.json and safetensors in one file or in shards, and `mamba_model`'s."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from safetensors import safe_open
from safetensors.flax import save_file

from examples.mamba_model import FLOAT32, Config, Params, layer_shapes, top_shapes

TOP = {  # ours: theirs
    "embeddings.weight": "backbone.embeddings.weight",
    "norm_f.weight": "backbone.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
MODEL_TYPES = ("mamba", "falcon_mamba")


class Checkpoint(NamedTuple):
    params: Params
    config: Config
    end_tokens: tuple[int, ...]  # those that end a text


def load(folder: str | os.PathLike[str], dtype: Any = jnp.float32) -> Checkpoint:
    """The folder's model, its parameters in dtype but for those that stay in float32.

    Raises:
      FileNotFoundError: the folder lacks config.json or the weights.
      ValueError: another kind of model or activation, a size missing, or weights missing, too many or of another shape.
    """
    folder = pathlib.Path(folder)
    raw = _read_config(folder)
    config = _config(raw)
    weights = _Weights(folder)
    stack = {}
    for name, shape in layer_shapes(config).items():
        layers = [weights.take(f"backbone.layers.{i}.{name}", shape) for i in range(config.num_hidden_layers)]
        stack[name] = jnp.stack(layers).astype(jnp.float32 if name in FLOAT32 else dtype)
    params: Params = {name: weights.take(TOP[name], shape).astype(dtype) for name, shape in top_shapes(config).items()}
    params["layers"] = stack
    weights.check_all_taken(but=TOP["lm_head.weight"])  # some checkpoints repeat a tied embedding under this name
    end = raw.get("eos_token_id")
    return Checkpoint(params, config, () if end is None else tuple(end) if isinstance(end, list) else (end,))


def save(folder: str | os.PathLike[str], params: Params, config: Config) -> None:
    """Writes what `load` and transformers' `from_pretrained` read."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    model_type, name = ("mamba", "Mamba") if config.mixer_rms_eps is None else ("falcon_mamba", "FalconMamba")
    raw |= {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], "hidden_act": "silu"}
    raw |= {"expand": config.intermediate_size // config.hidden_size, "eos_token_id": None, "bos_token_id": None}
    temporary = folder / ".model.safetensors"
    save_file(to_hf(params), temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")
    folder.joinpath("config.json").write_text(json.dumps(raw, indent=2) + "\n")


def to_hf(params: Params) -> dict[str, Array]:
    """The same tensors, a layer at a time, under the names in a checkpoint."""
    tensors = {TOP[name]: x for name, x in params.items() if name != "layers"}
    for name, stack in params["layers"].items():
        tensors |= {f"backbone.layers.{i}.{name}": x for i, x in enumerate(stack)}
    return tensors


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    raw = json.loads(folder.joinpath("config.json").read_text())
    if raw.get("model_type") not in MODEL_TYPES:
        raise ValueError(f"{folder}: got model_type {raw.get('model_type')!r}, expected one of {MODEL_TYPES}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{folder}: got hidden_act {raw['hidden_act']!r}, expected 'silu'")
    if lacking := [name for name in ("vocab_size", "hidden_size", "num_hidden_layers") if name not in raw]:
        raise ValueError(f"{folder}: got a config.json without {', '.join(lacking)}")
    return raw


def _config(raw: dict[str, Any]) -> Config:
    hidden = raw["hidden_size"]
    rank = raw.get("time_step_rank", "auto")
    sizes = {
        "intermediate_size": raw.get("intermediate_size") or int(raw.get("expand", 2) * hidden),
        "time_step_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
    }
    if raw["model_type"] == "falcon_mamba":
        sizes["mixer_rms_eps"] = raw.get("mixer_rms_eps", 1e-6)
    fields = {field.name for field in dataclasses.fields(Config)} - sizes.keys() - {"mixer_rms_eps"}
    return Config(**sizes, **{name: raw[name] for name in fields if name in raw})


class _Weights:
    """The tensors of all the folder's files, each read when it is taken."""

    def __init__(self, folder: pathlib.Path) -> None:
        index = folder / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
        self.folder = folder
        self.files: dict[str, tuple[Any, str]] = {}  # (its file, its name there)
        for name in names or ["model.safetensors"]:
            file = safe_open(folder / name, framework="flax")
            # The original checkpoints say "embedding".
            self.files |= {key.replace("embedding.", "embeddings."): (file, key) for key in file.keys()}  # noqa: SIM118
        self.left = set(self.files)

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        if name not in self.files:
            raise ValueError(f"{self.folder}: the weights lack {name!r}")
        self.left.discard(name)
        file, key = self.files[name]
        tensor = file.get_tensor(key)
        if tensor.shape != shape:
            raise ValueError(f"{self.folder}: got {name} of shape {tensor.shape}, expected {shape} by config.json")
        return tensor

    def check_all_taken(self, but: str) -> None:
        if left := sorted(self.left - {but}):
            raise ValueError(f"{self.folder}: got weights {left[:5]} that config.json does not tell of")
