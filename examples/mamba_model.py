"""Mamba-1, the language model, in plain JAX on `pallas_scan`: the whole sequence by `scan`, one token by `step`.

    x = embedding(token)
    x = x + mixer(rms_norm(x))      a layer: u, z = in_proj(x);  u = silu(conv(u));  delta, B, C = x_proj(u)
    logits = rms_norm(x) @ head              mixer = out_proj(scan(u, dt_proj(delta), A, B, C, D, z=z))

Parameters are a dict under the names that Hugging Face's checkpoints use; those of a layer are stacked, (layers, ...),
and `lax.scan` runs over them, so that compiling takes as long for 64 layers as for one. Weights of linear maps are
(out, in). Gu and Dao (2023), arXiv 2312.00752, section 3.4; FalconMamba's norms: Zuo et al. (2024), arXiv 2410.05355.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_scan import scan, step

Params = dict[str, Any]
# In float32 whatever the rest is in, as the recurrence is: rounded, they would change its time scales.
FLOAT32 = ("mixer.A_log", "mixer.D", "mixer.dt_proj.bias")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and options, by their names in a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    time_step_rank: int
    state_size: int = 16
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True
    mixer_rms_eps: float | None = None  # FalconMamba: delta, B and C go through an RMS norm without weights


class Cache(NamedTuple):
    """What decoding carries: nothing in it grows with the sequence."""

    conv: Float[Array, "layers batch kernel-1 intermediate"]  # the convolution's last inputs
    state: Float32[Array, "layers batch intermediate state"]


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of the parameters of one layer."""
    hidden, inner, rank, state = config.hidden_size, config.intermediate_size, config.time_step_rank, config.state_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        "mixer.in_proj.weight": (2 * inner, hidden),
        "mixer.conv1d.weight": (inner, 1, config.conv_kernel),
        "mixer.x_proj.weight": (rank + 2 * state, inner),
        "mixer.dt_proj.weight": (inner, rank),
        "mixer.dt_proj.bias": (inner,),
        "mixer.A_log": (inner, state),
        "mixer.D": (inner,),
        "mixer.out_proj.weight": (hidden, inner),
    }
    if config.use_conv_bias:
        shapes["mixer.conv1d.bias"] = (inner,)
    if config.use_bias:
        shapes |= {"mixer.in_proj.bias": (2 * inner,), "mixer.out_proj.bias": (hidden,)}
    return shapes


def top_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of the parameters outside the layers."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": table, "norm_f.weight": (config.hidden_size,)}
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": table}


def init(config: Config, key: Array) -> Params:
    """Random parameters in float32, drawn as the paper's code draws them: A = -(1, 2, ...), softplus(dt_proj.bias)
    log-uniform in [1e-3, 0.1], linear maps uniform in ±1/√inputs, out_proj divided by √layers."""
    layers = config.num_hidden_layers
    delta_key, embed_key, head_key, key = jax.random.split(key, 4)
    stack = {}
    for name, shape in layer_shapes(config).items():
        key, used = jax.random.split(key)
        if "proj.weight" in name or "conv1d.weight" in name:
            stack[name] = jax.random.uniform(used, (layers, *shape), minval=-1.0, maxval=1.0) * shape[-1] ** -0.5
        else:
            stack[name] = jnp.zeros((layers, *shape)) if name.endswith("bias") else jnp.ones((layers, *shape))
    low, high = math.log(1e-3), math.log(0.1)
    delta = jnp.exp(jax.random.uniform(delta_key, stack["mixer.dt_proj.bias"].shape, minval=low, maxval=high))
    stack["mixer.dt_proj.bias"] = delta + jnp.log(-jnp.expm1(-delta))  # softplus of it is delta
    stack["mixer.A_log"] = stack["mixer.A_log"] * jnp.log(jnp.arange(1.0, config.state_size + 1))
    stack["mixer.out_proj.weight"] /= math.sqrt(layers)
    params: Params = {"norm_f.weight": jnp.ones(config.hidden_size), "layers": stack}
    for name, used in (("embeddings.weight", embed_key), ("lm_head.weight", head_key)):
        if name in top_shapes(config):
            params[name] = 0.02 * jax.random.normal(used, top_shapes(config)[name])
    return params


def cast(params: Params, dtype: Any) -> Params:
    """The parameters in `dtype`, but for those of FLOAT32."""
    layers = {name: x.astype(jnp.float32 if name in FLOAT32 else dtype) for name, x in params["layers"].items()}
    return {name: x.astype(dtype) for name, x in params.items() if name != "layers"} | {"layers": layers}


def encode(
    params: Params, config: Config, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None = None
) -> tuple[Float[Array, "batch seq hidden"], Cache]:
    """Every position's vector, to go through `logits`, and the cache to decode from.

    `mask` is False at padding, which has to be on the left: there nothing enters a state.
    """

    def layer(x, p):
        y, cache = _mixer(p, config, _normed(p, config, x), mask)
        return x + y.astype(x.dtype), cache

    return jax.lax.scan(layer, _embed(params, config, tokens), params["layers"])


def decode(
    params: Params, config: Config, cache: Cache, token: Int[Array, " batch"]
) -> tuple[Float[Array, "batch hidden"], Cache]:
    """The same for one more token."""

    def layer(x, p_and_cache):
        p, cache = p_and_cache
        y, cache = _mixer_step(p, config, _normed(p, config, x), cache)
        return x + y.astype(x.dtype), cache

    return jax.lax.scan(layer, _embed(params, config, token), (params["layers"], cache))


def logits(params: Params, config: Config, x: Float[Array, "*batch hidden"]) -> Float32[Array, "*batch vocab"]:
    head = params["embeddings.weight" if config.tie_word_embeddings else "lm_head.weight"]
    x = _rms_norm(x.astype(head.dtype), config.layer_norm_epsilon) * params["norm_f.weight"]
    return (x @ head.T).astype(jnp.float32)


def _embed(params: Params, config: Config, tokens: Array) -> Array:
    x = params["embeddings.weight"][tokens]
    return x.astype(jnp.float32) if config.residual_in_fp32 else x


def _normed(p: Params, config: Config, x: Array) -> Array:
    weight = p["norm.weight"]
    return weight * _rms_norm(x.astype(weight.dtype), config.layer_norm_epsilon)


def _mixer(p: Params, config: Config, x: Array, mask: Array | None) -> tuple[Array, Cache]:
    seq = x.shape[1]
    kept = 1.0 if mask is None else mask[..., None].astype(x.dtype)
    u, z = jnp.split(_linear(p, "mixer.in_proj", x * kept), 2, axis=-1)
    window = jnp.pad(u, ((0, 0), (config.conv_kernel - 1, 0), (0, 0)))
    u = _conv(p, window, seq) * kept
    y, state = scan(u, z=z, return_final_state=True, **_recurrence(p, config, u))
    return _linear(p, "mixer.out_proj", y), Cache(window[:, seq:], state)


def _mixer_step(p: Params, config: Config, x: Array, cache: Cache) -> tuple[Array, Cache]:
    u, z = jnp.split(_linear(p, "mixer.in_proj", x), 2, axis=-1)
    window = jnp.concatenate([cache.conv, u[:, None]], axis=1)
    u = _conv(p, window, 1)[:, 0]
    y, state = step(cache.state, u, z=z, **_recurrence(p, config, u))
    return _linear(p, "mixer.out_proj", y), Cache(window[:, 1:], state)


def _conv(p: Params, window: Array, seq: int) -> Array:
    """The causal convolution along time, a channel at a time, and its silu; window has kernel - 1 steps in front."""
    weight = p["mixer.conv1d.weight"]  # (intermediate, 1, kernel)
    u = sum(window[:, k : k + seq] * weight[:, 0, k] for k in range(weight.shape[-1]))
    return jax.nn.silu(u + p.get("mixer.conv1d.bias", 0.0))


def _recurrence(p: Params, config: Config, u: Array) -> dict[str, Any]:
    """What `scan` and `step` take beside u and z; u is (batch, seq, intermediate) or (batch, intermediate)."""
    ends = (config.time_step_rank, config.time_step_rank + config.state_size)
    delta, B, C = jnp.split(_linear(p, "mixer.x_proj", u), ends, axis=-1)
    if config.mixer_rms_eps is not None:
        delta, B, C = (_rms_norm(x, config.mixer_rms_eps) for x in (delta, B, C))
    return {
        "delta": delta @ p["mixer.dt_proj.weight"].T,
        "A": -jnp.exp(p["mixer.A_log"]),
        "B": B,
        "C": C,
        "D": p["mixer.D"],
        "delta_bias": p["mixer.dt_proj.bias"],
        "delta_softplus": True,
    }


def _linear(p: Params, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _rms_norm(x: Array, eps: float) -> Array:
    """In float32, back in x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)).astype(x.dtype)
