"""Memories as files, many readers of one memory, and many requests at once."""

import copy
import json
import resource
import signal
import subprocess
import sys
from threading import Event

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from cases import CASE, every_case, every_family, generate, go_on, make_model, random_tokens, read
from hf_memory import Request, generate_stream, load_memory, save_memory
from hf_memory.serving import memory_file

NEW = 6


@every_case
def test_a_saved_memory_is_what_it_was(case, tmp_path):
    model, tokens, word = make_model(case), random_tokens(2, 9), random_tokens(2, 3, seed=1)
    cache = read(model, tokens[:, :6])
    cache.activate_past_recording()
    go_on(model, cache, torch.cat([tokens[:, 6:], word], 1))
    cache.crop(-3)
    save_memory(cache, tmp_path / "memory.safetensors", model)
    loaded = load_memory(tmp_path / "memory.safetensors", model)
    assert loaded.get_seq_length() == 9
    assert torch.equal(go_on(model, loaded, word), go_on(model, cache, word))


def test_a_memory_of_the_model_in_float32_is_one_in_bfloat16(tmp_path):
    model = make_model(CASE["linear-full"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model.bfloat16())
    assert go_on(model, loaded, random_tokens(1, 3)).dtype == torch.bfloat16


ANOTHER_PROCESS = """
import sys, torch, hf_memory
from transformers import AutoModelForCausalLM
text = torch.tensor([list(map(int, sys.argv[1].split()))])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = hf_memory.load_memory(f"{folder}/memory", model)
    print(*model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False)[0].tolist())
"""


def test_another_process_goes_on_with_a_memory(tmp_path):
    tokens, expected = random_tokens(1, 9), []
    folders = [tmp_path / name for name in ("linear-sliding", "titans-mal")]
    for folder in folders:
        model = make_model(CASE[folder.name])
        model.save_pretrained(folder)
        save_memory(read(model, tokens[:, :8]), folder / "memory", model)
        expected.append(model.generate(tokens, max_new_tokens=6, do_sample=False)[0].tolist())
    command = [sys.executable, "-W", "ignore", "-c", ANOTHER_PROCESS, " ".join(map(str, tokens[0].tolist())), *folders]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [list(map(int, line.split())) for line in printed.splitlines()] == expected


@pytest.fixture
def memory(tmp_path):
    model = make_model(CASE["linear-full"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    return model, tmp_path / "memory"


def test_a_damaged_memory_is_refused(memory):
    model, path = memory
    whole = path.read_bytes()
    for part in (whole[:100], whole[:-10], b"", whole.replace(b'"tokens_read":"9"', b'"tokens_read":"8"')):
        assert part != whole
        path.write_bytes(part)
        with pytest.raises(ValueError, match="damaged"):
            load_memory(path, model)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="changed after it was written"):
        load_memory(path, model)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="must have the format"):
        load_memory(path, model)


FORGED = {
    "no count": (lambda header, tensors: header.pop("tokens_read"), "was changed after it was written"),
    "negative count": (lambda header, tensors: header.update(tokens_read="-9"), "got -9 tokens"),
    "layers": (lambda header, tensors: header.update(layers="["), "must have layers"),
    "missing state": (lambda header, tensors: tensors.pop("1.keys"), "must have the states .*1.keys"),
    "other state": (lambda header, tensors: tensors.update(x=torch.ones(1)), "got .* x"),
    "not a number": (lambda header, tensors: tensors["0.memory"].view(-1)[0].fill_(float("nan")), "0.memory of finite"),
    "infinite": (lambda header, tensors: tensors["1.keys"].view(-1)[0].fill_(torch.inf), "1.keys of finite"),
    "too large": (lambda header, tensors: tensors["0.memory"].view(-1)[0].fill_(-3e38), "0.memory of finite"),
    "no texts": (lambda header, tensors: tensors.update({n: x[:0] for n, x in tensors.items()}), r"the shape \[1, "),
    "no rows": (lambda header, tensors: tensors.update({"0.memory": torch.ones(())}), r"the shape \[1, "),
    "too many tokens": (lambda header, tensors: header.update(tokens_read="9" * 30), "from 1 to 2147483647 tokens"),
    "integers": (lambda header, tensors: tensors.update({"1.keys": tensors["1.keys"].int()}), "1.keys .*float32"),
    "other heads": (lambda header, tensors: tensors.update({"1.values": tensors["1.values"][:, :1]}), "the shape"),
    "more than was read": (
        lambda header, tensors: header.update(tokens_read="8"),
        r"\[1, 2, 8, 8\], got \[1, 2, 9, 8\]",
    ),
    "fewer than were read": (
        lambda header, tensors: header.update(tokens_read="10"),
        r"\[1, 2, 10, 8\], got \[1, 2, 9, 8\]",
    ),
    "fewer texts": (lambda header, tensors: tensors.update({"1.keys": tensors["1.keys"].repeat(2, 1, 1, 1)}), "shape"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_memory_is_refused(memory, name):
    model, path = memory
    forge, message = FORGED[name]
    rewrite(path, forge)
    with pytest.raises(ValueError, match=message):
        load_memory(path, model)


def rewrite(path, forge):
    """Change the header and the tensors of a memory, with a checksum that fits."""
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    forge(header, tensors)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, path, metadata=header | {"checksum": memory_file._checksum(header, tensors)})


COUNTS = {  # states that count, with their largest value after nine tokens
    ("titans-mac", "0.memory.phase"): 2,
    ("titans-mac", "0.offset"): 4,
    ("deltanet-window", "0.tokens_read"): 9,
    ("transformer-buckets", "0.buckets"): 3,
}


@pytest.mark.parametrize(("name", "state"), COUNTS)
def test_counts_that_reading_cannot_have_led_to_are_refused(name, state, tmp_path):
    model = make_model(CASE[name])
    for wrong in (-2, COUNTS[name, state] + 1, 2**31 - 1):
        save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
        rewrite(tmp_path / "memory", lambda header, tensors: tensors[state].fill_(wrong))  # noqa: B023
        with pytest.raises(ValueError, match=rf"{state} of numbers from .* to {COUNTS[name, state]}, got {wrong}"):
            load_memory(tmp_path / "memory", model)


def test_another_models_memory_is_refused(memory):
    model, path = memory
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight *= 1.1
    for wrong in (other, make_model(CASE["linear-elu"]), make_model(CASE["linear-full"], rms_norm_eps=1e-3)):
        with pytest.raises(ValueError, match="another model"):
            load_memory(path, wrong)


def test_the_header_says_what_the_file_is(memory):
    _, path = memory
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["tokens_read"] == "9"
    assert json.loads(header["layers"]) == ["MemoryLayer", "DynamicLayer"]
    assert header["model"] == "LinearTransformerForCausalLM"


def test_a_directory_is_no_memory(memory, tmp_path):
    model, _ = memory
    with pytest.raises(IsADirectoryError, match="must be a file"):
        load_memory(tmp_path, model)
    with pytest.raises(IsADirectoryError, match="must be a file"):
        save_memory(read(model, random_tokens(1, 3)), tmp_path, model)
    with pytest.raises(FileNotFoundError):
        load_memory(tmp_path / "nothing", model)


def test_an_empty_or_foreign_cache_is_refused(memory, tmp_path):
    model, _ = memory
    static = StaticCache(config=model.config, max_cache_len=9)
    go_on(model, static, random_tokens(1, 3))
    with pytest.raises(ValueError, match="must have read tokens"):
        save_memory(DynamicCache(config=model.config), tmp_path / "new", model)
    for cache in (DynamicCache(), static):
        with pytest.raises(ValueError, match="cache must be a DynamicCache"):
            save_memory(cache, tmp_path / "new", model)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_old_memory(memory):
    model, path = memory
    before = path.read_bytes()
    cache = read(model, random_tokens(1, 200))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        with pytest.raises(OSError, match="could not write"):
            save_memory(cache, path, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["memory"]


@every_case
def test_many_readers_of_one_prefix(case):
    model, prefix, more = make_model(case).double(), random_tokens(1, 7), random_tokens(3, 2, seed=1)
    once = read(model, prefix)
    once.batch_repeat_interleave(3)
    texts = torch.cat([prefix.expand(3, -1), more], 1)
    together = generate(model, texts, past_key_values=once)
    apart = [generate(model, text[None], past_key_values=read(model, prefix)) for text in texts]
    assert torch.equal(together, torch.cat(apart))
    assert torch.equal(together, generate(model, texts))


def collect(model, requests, **kwargs):
    """Tokens by request, and the most requests that were seen in one step."""
    answers = {}
    for step in generate_stream(model, requests, **kwargs):
        answers.setdefault(step.request, []).append(step.token)
    return [answers[i] for i in sorted(answers)]


@every_case
def test_each_request_gets_what_it_would_get_alone(case):
    model = make_model(case)
    lengths = [(5, 7), (9, 2), (2, 12), (7, 1), (4, 6), (11, 3)]
    prompts = [random_tokens(1, length, seed=i) for i, (length, _) in enumerate(lengths)]
    requests = [Request(x[0], new) for x, (_, new) in zip(prompts, lengths)]
    expected = [
        model.generate(x, max_new_tokens=new, do_sample=False)[0, x.shape[1] :].tolist()
        for x, (_, new) in zip(prompts, lengths)
    ]
    for max_batch_size in (1, 3):
        assert collect(model, requests, max_batch_size=max_batch_size) == expected


def test_draws_do_not_depend_on_the_company():
    model = make_model(CASE["linear-elu"])
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    requests = [Request(random_tokens(5, seed=i), NEW, options, seed=i) for i in range(4)]
    together = collect(model, requests, max_batch_size=4)
    assert together == [collect(model, [request])[0] for request in requests]
    assert len({tuple(answer) for answer in together}) == 4


def test_requests_are_taken_when_there_is_room():
    model, taken = make_model(CASE["linear-elu"]), []

    def arriving():
        for i in range(5):
            taken.append(i)
            yield Request(random_tokens(4, seed=i), NEW)

    stream = generate_stream(model, arriving(), max_batch_size=2)
    next(stream)
    assert taken == [0]
    steps = list(stream)
    assert taken == list(range(5))
    assert {step.request for step in steps if step.finished} == set(range(5))


def test_a_request_ends_at_its_last_token():
    model, prompt = make_model(CASE["linear-elu"]), random_tokens(4)
    answer = collect(model, [Request(prompt, NEW)])[0]
    assert (
        collect(model, [Request(prompt, NEW, {"eos_token_id": [answer[2]]})])[0]
        == answer[: answer.index(answer[2]) + 1]
    )


@every_case
def test_a_conversation_goes_on_from_its_cache(case):
    model, first, second = make_model(case).double(), random_tokens(5), random_tokens(3, seed=1)
    company = Request(random_tokens(9, seed=2), 4)
    steps = [s for s in generate_stream(model, [company, Request(first, NEW, keep_cache=True)]) if s.request == 1]
    assert [s.cache is None for s in steps] == (NEW - 1) * [True] + [False]
    answer = torch.tensor([s.token for s in steps])
    more = torch.cat([answer[-1:], second])  # the last token was chosen, but not read
    answers = collect(model, 2 * [Request(more, NEW, cache=steps[-1].cache)])
    text = torch.cat([first, answer, second])[None]
    real = torch.ones_like(text)  # generate takes tokens for padding that look like it
    expected = model.generate(text, attention_mask=real, max_new_tokens=NEW, do_sample=False)
    assert answers == 2 * [expected[0, text.shape[1] :].tolist()]  # and the cache stays as it is


def test_a_memory_made_with_gradients_is_read_without_them(tmp_path):
    model, prefix, word = make_model(CASE["linear-full"]), random_tokens(1, 7), random_tokens(1, seed=1)
    cache = DynamicCache(config=model.config)
    model(prefix, past_key_values=cache)
    expected = collect(model, [Request(word, NEW, cache=read(model, prefix))])
    assert collect(model, 2 * [Request(word, NEW, cache=cache)]) == 2 * expected
    save_memory(cache, tmp_path / "memory", model)
    assert collect(model, [Request(word, NEW, cache=load_memory(tmp_path / "memory", model))]) == expected
    assert cache.layers[0].states["memory"].requires_grad


def test_a_stream_heeds_the_models_generation_config():
    model, prompt = make_model(CASE["linear-elu"]), random_tokens(8)
    plain = collect(model, [Request(prompt, 12)])[0]
    model.generation_config.update(
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        eos_token_id=plain[0],
        min_new_tokens=6,
        suppress_tokens=[plain[1]],
    )
    answer = collect(model, [Request(prompt, 12)])[0]
    expected = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert answer == expected != plain
    assert collect(model, [Request(prompt, 1, {"suppress_tokens": None, "min_new_tokens": 0})])[0] == plain[:1]


def test_a_request_that_cannot_be_served_leaves_the_others_alone():
    model, prompt = make_model(CASE["linear-full"]), random_tokens(4)
    two = read(model, random_tokens(2, 3))
    wrong = [
        (Request([3, 64]), "input_ids must be from 0 to 63, got 3 to 64"),
        (Request([-1]), "input_ids must be from 0"),
        (Request(prompt, options={"temprature": 1}), "options must have names of GenerationConfig, got temprature"),
        (Request(prompt, options={"temperature": -1.0, "do_sample": True}), "temperature"),
        (Request(prompt, options={"num_beams": 2}), "must have no beams"),
        (Request(prompt, cache=two), "cache must be of one text, got one of 2"),
        (Request(prompt, cache=read(make_model(CASE["linear-elu"]), prompt[None])), "cache must be a DynamicCache"),
        (Request(prompt, cache=StaticCache(config=model.config, max_cache_len=9)), "cache must be a DynamicCache"),
        ("a prompt", "requests must be of type Request, got str"),
    ]
    requests = [Request(prompt, NEW), *(request for request, _ in wrong), Request(prompt, NEW)]
    answers = collect(model, requests, max_batch_size=2)
    assert answers[0] == answers[-1] == collect(model, [Request(prompt, NEW)])[0]
    for (_, sentence), step in zip(wrong, generate_stream(model, [request for request, _ in wrong]), strict=True):
        assert step.finished
        assert sentence in str(step.error)


def test_what_is_no_number_ends_one_request_only():
    model, prompt = make_model(CASE["linear-elu"]), random_tokens(4)
    broken = {"sequence_bias": {(3,): float("nan")}, "do_sample": True}
    steps = list(generate_stream(model, [Request(prompt, NEW, broken), Request(prompt, NEW)]))
    assert [step.request for step in steps if step.error] == [0]
    assert sum(step.request == 1 for step in steps) == NEW


def test_a_producer_that_waits_does_not_stop_the_batch():
    model, finished = make_model(CASE["linear-elu"]), Event()

    def arriving():
        yield Request(random_tokens(4), NEW)
        assert finished.wait(60)
        yield Request(random_tokens(5), 2)

    steps = []
    for step in generate_stream(model, arriving()):
        steps.append(step)
        if step.finished:
            finished.set()
    assert [step.request for step in steps] == NEW * [0] + 2 * [1]


def test_what_a_producer_raises_is_raised():
    def arriving():
        yield Request(random_tokens(4), 1)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        list(generate_stream(make_model(CASE["linear-elu"]), arriving()))


@every_family
def test_a_cancelled_request_keeps_what_it_has_read(case):
    model, prompt = make_model(case).double(), random_tokens(5)
    whole = collect(model, [Request(prompt, NEW)])[0]
    stopped, never = Request(prompt, NEW, keep_cache=True), Request(prompt)
    never.cancel()
    steps = []
    for step in generate_stream(model, [stopped, Request(prompt, NEW), never]):
        steps.append(step)
        if len([x for x in steps if x.request == 0]) == 3:
            stopped.cancel()
    assert [x.token for x in steps if x.request == 0] == [*whole[:3], None]
    assert [x.token for x in steps if x.request == 1] == whole
    assert [x[1:] for x in steps if x.request == 2] == [(None, True, None, None)]
    (kept,) = [x.cache for x in steps if x.cache]
    assert collect(model, [Request(whole[2:3], NEW - 3, cache=kept)])[0] == whole[3:]


NOTHING = [
    (([],), "input_ids must have at least one token"),
    ((torch.ones(2, 3, dtype=torch.long),), r"input_ids must be integers \[T\] of one text, got torch.int64 \[2, 3\]"),
    (([0.5],), "input_ids must be integers"),
    (([3], 0), "max_new_tokens must be an integer of at least 1, got 0"),
    (([3], 1.5), "max_new_tokens must be an integer of at least 1, got 1.5"),
]


@pytest.mark.parametrize(("arguments", "message"), NOTHING)
def test_a_request_for_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Request(*arguments)
    with pytest.raises(ValueError, match="max_batch_size"):
        collect(make_model(CASE["linear-elu"]), [], max_batch_size=0)
