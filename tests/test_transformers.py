"""transformers' own Mamba models on triton_ref's kernels: the numbers of its PyTorch loop."""

import importlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

import triton_ref  # noqa: E402
from tests.torch_cases import DEVICE  # noqa: E402


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_a_model_has_the_same_logits_gradients_and_tokens_both_ways(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2, intermediate_size=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(DEVICE)
    tokens = torch.randint(3, 64, (2, 8), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # padded on the left

    def run():
        model.zero_grad()
        result = model(tokens, attention_mask=mask, labels=tokens)
        result.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        return result.logits.detach(), grads, generated

    calls = []
    in_transformers = importlib.import_module("triton_ref.in_transformers")
    want_logits, want_grads, want_tokens = run()
    with pytest.MonkeyPatch.context() as patch:
        for function in ("selective_scan_fn", "selective_state_update"):
            ours = getattr(in_transformers, function)

            def counted(*args, _ours=ours, _name=function):
                calls.append(_name)
                return _ours(*args)

            patch.setattr(in_transformers, function, counted)
        restore = triton_ref.use_in_transformers()
        try:
            logits, grads, generated = run()
        finally:
            restore()
    assert calls.count("selective_scan_fn") == 4 and calls.count("selective_state_update") == 8
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == want_grads.keys()
    for key, grad in grads.items():
        assert (grad - want_grads[key]).abs().max() <= 1e-4 * want_grads[key].abs().max(), key
    assert torch.equal(generated, want_tokens)

    calls.clear()
    run()
    assert not calls
