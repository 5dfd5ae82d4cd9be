"""The README's example runs as it stands there."""

import pathlib
import re

import jax.numpy as jnp


def test_the_example_runs():
    text = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    names: dict = {}
    exec(code, names)
    assert names["out"].shape == (2, 256, 64)
    assert names["last"].shape == (2, 64, 16)
    assert all(jnp.isfinite(g).all() for g in names["grads"])
