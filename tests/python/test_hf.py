"""Small Llama and Qwen3 models, built from their configurations, with attn_implementation="lla"."""
import math

import pytest
import torch
from helpers import relative

import lla

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "qwen3 sliding": lambda: Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=5,
                                         max_window_layers=1),
}


@pytest.fixture(autouse=True)
def registered():
    lla.hf.register(ridge=0.5, tol=1e-7)


def make(kind, device, implementation="lla", dtype=torch.float32):
    config = CONFIGS[kind]()
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return model.to(device).eval()


def tokens(*size, device):
    return torch.randint(3, 61, size, generator=torch.Generator().manual_seed(2)).to(device)


def padded(lengths, side, device):
    """ids and attention_mask of sequences of these lengths, padded on one side."""
    longest = max(lengths)
    ids, mask = (torch.zeros(len(lengths), longest, dtype=torch.long) for _ in range(2))
    for b, n in enumerate(lengths):
        where = slice(0, n) if side == "right" else slice(longest - n, longest)
        ids[b, where], mask[b, where] = tokens(len(lengths), longest, device="cpu")[b, :n], 1
    return ids.to(device), mask.to(device)


@pytest.mark.parametrize("kind", CONFIGS)
def test_infinite_ridge_is_the_softmax_model(device, kind):
    softmax, model = make(kind, device, "eager"), make(kind, device)
    lla.hf.set_ridge(model, math.inf)
    ids = tokens(2, 19, device=device)
    assert relative(model(ids).logits, softmax(ids).logits) < 1e-5
    lla.hf.set_ridge(model, None)
    assert relative(model(ids).logits, softmax(ids).logits) > 1e-3, "a finite ridge must change something"


@pytest.mark.parametrize("kind", CONFIGS)
def test_switching_a_model_over(device, kind):
    model = make(kind, device, "eager")
    ids = tokens(2, 13, device=device)
    before = model(ids).logits
    model.set_attn_implementation("lla")
    model.config.lla_ridge = math.inf
    assert relative(model(ids).logits, before) < 1e-5


def test_the_last_word_on_the_ridge_holds(device):
    """A fixed ridge replaces a learned one, and the other way round."""
    softmax, model = make("llama", device, "eager"), make("llama", device)
    ids = tokens(2, 19, device=device)
    lla.hf.add_learned_ridge(model, 0.4)
    learned, want = model(ids).logits, softmax(ids).logits
    lla.hf.set_ridge(model, math.inf)
    assert relative(model(ids).logits, want) < 1e-5
    lla.hf.set_ridge(model, None)
    assert torch.equal(model(ids).logits, learned)
    lla.hf.set_ridge(model, math.inf)
    lla.hf.add_learned_ridge(model, 0.4)
    assert torch.equal(model(ids).logits, learned)


def test_the_ridge_reaches_every_kind_of_layer(device):
    """Layers that know no index of their own, as in models of images, are the model's attention too."""
    models = []
    for implementation in ("eager", "lla"):
        config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                                        image_size=16, patch_size=4)
        torch.manual_seed(5)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
        models.append(model.to(device).eval())
    image = torch.randn(2, 3, 16, 16, device=device)
    lla.hf.set_ridge(models[1], math.inf)
    want, got = (model(image).last_hidden_state for model in models)
    assert relative(got, want) < 1e-5
    assert len(lla.hf.add_learned_ridge(models[1])) == 2
    with pytest.raises(ValueError, match="Linear has no attention layers"):
        lla.hf.set_ridge(torch.nn.Linear(2, 2), 1.0)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ridge", [0.3, math.inf])
def test_padding_is_respected(device, kind, side, ridge):
    model = make(kind, device)
    lla.hf.set_ridge(model, ridge)
    lengths = [17, 4, 11]
    ids, mask = padded(lengths, side, device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for b, n in enumerate(lengths):
        kept = mask[b].bool()
        alone = model(ids[b:b + 1, kept]).logits[0]
        assert relative(logits[b, kept], alone) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen3 sliding"])
def test_packed_position_ids_are_respected(device, kind):
    model = make(kind, device)
    ids = tokens(1, 20, device=device)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None].to(device)
    logits = model(ids, position_ids=positions, use_cache=False).logits
    assert relative(logits[:, :8], model(ids[:, :8]).logits) < 1e-4
    assert relative(logits[:, 8:], model(ids[:, 8:]).logits) < 1e-4


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_step(device, kind):
    model = make(kind, device).train()
    learned = lla.hf.add_learned_ridge(model, 0.4)
    assert len(learned) == 2 and all(p.shape == (4,) for p in learned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, mask = padded([16, 9, 12], "right", device)
    labels = ids.masked_fill(mask == 0, -100)
    losses = []
    for _ in range(8):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.abs().max() > 0 for p in learned)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert any(name.endswith("lla_ridge_logit") for name in model.state_dict())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generate(device, kind, cache):
    model = make(kind, device)
    ids, mask = padded([7, 3], "left", device)
    options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False, return_dict_in_generate=True,
                   output_logits=True)
    if cache == "none":
        options["use_cache"] = False
    elif cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    made = model.generate(ids, attention_mask=mask, **options)
    assert made.sequences.shape == (2, 16)
    logits = torch.stack(made.logits, 1)
    for b, n in enumerate([7, 3]):  # the same as one uncached pass over what was generated
        whole = made.sequences[b:b + 1, 7 - n:]
        assert relative(logits[b], model(whole).logits[0, n - 1:-1]) < 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_looks_at_no_mask_on_the_host(device, cache, monkeypatch):
    """Left padding travels as lengths on the device: no packing, no gathered keys."""
    for name in ("pack_mask", "pack_padding", "lla_attention_varlen"):
        monkeypatch.setattr(lla.hf, name, lambda *a, **k: pytest.fail("a mask was packed"))
    model = make("llama", device)
    ids, mask = padded([7, 3], "left", device)
    options = dict(cache_implementation="static", disable_compile=True) if cache == "static" else {}
    model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)


@pytest.mark.cpu_only  # on a device the rows are NaN: the host does not look
def test_padding_between_tokens_is_refused_in_generation():
    model = make("llama", "cpu")
    ids, mask = padded([7, 7], "left", "cpu")
    mask[1, 3] = 0
    with torch.no_grad(), pytest.raises(ValueError, match="between others"):
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("kind", CONFIGS)
def test_right_padding_without_gradients(device, kind):
    model = make(kind, device)
    lengths = [17, 4, 11]
    ids, mask = padded(lengths, "right", device)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for b, n in enumerate(lengths):
            assert relative(logits[b, :n], model(ids[b:b + 1, :n]).logits[0]) < 1e-4


@pytest.mark.parametrize("kind", CONFIGS)
def test_continuous_batching(device, kind):
    """Requests of several lengths through transformers' paged cache generate what each generates alone."""
    model = make(kind, device)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
        with pytest.raises(NotImplementedError, match="5.22"), lla.hf.continuous_batching(model):
            pass
        return
    prompts = [tokens(n, device="cpu").tolist() for n in (5, 17, 40)]
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=60, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32)
    with lla.hf.continuous_batching(model):
        made = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert model.config._attn_implementation == "lla"
    by_prompt = {tuple(result.prompt_ids): result for result in made.values()}
    for prompt in prompts:
        result = by_prompt[tuple(prompt)]
        assert not result.error
        alone = model.generate(torch.tensor([prompt], device=device), generation_config=config)
        assert result.generated_tokens == alone[0, len(prompt):].tolist()


def test_cached_equals_uncached(device):
    model = make("llama", device)
    ids = tokens(2, 15, device=device)
    whole = model(ids).logits
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, end in ((0, 6), (6, 7), (7, 12), (12, 15)):
            parts.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits)
    assert relative(torch.cat(parts, 1), whole) < 1e-4


def test_bidirectional_attention(device):
    model = make("llama", device)
    lla.hf.set_ridge(model, math.inf)
    attend = ALL_ATTENTION_FUNCTIONS["lla"]
    module = lla.hf.attention_modules(model)[0]
    q, k, v = (torch.randn(2, h, 6, 8, device=device) for h in (4, 2, 2))
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool, device=device)
    o, _ = attend(module, q, k, v, keep, scaling=0.3, is_causal=False)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep[:, None, None, :], scale=0.3, enable_gqa=True)
    assert relative(o.transpose(1, 2), reference) < 1e-5


def test_custom_masks_are_computed_or_refused(device):
    model = make("llama", device)
    lla.hf.set_ridge(model, math.inf)
    attend = ALL_ATTENTION_FUNCTIONS["lla"]
    module = lla.hf.attention_modules(model)[0]
    q, k, v = (torch.randn(1, h, 6, 8, device=device) for h in (4, 2, 2))
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()[None, None].to(device)
    for mask in (blocks, torch.zeros(1, 1, 6, 6, device=device).masked_fill(~blocks, torch.finfo(torch.float32).min)):
        o, _ = attend(module, q, k, v, mask)
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=blocks, enable_gqa=True)
        assert relative(o.transpose(1, 2), reference) < 1e-5
    as_numbers, _ = attend(module, q, k, v, blocks.to(torch.int32))
    assert torch.equal(as_numbers, o)
    holes = blocks.clone()
    holes[..., 5, 3] = False
    refused = {"gap": dict(attention_mask=holes), "head": dict(attention_mask=blocks.expand(1, 4, 6, 6)),
               "adds values": dict(attention_mask=blocks.float()), "dropout": dict(dropout=0.1),
               "softcap": dict(softcap=30.0), "output_attentions": dict(output_attentions=True),
               "s_aux": dict(s_aux=torch.ones(4))}
    for word, change in refused.items():
        with pytest.raises(ValueError, match=word):
            attend(module, q, k, v, **{**dict(attention_mask=None), **change})


def test_dropout_is_refused_in_training(device):
    config = LlamaConfig(**SIZES, attention_dropout=0.1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lla").to(device).train()
    with pytest.raises(ValueError, match="dropout"):
        model(tokens(1, 5, device=device))


def test_several_registrations(device):
    assert lla.hf.register(ridge=math.inf, name="lla_softmax") == "lla_softmax"
    softmax, model = make("llama", device, "eager"), make("llama", device, "lla_softmax")
    ids, mask = padded([9, 5], "right", device)
    kept = mask.bool()
    assert relative(model(ids, attention_mask=mask).logits[kept], softmax(ids, attention_mask=mask).logits[kept]) < 1e-5
    for wrong, exception in ((-1.0, ValueError), ("x", TypeError)):
        with pytest.raises(exception, match="ridge"):
            lla.hf.register(ridge=wrong)


def test_compiled_model_has_no_graph_break(device):
    model = make("llama", device)
    ids = tokens(1, 12, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():  # (without a cache, a traced transformers model makes a mask for packed sequences: a break)
        assert relative(compiled(ids, use_cache=True).logits, model(ids).logits) < 1e-5
