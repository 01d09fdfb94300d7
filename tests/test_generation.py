"""Generation gives the same tokens with a cache as without, in every way that generate has of using one."""

import pytest
import torch
from transformers import DynamicCache, pipeline

from cases import (
    CASE,
    CASES,
    NEW,
    every_family,
    every_kind_of_cache,
    generate,
    make_model,
    random_tokens,
    read,
    word_tokenizer,
)

WAYS = {
    "greedy": {},
    "several": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 3},
    "several of sampled beams": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2},
}


@every_kind_of_cache
@pytest.mark.parametrize("way", WAYS)
def test_cache_changes_no_token(case, way):
    model = make_model(case).double()
    tokens = random_tokens(2, 5)
    with_cache = generate(model, tokens, **WAYS[way])
    without = generate(model, tokens, use_cache=False, **WAYS[way])
    assert with_cache.shape[1] == 5 + NEW
    assert torch.equal(with_cache, without)


@every_kind_of_cache
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_batch_generates_what_its_rows_do(case, beams):
    model = make_model(case).double()
    rows = [random_tokens(1, length, seed=length) for length in (7, 4)]
    tokens = torch.full((2, 7), 9)
    mask = torch.zeros(2, 7, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, -row.shape[1] :] = row[0]
        mask[i, -row.shape[1] :] = 1
    together = generate(model, tokens, attention_mask=mask, num_beams=beams)[:, 7:]
    alone = [generate(model, row, num_beams=beams)[:, row.shape[1] :] for row in rows]
    assert torch.equal(together, torch.cat(alone))


@every_kind_of_cache
def test_chunked_prefill_changes_no_token(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 9)
    tokens[1, :5] = 0
    mask = (tokens != 0).long()
    expected = generate(model, tokens, attention_mask=mask)
    for size in (1, 4):
        assert torch.equal(
            generate(model, tokens, attention_mask=mask, prefill_chunk_size=size), expected
        )


@every_kind_of_cache
def test_embeddings_as_input_change_no_token(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 5)
    from_embeddings = generate(model, inputs_embeds=model.get_input_embeddings()(tokens))
    assert torch.equal(from_embeddings, generate(model, tokens)[:, 5:])


@every_kind_of_cache
def test_a_static_cache_changes_no_token(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 5)
    assert torch.equal(
        generate(model, tokens, cache_implementation="static"), generate(model, tokens)
    )


@every_kind_of_cache
def test_a_conversation_continues_on_its_cache(case):
    model = make_model(case).double()
    first = random_tokens(1, 5)
    more = random_tokens(1, 3, seed=1)
    cache = DynamicCache(config=model.config)
    text = torch.cat([generate(model, first, past_key_values=cache), more], 1)
    assert torch.equal(generate(model, text, past_key_values=cache), generate(model, text))


@every_family
@pytest.mark.parametrize("new", [3, 7])
def test_new_tokens_alone_need_a_mask_that_covers_those_that_were_read(case, new):
    model = make_model(case).double()
    tokens = random_tokens(1, 7 + new)

    def read():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :7], past_key_values=cache)
        return cache

    expected = generate(model, tokens)[:, 7:]
    assert torch.equal(generate(model, tokens, past_key_values=read())[:, 7:], expected)
    mask = torch.ones(1, 7 + new, dtype=torch.long)
    assert torch.equal(
        generate(model, tokens[:, 7:], attention_mask=mask, past_key_values=read()), expected
    )
    with pytest.raises(
        ValueError,
        match=rf"input_ids must be all tokens .* attention_mask=torch.ones\(batch, {7 + new}",
    ):
        model.generate(tokens[:, 7:], past_key_values=read())


@every_kind_of_cache
def test_prompt_lookup_changes_no_token(case):
    model = make_model(case).double()
    for seed in range(2):
        part = random_tokens(1, 4, seed=seed)
        tokens = torch.cat(
            [part, random_tokens(1, 2, seed=seed + 50), part], 1
        )  # a repetition to look up
        assert torch.equal(
            generate(model, tokens, prompt_lookup_num_tokens=3), generate(model, tokens)
        )


ASSISTED = {
    "lookup": lambda case: {"prompt_lookup_num_tokens": 3},
    "draft": lambda case: {"assistant_model": make_model(case).double()},
    "first layers": lambda case: {"assistant_early_exit": 1},
}


@every_kind_of_cache
@pytest.mark.parametrize("how", ASSISTED)
def test_assisted_decoding_goes_on_from_a_cache(case, how):
    """Given the whole text, or the new tokens alone, after one or all but one of its tokens, and after an answer."""
    model = make_model(case).double()
    options = ASSISTED[how](case)
    document = random_tokens(1, 8)
    tokens = torch.cat([document, document[:, 2:6]], 1)
    expected = generate(model, tokens)
    for length in (1, 8, 11):
        cache = read(model, tokens[:, :length])
        assert torch.equal(generate(model, tokens, past_key_values=cache, **options), expected)
        assert cache.get_seq_length() in (12 + NEW - 1, 12 + NEW)
    mask = torch.ones(1, 12, dtype=torch.long)
    alone = {"attention_mask": mask, "past_key_values": read(model, document)}
    assert torch.equal(generate(model, tokens[:, 8:], **alone, **options), expected[:, 8:])
    longer = torch.cat([expected, document], 1)
    again = generate(model, longer, past_key_values=cache, **options)
    assert torch.equal(again, generate(model, longer))


def test_assisted_decoding_refuses_new_tokens_alone_after_padding():
    model = make_model(CASES[0])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    cache = read(model, random_tokens(1, 4))
    options = {"attention_mask": mask, "past_key_values": cache, "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match="attention_mask must have no padding, if assisted"):
        generate(model, random_tokens(1, 2), **options)


@every_kind_of_cache
def test_a_draft_model_changes_no_token(case):
    """The draft is the model with some noise, so that a part of what it says is right."""
    model = make_model(case).double()
    draft = make_model(case).double()
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if "lm_head" in name or "embed" in name:
                p += 0.03 * torch.randn_like(p)
        prompts = random_tokens(50, 6)
        accepted = (
            (model(prompts).logits[:, -1].argmax(-1) == draft(prompts).logits[:, -1].argmax(-1))
            .sum()
            .item()
        )
    assert 0 < accepted < 50
    for prompt in prompts[:2, None]:
        assert torch.equal(generate(model, prompt, assistant_model=draft), generate(model, prompt))


@every_kind_of_cache
def test_drafts_of_the_first_layers_change_no_token(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 6)
    assert torch.equal(generate(model, tokens, assistant_early_exit=1), generate(model, tokens))


def test_drafts_of_the_first_layers_run_no_others():
    model = make_model(CASES[0], num_hidden_layers=3)
    runs = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: runs.append(i))
    generate(model, random_tokens(1, 6), assistant_early_exit=1)
    assert runs.count(0) > runs.count(1) == runs.count(2)


def test_a_draft_with_another_tokenizer_changes_no_token(tokenizer):
    model = make_model(CASES[0]).double()
    draft = make_model(CASES[1], vocab_size=65).double()
    shuffled = {
        word: i if i < 3 else 3 + 7 * (i - 3) % 61 for word, i in tokenizer.get_vocab().items()
    }
    words = [*sorted(shuffled, key=shuffled.get), "more"]
    other = word_tokenizer(words, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")
    tokens = random_tokens(1, 6)
    assisted = generate(
        model, tokens, assistant_model=draft, tokenizer=tokenizer, assistant_tokenizer=other
    )
    assert torch.equal(assisted, generate(model, tokens))


@every_family
def test_pipeline_generates_from_a_saved_folder(case, tmp_path, tokenizer):
    model = make_model(case).double()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path))
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "suppress_tokens": [0],
        "return_full_text": False,
    }
    texts = ["w5 w6 w7", "w9"]
    batched = [result[0]["generated_text"] for result in generator(texts, batch_size=2, **options)]
    for text, generated in zip(texts, batched, strict=True):
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        assert (
            generated.split()
            == tokenizer.decode(
                generate(model, tokens)[0, tokens.shape[1] :], skip_special_tokens=True
            ).split()
        )


def test_generated_tokens_depend_on_the_prompt():
    """The comparisons above would hold for a model that says the same to everything."""
    model = make_model(CASES[0]).double()
    outputs = generate(model, random_tokens(8, 5))[:, 5:]
    assert len({tuple(row) for row in outputs.tolist()}) > 4


def test_continuous_batching_names_what_reads_several_texts_at_once():
    with pytest.raises(
        ValueError,
        match=r"generate_batch must .*got GatedLinearAttentionForCausalLM.*padded on the left",
    ):
        make_model(CASE["gla"]).generate_batch([[3, 4], [5]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": [[1, 2, 3]]}, "inputs must be a tensor .B, T., a row for each text, got list"),
        ({"inputs": random_tokens(1, 4)[0]}, "inputs must be a tensor .B, T., .* got shape .4,."),
        (
            {"inputs": random_tokens(2, 4), "attention_mask": torch.ones(2, 3)},
            "attention_mask must cover all tokens, .2, 4. .*got shape .2, 3.",
        ),
    ],
)
def test_what_generate_cannot_read_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        make_model(CASE["gla"]).generate(**given, max_new_tokens=1)
