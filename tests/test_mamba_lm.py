"""The example's language model against transformers' own, and its training killed and resumed."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tokenizers")

from examples import generation, hf_checkpoint, mamba_model

# (model, config): the state-spaces family, FalconMamba, and every option that changes the parameters.
MODELS = [
    ("Mamba", {}),
    ("FalconMamba", {"tie_word_embeddings": False}),
    ("Mamba", {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "conv_kernel": 3, "expand": 1}),
]
PADDING = np.array([4, 0, 1])  # of each row, on the left


@pytest.fixture(autouse=True)
def _model_code_may_broadcast():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: "-".join([m[0], *m[1]]))
def both(request, tmp_path_factory):
    """transformers' model, and ours from what it saved, in shards."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, options = request.param
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "state_size": 8, "num_hidden_layers": 3}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes, **ends, **options)
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.eval().save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return theirs, hf_checkpoint.load(folder)


def _tokens(seq=21):
    return np.random.default_rng(0).integers(3, 96, (len(PADDING), seq)).astype(np.int32)


def _close(got, want, tolerance):
    return np.abs(np.asarray(got) - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_transformers(both, padded):
    import torch

    theirs, (params, config, _) = both
    tokens = _tokens()
    mask = np.arange(tokens.shape[1]) >= PADDING[:, None] * padded
    with torch.no_grad():
        want = theirs(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
    x, _ = mamba_model.encode(params, config, tokens, jnp.asarray(mask) if padded else None)
    assert _close(np.asarray(mamba_model.logits(params, config, x))[mask], want[mask], 1e-4)


def test_parameter_gradients_are_transformers(both):
    import torch

    theirs, (params, config, _) = both
    tokens = _tokens()
    theirs.zero_grad()
    theirs(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long()).loss.backward()

    def loss(params):
        x, _ = mamba_model.encode(params, config, tokens[:, :-1])
        scores = jax.nn.log_softmax(mamba_model.logits(params, config, x))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    grads = hf_checkpoint.to_hf(jax.grad(loss)(params))
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for name, want in wanted.items():
        assert _close(grads[name], want, 1e-3), name


def test_greedy_tokens_are_transformers_with_left_padding(both):
    import torch

    theirs, (params, config, end_tokens) = both
    tokens = _tokens(seq=9)
    mask = np.arange(9) >= PADDING[:, None]
    want = theirs.generate(
        torch.tensor(tokens * mask).long(), attention_mask=torch.tensor(mask).long(), max_new_tokens=24, do_sample=False
    )[:, 9:].numpy()
    prompts = [row[pad:].tolist() for row, pad in zip(tokens, PADDING, strict=True)]
    got = np.stack(list(generation.generate(params, config, prompts, 24)), axis=1)
    for ours, row in zip(got, want, strict=True):
        ends = np.flatnonzero(np.isin(ours, end_tokens))
        length = ends[0] + 1 if ends.size else 24
        np.testing.assert_array_equal(ours[:length], row[:length])
        assert (row[length:] == 0).all()  # transformers pads after the end


def test_what_save_writes_is_read_back_by_both(both, tmp_path):
    import torch

    theirs, (params, config, _) = both
    hf_checkpoint.save(tmp_path, params, config)
    again, config_again, _ = hf_checkpoint.load(tmp_path)
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    other = type(theirs).from_pretrained(tmp_path).eval()
    tokens = torch.tensor(_tokens()).long()
    torch.testing.assert_close(other(tokens).logits, theirs(tokens).logits)


def _config(**options):
    return mamba_model.Config(256, 16, 2, intermediate_size=32, time_step_rank=1, state_size=4, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_goes_on_where_the_sequence_ends(dtype):
    config = _config(mixer_rms_eps=1e-6, use_bias=True)
    params = mamba_model.cast(mamba_model.init(config, jax.random.key(0)), dtype)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 12))
    whole, _ = mamba_model.encode(params, config, tokens)
    _, cache = mamba_model.encode(params, config, tokens[:, :7])
    decode = jax.jit(mamba_model.decode, static_argnums=1)
    for t in range(7, 12):
        x, cache = decode(params, config, cache, tokens[:, t])
        assert _close(x, np.asarray(whole[:, t]), {"float32": 1e-5, "bfloat16": 3e-2}[dtype])


def test_top_k_of_one_is_greedy_and_a_seed_draws_the_same():
    config = _config()
    params = mamba_model.init(config, jax.random.key(0))

    def tokens(**options):
        return np.stack(list(generation.generate(params, config, [[1, 2, 3]], 12, **options))).tolist()

    assert tokens(temperature=1.0, top_k=1) == tokens()
    assert tokens(temperature=1.0, seed=1) == tokens(temperature=1.0, seed=1) != tokens(temperature=1.0, seed=2)


@pytest.mark.parametrize("prompt", [[], [1, 256], [-1]])
def test_a_prompt_the_model_cannot_read_is_refused(prompt):
    with pytest.raises(ValueError, match=r"got the prompt .* expected one or more tokens in \[0, 256\)"):
        next(generation.generate({}, _config(), [prompt], 1))


def _broken(folder, change):
    config = _config()
    params = mamba_model.init(config, jax.random.key(0))
    hf_checkpoint.save(folder, params, config)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "got model_type 'llama', expected one of"),
        ({"vocab_size": None}, "got a config.json without vocab_size"),
        ({"hidden_act": "gelu"}, "got hidden_act 'gelu', expected 'silu'"),
        ({"num_hidden_layers": 3}, r"the weights lack 'backbone\.layers\.2\.norm\.weight'"),
        ({"num_hidden_layers": 1}, r"got weights \['backbone\.layers\.1.*that config\.json does not tell of"),
        ({"state_size": 5}, r"got backbone\.layers\.0\.mixer\.\w+\S* of shape .* expected .* by config\.json"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, message):
    _broken(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        hf_checkpoint.load(tmp_path)


ROOT = pathlib.Path(__file__).parents[1]
SMALL = ["--steps=12", "--every=4", "--batch=2", "--seq=16", "--dim=16", "--layers=1"]


def _command(*args):
    return [sys.executable, "-m", "examples.mamba_lm", *args]


def _environment():
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def _run(*args):
    return subprocess.run(_command(*args), cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=600)


def _history(out):
    (path,) = sorted((out / "checkpoints").glob("12/run/metadata"))
    return json.loads(path.read_text())["history"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "straight"
    done = _run("train", *SMALL, f"--out={out}")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_run_that_was_killed_ends_as_one_that_was_not(trained, tmp_path, number, code):
    out = tmp_path / "killed"
    process = subprocess.Popen(
        _command("train", *SMALL, f"--out={out}"), cwd=ROOT, env=_environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (out / "checkpoints/4").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    assert not (out / "checkpoints/12").exists()

    done = _run("train", *SMALL, f"--out={out}")
    assert done.returncode == 0 and "going on from step" in done.stderr, done.stderr
    assert _history(out) == _history(trained)
    for name in ("model/model.safetensors", "samples.txt"):
        assert (out / name).read_bytes() == (trained / name).read_bytes()


def test_training_learns_and_leaves_a_picture_and_a_model_to_generate_from(trained):
    history = _history(trained)
    assert len(history["loss"]) == 12 and history["loss"][-1] < history["loss"][0]
    assert [step for step, _ in history["validation"]] == [4, 8, 12] == [step for step, _ in history["samples"]]
    assert (trained / "loss.png").stat().st_size > 10_000
    done = _run("generate", f"--checkpoint={trained}/model", "--prompt=de", "--prompt=import jax", "--tokens=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("de") and "\nimport jax" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", *SMALL, "--seed=1"], "holds a run with settings"),
        (["train", *SMALL, "--text=README.md"], "holds a run with text"),
        (["train", "--seq=1000000", "--out=/nowhere"], "expected more than seq 1000000"),
        (["generate", "--checkpoint=/nowhere"], r"--checkpoint=/nowhere: .*config\.json"),
        (["chat"], r"got \['chat'\], expected one of \['train', 'generate'\]"),
    ],
)
def test_a_wrong_command_is_a_usage_error(trained, args, message):
    out = [] if any(a.startswith("--out") for a in args) else [f"--out={trained}"]
    done = _run(*args, *out)
    assert done.returncode == 1
    assert re.search(message, done.stdout + done.stderr), done.stderr
