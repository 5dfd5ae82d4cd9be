"""A Mamba language model: train it on a text, or load a Hugging Face checkpoint, and generate.

    python -m examples.mamba_lm train                          # on this repository's own text; --text=FILE for another
    python -m examples.mamba_lm generate --prompt="def scan("  # from what was trained
    python -m examples.mamba_lm generate --checkpoint=mamba-130m-hf --prompt="A state space model is"

`train` goes on where it was stopped or killed. `generate` runs a prompt through `pallas_scan.scan` and each further
token through `pallas_scan.step`; several --prompt are one batch. Nothing is fetched: a checkpoint is a folder with
config.json, safetensors and tokenizer.json; without the last, and with 256 tokens, a token is a byte.
"""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
import time
from typing import Protocol

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from examples import hf_checkpoint
from examples.generation import generate
from examples.mamba_model import Config, Params

FLAGS = flags.FLAGS
OUT = "runs/mamba_lm"
SAMPLE_PROMPT, SAMPLE_BYTES = "\n", 200

# Training.
flags.DEFINE_string("text", None, "A text file; by default this repository's Python and Markdown.")
flags.DEFINE_string("out", OUT, "Folder of the run: checkpoints, loss.png, samples.txt and the model.")
flags.DEFINE_integer("steps", 500, "Steps in all.", lower_bound=1)
flags.DEFINE_integer("batch", 8, "Sequences a step.", lower_bound=1)
flags.DEFINE_integer("seq", 256, "Bytes a sequence.", lower_bound=1)
flags.DEFINE_integer("dim", 128, "Width of the model; the scan's dim is twice that.", lower_bound=1)
flags.DEFINE_integer("layers", 4, "Layers.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "The highest, after the warm-up.", lower_bound=0.0)
flags.DEFINE_integer("every", 50, "Steps between checkpoints, validations and samples.", lower_bound=1)
# Generating.
flags.DEFINE_string("checkpoint", f"{OUT}/model", "Folder of a Mamba or FalconMamba checkpoint.")
flags.DEFINE_multi_string("prompt", ["\n"], "What to go on from; give it several times for a batch.")
flags.DEFINE_integer("tokens", 200, "Tokens to generate at most.", lower_bound=1)
flags.DEFINE_float("temperature", 0.0, "Of the draw; 0 takes the likeliest token.", lower_bound=0.0)
flags.DEFINE_integer("top_k", 0, "Draws among so many of the likeliest tokens; 0: among all.", lower_bound=0)
# Both.
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of activations and weights.")
flags.DEFINE_integer("seed", 0, "Of parameters, batches and draws.", lower_bound=0)


class Vocabulary(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FromFile:
    def __init__(self, path: pathlib.Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def vocabulary(folder: pathlib.Path, vocab_size: int) -> Vocabulary:
    """
    Raises:
      ValueError: no tokenizer.json, and tokens are not bytes.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        return FromFile(path)
    if vocab_size != 256:
        raise ValueError(f"{folder} has no tokenizer.json, and {vocab_size} tokens; expected 256, which would be bytes")
    return Bytes()


def main_generate(console: Console) -> None:
    folder = pathlib.Path(FLAGS.checkpoint)
    try:
        params, config, end_tokens = hf_checkpoint.load(folder, FLAGS.dtype)
        words = vocabulary(folder, config.vocab_size)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"--checkpoint={folder}: {error}") from error
    options = {"temperature": FLAGS.temperature, "top_k": FLAGS.top_k, "seed": FLAGS.seed}
    try:
        prompts = [words.encode(prompt) for prompt in FLAGS.prompt]
        stream = generate(params, config, prompts, FLAGS.tokens, **options)
        start = time.perf_counter()
        steps = [next(stream)]
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    prefill = time.perf_counter() - start
    ended = np.zeros(len(prompts), bool)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=FLAGS.tokens, completed=1)
        while not (ended := ended | np.isin(steps[-1], end_tokens)).all():
            if (step := next(stream, None)) is None:
                break
            steps.append(step)
            progress.update(task, completed=len(steps))
    seconds = time.perf_counter() - start - prefill
    for prompt, row in zip(FLAGS.prompt, np.stack(steps, axis=1).tolist(), strict=True):
        end = next((i for i, token in enumerate(row) if token in end_tokens), len(row))
        print(prompt + words.decode(row[:end]))
    rate = len(prompts) * (len(steps) - 1) / seconds
    console.print(f"prompts in {prefill:.2f} s, then {rate:.0f} tokens a second, compiling included", style="dim")


def main_train(console: Console) -> None:
    from examples import training  # orbax and optax take seconds to import

    hidden = FLAGS.dim
    config = Config(256, hidden, FLAGS.layers, intermediate_size=2 * hidden, time_step_rank=math.ceil(hidden / 16))
    settings = training.Settings(FLAGS.steps, FLAGS.batch, FLAGS.seq, FLAGS.learning_rate, FLAGS.dtype, FLAGS.seed)
    try:
        text = pathlib.Path(FLAGS.text).read_bytes() if FLAGS.text else own_text()
        run = training.Run(pathlib.Path(FLAGS.out), config, settings, text)
    except (OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    if run.step:
        console.print(f"going on from step {run.step} of {settings.steps} in {FLAGS.out}")

    def sample(params: Params) -> str:
        stream = generate(
            params, config, [Bytes().encode(SAMPLE_PROMPT)], SAMPLE_BYTES, temperature=0.8, seed=FLAGS.seed
        )
        return Bytes().decode([int(token[0]) for token in stream])

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        stopped = run.train(FLAGS.every, sample, progress)
    if stopped:
        console.print(f"stopped at step {run.step}, kept in {FLAGS.out}; the same command goes on from there")
        sys.exit(128 + stopped)
    console.print(f"wrote {FLAGS.out}/loss.png, samples.txt and model/")


def own_text() -> bytes:
    """This repository's Python and Markdown, as committed."""
    root = pathlib.Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True)
    names = listed.stdout.split() or [str(p.relative_to(root)) for kind in ("*.py", "*.md") for p in root.rglob(kind)]
    return b"\n".join(root.joinpath(name).read_bytes() for name in sorted(names))


def main(argv: list[str]) -> None:
    commands = {"train": main_train, "generate": main_generate}
    if len(argv) != 2 or argv[1] not in commands:
        raise app.UsageError(f"got {argv[1:]}, expected one of {list(commands)}")
    commands[argv[1]](Console(stderr=True))


if __name__ == "__main__":
    FLAGS.set_gnu_getopt(True)  # flags may follow the command
    app.run(main)
