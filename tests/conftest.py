"""Strict promotion everywhere: a silent cast or a broadcast by rank in the library is an error in every test."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
