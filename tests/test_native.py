"""Hybrid models of transformers with our ops and our cache compute the same, and can do what they could not."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import dispatch_model
from transformers import (
    DataCollatorWithFlattening,
    DynamicCache,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from cases import CASE, go_on, make_model, random_tokens, word_tokenizer
from comparing import assert_close
from hf_memory import Conversation, load_memory, save_memory, use_memory_ops
from hf_memory.cache import MemoryLayer, state_bytes
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.integrations import native

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
KIMI = {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "moe_intermediate_size": 8}
KINDS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {**HEADS, "num_experts": 0}),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HEADS),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**HEADS, **EXPERTS}),
    "olmo_hybrid": (OlmoHybridForCausalLM, OlmoHybridConfig, HEADS),
    "kimi_linear": (
        KimiLinearForCausalLM,
        KimiLinearConfig,
        {**KIMI, "mlp_layer_types": ["dense"] * 3},
    ),
}
LENGTHS = (3, 1, 7)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
PACKINGS = {
    "positions": {"position_ids": POSITIONS},
    "boundaries": {"cu_seq_lens_q": torch.tensor([0, 3, 4, 11])},
    "numbers": {"seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind):
    """A random model of transformers in float64."""
    model_class, config_class, options = KINDS[kind]
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **options}, experts_implementation="eager")
    model = model_class(config).eval().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def ours(kind):
    return use_memory_ops(make(kind))


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """What transformers computes in float32 whatever the model's dtype, it computes in float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def read(model, tokens, cache, **options):
    """The logits of tokens after those in a cache."""
    return model(tokens, **{CACHE: cache}, **options).logits


@every_kind
def test_logits_and_gradients_are_those_of_transformers(kind):
    model = make(kind)
    tokens = random_tokens(2, 70)
    found = []
    for one in (model, use_memory_ops(copy.deepcopy(model))):
        logits = one(tokens, use_cache=False).logits
        logits.square().sum().backward()
        found.append([logits, *(x.grad for x in one.parameters() if x.grad is not None)])
    assert_close(*found)


@every_kind
@torch.no_grad()
def test_a_prompt_and_then_single_tokens_are_read_as_by_transformers(kind):
    model = make(kind)
    tokens = random_tokens(2, 12)
    expected = model(tokens, use_cache=False).logits
    use_memory_ops(model)
    cache = DynamicCache(config=model.config)
    parts = [tokens[:, :7], *tokens[:, 7:].split(1, 1)]
    assert_close(torch.cat([read(model, part, cache) for part in parts], 1), expected)


@every_kind
@torch.no_grad()
def test_padding_changes_no_row(kind):
    model = ours(kind)
    tokens = random_tokens(1, 9)
    mask = torch.tensor([[0] * 4 + [1] * 5])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(tokens, attention_mask=mask, position_ids=positions).logits[:, 4:]
    assert_close(found, model(tokens[:, 4:]).logits)


@every_kind
@pytest.mark.parametrize("said", PACKINGS)
@torch.no_grad()
def test_packed_sequences_are_read_apart(kind, said):
    model = ours(kind)
    tokens = random_tokens(1, 11)
    apart = torch.cat([model(part).logits for part in tokens.split(LENGTHS, 1)], 1)
    assert_close(model(tokens, **PACKINGS[said]).logits, apart)


def test_packed_sequences_change_each_other_in_no_gradient():
    model = ours("qwen3_5")
    x = model.get_input_embeddings()(random_tokens(1, 11)).detach().requires_grad_()
    model(inputs_embeds=x, **PACKINGS["positions"]).logits[:, 4:].square().sum().backward()
    assert not x.grad[:, :4].any()
    assert x.grad[:, 4:].any()


@every_kind
@torch.no_grad()
def test_undone_tokens_leave_no_trace(kind):
    model = ours(kind)
    tokens = random_tokens(2, 12)
    cache = DynamicCache(config=model.config)
    read(model, tokens[:, :5], cache)
    cache.activate_past_recording()
    read(model, tokens[:, 5:8], cache)
    cache.crop(-2)
    read(model, tokens[:, :4], cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 6
    found = torch.cat([read(model, part, cache) for part in (tokens[:, 6:7], tokens[:, 7:])], 1)
    assert_close(found, model(tokens).logits[:, 6:])


@every_kind
def test_assisted_decoding_and_prompt_lookup_change_no_token(kind):
    model = ours(kind)
    assistant = ours(kind)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # right for some tokens
    prompt = random_tokens(1, 6).repeat(1, 2)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **options)
    for way in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(prompt, **options, **way), expected)


@every_kind
@pytest.mark.parametrize(
    "way", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": None}], ids=str
)
def test_assisted_decoding_goes_on_from_a_cache(kind, way):
    """Also by a copy of the model."""
    model = copy.deepcopy(ours(kind))
    way = {name: model if x is None else x for name, x in way.items()}
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    document = random_tokens(1, 8)
    tokens = torch.cat([document, document[:, 2:6]], 1)
    expected = model.generate(tokens, **options)
    for length in (1, 8, 11):
        cache = DynamicCache(config=model.config)
        read(model, tokens[:, :length], cache)
        assert torch.equal(model.generate(tokens, **{CACHE: cache}, **options, **way), expected)


@torch.no_grad()
def test_beams_and_static_caches_change_no_token():
    model = ours("qwen3_5")
    prompt = random_tokens(2, 6)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    expected = model.generate(prompt, **options, use_cache=False)
    assert torch.equal(model.generate(prompt, **options), expected)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    static = model.generate(prompt, **greedy, cache_implementation="static")
    assert torch.equal(static, model.generate(prompt, **greedy))


@torch.no_grad()
def test_a_model_makes_its_cache_itself():
    model = ours("olmo_hybrid")
    tokens = random_tokens(1, 6)
    cache = cache_of(model(tokens[:, :4]))
    assert [isinstance(layer, MemoryLayer) for layer in cache.layers] == [True, False, True]
    assert_close(read(model, tokens[:, 4:], cache), model(tokens).logits[:, 4:])


@every_kind
@torch.no_grad()
def test_a_saved_memory_goes_on(kind, tmp_path, monkeypatch):
    monkeypatch.undo()
    model = ours(kind).float()
    tokens = random_tokens(1, 9)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    read(model, tokens[:, :6], cache)
    cache.crop(-2)
    save_memory(cache, tmp_path / "memory.safetensors", model)
    loaded = load_memory(tmp_path / "memory.safetensors", model)
    assert loaded.get_seq_length() == 4
    assert torch.equal(read(model, tokens[:, 4:], loaded), read(model, tokens[:, 4:], cache))
    with pytest.raises(ValueError, match=r"model must be .* after use_memory_ops\(model\), got"):
        load_memory(tmp_path / "memory.safetensors", make(kind))


@every_kind
def test_a_conversation_writes_what_is_written_after_the_whole_text(kind):
    model = ours(kind)
    model.generation_config.eos_token_id = None
    words = word_tokenizer(["<unk>", *(f"w{i}" for i in range(1, 64))], unk_token="<unk>")
    talk = Conversation(model, words, max_new_tokens=4)
    first, second = "w1 w2 w3", "w4 w5"
    answered = [*talk.answer(first)]
    text = [*words(first).input_ids, *answered, *words(second).input_ids]
    whole = torch.tensor([text])
    settings = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(whole, **settings)[0, len(text) :]
    assert [*talk.answer(second)] == expected.tolist()
    assert talk.memory().get_seq_length() == len(text) + 4


@torch.no_grad()
def test_a_cache_filled_before_is_refused():
    model = make("qwen3_5")
    tokens = random_tokens(1, 4)
    cache = cache_of(model(tokens))
    use_memory_ops(model)
    with pytest.raises(ValueError, match="cache must be empty or filled after use_memory_ops"):
        read(model, tokens, cache)


def test_class_weights_and_copies_stay(monkeypatch):
    monkeypatch.undo()  # pickle knows dtypes by name
    model = make("kimi_linear")
    before = copy.deepcopy(model)
    tokens = random_tokens(1, 5)
    use_memory_ops(use_memory_ops(model))
    assert type(model) is type(before)
    assert model.config.to_dict() == before.config.to_dict()
    assert_close(dict(model.state_dict()), dict(before.state_dict()))
    expected = model(tokens, position_ids=torch.tensor([[0, 1, 0, 1, 2]])).logits
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = same(tokens, position_ids=torch.tensor([[0, 1, 0, 1, 2]])).logits
        assert_close(found, expected)


def test_other_models_are_refused():
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"model must be a Qwen3-Next, .* got LlamaForCausalLM"):
        use_memory_ops(llama)
    relu = make("olmo_hybrid")
    relu.model.layers[2].linear_attn.activation = "relu"
    with pytest.raises(ValueError, match=r"hidden_act of model must be silu.* got 'relu'"):
        use_memory_ops(relu)
    assert type(relu.model.layers[0].linear_attn).__module__.startswith("transformers.")


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@every_kind
@torch.no_grad()
def test_a_model_in_several_places_uses_the_ops_and_the_cache(kind, on_disk, tmp_path, monkeypatch):
    """accelerate's hooks call each module's forward, in one place, and with parts on a disk."""
    monkeypatch.undo()
    whole = make(kind).float()
    whole.save_pretrained(tmp_path / "model")
    parts = [name for name, _ in whole.named_children() if name != "model"]
    parts += [f"model.{name}" for name, _ in whole.model.named_children() if name != "layers"]
    layers = {f"model.layers.{i}": "disk" if on_disk and i else "cpu" for i in range(3)}
    model = type(whole).from_pretrained(
        tmp_path / "model",
        device_map={**dict.fromkeys(parts, "cpu"), **layers},
        offload_folder=tmp_path / "offloaded",
    )
    if not on_disk:
        dispatch_model(model, {**dict.fromkeys(parts, "cpu"), **layers}, force_hooks=True)
    use_memory_ops(use_memory_ops(model))
    tokens = random_tokens(1, 12)
    expected = whole(tokens).logits[:, 8:]
    cache = DynamicCache(config=model.config)
    read(model, tokens[:, :8], cache)
    assert [isinstance(layer, MemoryLayer) for layer in cache.layers] == [True, False, True]
    cache.activate_past_recording()
    read(model, random_tokens(1, 4, seed=1), cache)
    cache.crop(-4)
    assert (read(model, tokens[:, 8:], cache) - expected).abs().max() < 1e-3 * expected.abs().max()
    save_memory(cache, tmp_path / "memory", model)
    assert load_memory(tmp_path / "memory", use_memory_ops(whole)).get_seq_length() == 12


def test_a_hybrid_is_trained_by_the_trainer_as_before(tmp_path, monkeypatch):
    """Packed, as with a collator without padding: each loss is that of the texts one by one."""
    monkeypatch.undo()
    texts = [random_tokens(1, n, seed=n)[0].tolist() for n in (5, 9, 7, 6)]
    found = []
    for pack in (False, True):
        model = ours("qwen3_5").float()
        trainer = Trainer(
            model,
            TrainingArguments(
                tmp_path,
                max_steps=2,
                per_device_train_batch_size=2 if pack else 1,
                gradient_accumulation_steps=1 if pack else 2,
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            data_collator=DataCollatorWithFlattening(),
        )
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@torch.no_grad()
def test_two_threads_go_on_from_caches_of_their_own():
    model = ours("qwen3_5")
    texts = [random_tokens(1, 12, seed=seed) for seed in range(4)]

    def logits(text):
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            return torch.cat([read(model, part, cache) for part in text.split(3, 1)], 1)

    with ThreadPoolExecutor(2) as pool:
        for text, found in zip(texts, pool.map(logits, texts)):
            assert_close(found, model(text).logits)


def test_a_forward_that_something_else_has_replaced_is_refused():
    model = make("qwen3_5")
    mixer = model.model.layers[2].linear_attn
    mixer.forward = lambda *args, **kwargs: type(mixer).forward(mixer, *args, **kwargs)
    with pytest.raises(ValueError, match="whose forward was replaced: call use_memory_ops before"):
        use_memory_ops(model)
    assert type(model.model.layers[0].linear_attn).__module__.startswith("transformers.")


def test_a_container_of_models_reads_packed_sequences_once(monkeypatch):
    """Whether its parts were changed before, with it, or after it."""
    first, second = make("qwen3_5"), make("qwen3_next")
    container = torch.nn.Module()
    container.layers = torch.nn.ModuleList([first, second])
    use_memory_ops(first.model)
    use_memory_ops(container)
    use_memory_ops(use_memory_ops(second))
    calls = []
    boundaries = native.packed_boundaries
    monkeypatch.setattr(
        native, "packed_boundaries", lambda *args: calls.append(0) or boundaries(*args)
    )
    for model in (first, second):
        model(random_tokens(1, 4))
    assert len(calls) == 2


BITS = {"attention": 8, "recurrent_states": 16}


@every_kind
@torch.no_grad()
def test_few_bits_change_logits_a_little_and_caches_are_undone_and_saved(kind, tmp_path):
    tokens = random_tokens(2, 12)
    exact = read(ours(kind), tokens, None)
    model = use_memory_ops(make(kind), cache_bits=BITS)
    cache = DynamicCache(config=model.config)
    found = [read(model, tokens[:, :8], cache)]
    cache.activate_past_recording()
    save_memory(cache, tmp_path / "memory", model)
    read(model, tokens[:, :4], cache)
    cache.crop(-4)
    found.append(read(model, tokens[:, 8:], cache))
    assert 0 < (torch.cat(found, 1) - exact).norm() < 0.02 * exact.norm()
    assert cache.layers[0].states["memory"].dtype == torch.bfloat16
    assert cache.layers[1].keys.dtype == torch.uint8
    loaded = load_memory(tmp_path / "memory", model)
    assert_close(loaded.layers[1].keys, cache.layers[1].keys[:, :, :8])
    loaded = load_memory(tmp_path / "memory", use_memory_ops(model))
    assert loaded.layers[0].states["memory"].dtype == torch.bfloat16
    assert_close(loaded.layers[1].keys, cache.layers[1].keys[:, :, :8])


@pytest.mark.parametrize("bits", [8, 4, {"recurrent_states": 8}, {"recurrent_states": 16}], ids=str)
@every_kind
@torch.no_grad()
def test_a_loaded_memory_in_few_bits_goes_on_as_the_one_that_was_saved(kind, bits, tmp_path):
    model = use_memory_ops(make(kind), cache_bits=bits)
    tokens = random_tokens(2, 9)
    cache = DynamicCache(config=model.config)
    read(model, tokens[:, :6], cache)
    save_memory(cache, tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model)
    assert state_bytes(loaded) == state_bytes(cache)
    for t in range(6, 9):
        expected = read(model, tokens[:, t : t + 1], cache)
        assert torch.equal(read(model, tokens[:, t : t + 1], loaded), expected)
    assert state_bytes(loaded) == state_bytes(cache)


@torch.no_grad()
def test_keys_and_values_of_a_hybrid_stay_in_their_bits_in_static_caches_too():
    model = use_memory_ops(make("qwen3_5"), cache_bits=8)
    tokens = random_tokens(1, 8)
    whole, cache = (DynamicCache(config=model.config) for _ in range(2))
    expected = read(model, tokens, whole)
    first = read(model, tokens[:, :4], cache)
    use_memory_ops(model, cache_bits=4)
    assert_close(torch.cat([first, read(model, tokens[:, 4:], cache)], 1), expected)
    use_memory_ops(model, cache_bits=8)
    static = StaticCache(config=model.config, max_cache_len=9)
    assert_close(read(model, tokens, static), expected)
    with pytest.raises(ValueError, match="a number, or a dict with some of"):
        use_memory_ops(model, cache_bits={"window": 8})


@every_kind
def test_a_cache_of_another_model_is_refused(kind):
    other = make_model(CASE["linear-elu"], num_hidden_layers=3, layer_types=["memory"] * 3)
    cache = DynamicCache(config=other.config)
    go_on(other, cache, random_tokens(1, 5))
    with pytest.raises(ValueError, match="cache must be one that this model has filled"):
        read(ours(kind), random_tokens(1, 1), cache)
