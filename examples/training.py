"""Trains a `mamba_model` on bytes, and resumes as if it had never stopped.

Every batch is a function of the seed and the step, and a checkpoint (orbax) has the parameters, the optimiser's state,
the losses and the samples. So a run that was killed repeats the steps since its last checkpoint and ends with the same
numbers; one that is asked to stop (SIGTERM, Ctrl-C) writes a checkpoint first.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from rich.progress import Progress

from examples import hf_checkpoint, mamba_model
from examples.mamba_model import Config, Params

HELD_OUT = 0.1  # the text's last part, for the validation loss
VALIDATION_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int
    batch: int
    seq: int
    learning_rate: float
    dtype: str  # of the activations and of the weights they meet; parameters are kept in float32
    seed: int


@dataclasses.dataclass
class History:
    loss: list[float]  # of each step, nats a byte
    validation: list[tuple[int, float]]  # (steps done, loss)
    samples: list[tuple[int, str]]


class Run:
    """A training run in the folder `out`: a new one, or the one that was begun there.

    Raises:
      ValueError: `out` holds a run of another model, text or settings, or the text is too short.
    """

    def __init__(self, out: pathlib.Path, config: Config, settings: Settings, text: bytes) -> None:
        self.out, self.config, self.settings = out, config, settings
        split = len(text) - int(HELD_OUT * len(text))
        self.parts = {"train": np.frombuffer(text[:split], np.uint8), "held out": np.frombuffer(text[split:], np.uint8)}
        if (shortest := min(map(len, self.parts.values()))) <= settings.seq:
            raise ValueError(f"got a text with a part of {shortest} bytes, expected more than seq {settings.seq}")
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.learning_rate, min(50, settings.steps // 10), settings.steps, 0.1 * settings.learning_rate
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
        self.history = History([], [], [])
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells of every file
        self.checkpoints = ocp.CheckpointManager(
            (out / "checkpoints").resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )
        identity = {"model": dataclasses.asdict(config), "settings": dataclasses.asdict(settings)}
        self.identity = identity | {"text": hashlib.sha256(text).hexdigest()}
        self._begin_or_resume()

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.history.loss)

    def _begin_or_resume(self) -> None:
        self.params = mamba_model.init(self.config, jax.random.key(self.settings.seed))
        self.opt_state = self.optimizer.init(self.params)
        if (last := self.checkpoints.latest_step()) is None:
            return
        kept = self.checkpoints.restore(last, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        for what, expected in self.identity.items():
            if kept["identity"][what] != expected:
                raise ValueError(f"{self.out} holds a run with {what} {kept['identity'][what]}, got {expected}")
        state = {"params": self.params, "opt_state": self.opt_state}
        args = ocp.args.Composite(state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))
        state = self.checkpoints.restore(last, args=args)["state"]
        self.params, self.opt_state = state["params"], state["opt_state"]
        self.history = History(**kept["history"])

    def save(self) -> None:
        """The checkpoint, and what people look at: loss.png, samples.txt and the model as a Hugging Face checkpoint."""
        state = {"params": self.params, "opt_state": self.opt_state}
        run = {"identity": self.identity, "history": dataclasses.asdict(self.history)}
        self.checkpoints.save(
            self.step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        )
        hf_checkpoint.save(self.out / "model", self.params, self.config)
        plot(self.history).savefig(self.out / "loss.png", dpi=150)
        samples = (f"--- after {step} steps\n{sample}\n" for step, sample in self.history.samples)
        self.out.joinpath("samples.txt").write_text("".join(samples))

    def batch(self, part: str, index: int) -> np.ndarray:
        """(batch, seq + 1) bytes."""
        text, settings = self.parts[part], self.settings
        starts = np.random.default_rng([settings.seed, len(part), index]).integers(
            0, len(text) - settings.seq, settings.batch
        )
        return text[starts[:, None] + np.arange(settings.seq + 1)].astype(np.int32)

    def train(self, every: int, sample: Callable[[Params], str], progress: Progress) -> int | None:
        """Runs what is left, with a checkpoint, a validation loss and a sample each `every` steps.

        Returns:
          None, or the signal that ended it early.
        """
        task = progress.add_task("training", total=self.settings.steps, completed=self.step, loss="")
        stopped: list[int] = []
        handlers = {s: signal.signal(s, lambda s, _: stopped.append(s)) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.step < self.settings.steps and not stopped:
                tokens = self.batch("train", self.step)
                self.params, self.opt_state, loss = update(
                    self.params, self.opt_state, tokens, self.config, self.settings.dtype, self.optimizer
                )
                self.history.loss.append(float(loss))
                progress.update(task, completed=self.step, loss=f"loss {self.history.loss[-1]:.3f}")
                if self.step % every == 0 or self.step == self.settings.steps:
                    validation, text = self.validate(), sample(self.params)
                    self.history.validation.append((self.step, validation))
                    self.history.samples.append((self.step, text))
                    progress.console.print(f"[bold]after {self.step} steps: held-out loss {validation:.3f}")
                    progress.console.print(text, markup=False, highlight=False)
                    self.save()
            if stopped and self.checkpoints.latest_step() != self.step > 0:
                self.save()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return stopped[0] if stopped else None

    def validate(self) -> float:
        """Mean loss over batches of the held-out part, the same ones each time."""
        batches = (self.batch("held out", i) for i in range(VALIDATION_BATCHES))
        return float(np.mean([float(loss_of(self.params, x, self.config, self.settings.dtype)) for x in batches]))


def _loss(params: Params, tokens: Any, config: Config, dtype: str) -> jax.Array:
    params = mamba_model.cast(params, dtype)
    x, _ = mamba_model.encode(params, config, tokens[:, :-1])
    scores = mamba_model.logits(params, config, x)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


loss_of = jax.jit(_loss, static_argnames=("config", "dtype"))


@functools.partial(jax.jit, static_argnames=("config", "dtype", "optimizer"), donate_argnames=("params", "opt_state"))
def update(params, opt_state, tokens, config: Config, dtype: str, optimizer: optax.GradientTransformation):
    loss, grads = jax.value_and_grad(_loss)(params, tokens, config, dtype)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plot(history: History) -> Figure:
    """The loss of every step, and that of the held-out text."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(history.loss) + 1), history.loss, lw=0.8, color="tab:blue", alpha=0.7, label="training")
    if history.validation:
        axes.plot(*zip(*history.validation, strict=True), "o-", ms=3, color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
