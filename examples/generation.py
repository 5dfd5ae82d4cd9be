"""Generates with a `mamba_model`: the prompts in one pass, then a token a step, the state carried."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from examples import mamba_model
from examples.mamba_model import Config, Params


def generate(
    params: Params,
    config: Config,
    prompts: list[list[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Yields each next token of all prompts, (batch,) int32; they may differ in length and are padded on the left.

    Raises:
      ValueError: a prompt is empty, or has a token that the model does not know.
    """
    for prompt in prompts:
        if not prompt or not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(f"got the prompt {prompt}, expected one or more tokens in [0, {config.vocab_size})")
    longest = max(map(len, prompts))
    padded = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], np.int32)
    mask = np.arange(longest) >= longest - np.array([[len(prompt)] for prompt in prompts])
    key = jax.random.key(seed)
    token, cache = _prefill(params, config, padded, mask, temperature, top_k, key)
    for position in range(1, tokens):
        yield np.asarray(token)
        token, cache = _next(params, config, cache, token, temperature, top_k, jax.random.fold_in(key, position))
    yield np.asarray(token)


@functools.partial(jax.jit, static_argnums=(1, 4, 5))
def _prefill(params, config, tokens, mask, temperature, top_k, key):
    x, cache = mamba_model.encode(params, config, tokens, mask)
    return _pick(mamba_model.logits(params, config, x[:, -1]), temperature, top_k, key), cache


@functools.partial(jax.jit, static_argnums=(1, 4, 5), donate_argnums=2)
def _next(params, config, cache, token, temperature, top_k, key):
    x, cache = mamba_model.decode(params, config, cache, token)
    return _pick(mamba_model.logits(params, config, x), temperature, top_k, key), cache


def _pick(scores: jax.Array, temperature: float, top_k: int, key: jax.Array) -> jax.Array:
    if temperature == 0.0:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if 0 < top_k < scores.shape[-1]:
        scores = jnp.where(scores >= jax.lax.top_k(scores, top_k)[0][..., -1:], scores, -math.inf)
    return jax.random.categorical(key, scores / temperature).astype(jnp.int32)
