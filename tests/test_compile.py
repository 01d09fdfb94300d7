"""Decoding with fixed addresses: one graph, compiled once, and exported."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import CompileConfig, StaticCache
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter

from cases import (
    CASE,
    CASES,
    FIRST_OF_KIND,
    every_case,
    generate,
    make_config,
    make_model,
    one_layer,
    random_tokens,
    usually,
)
from comparing import assert_close
from hf_memory.ops import delta_rule, selective_scan


def prefill(model, tokens, max_cache_len=50):
    cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return cache


@usually(FIRST_OF_KIND)
def test_compiled_decoding_is_one_graph_and_equals_eager(case):
    """A sliding window's own cache becomes another graph once, when it is full."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = make_model(case, **one_layer(case)).double()
    tokens = random_tokens(2, 40)
    cache = prefill(model, tokens[:, :8])
    step = torch.compile(model.forward, backend=count, fullgraph=True)  # raises at a graph break
    with torch.no_grad():
        warm = [step(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(8, 16)]
        compiled = len(graphs)
        more = [step(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(16, 40)]
        expected = model(tokens).logits[:, 8:]
    assert len(graphs) == compiled <= 2
    assert_close(torch.cat(warm + more, 1), expected)


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "in bits"])
@pytest.mark.parametrize(
    "heads",
    [
        {"num_kept_tokens": 3, "full_attention_heads": [[1]]},
        {"num_kept_tokens": [[3, 1]], "full_attention_heads": None},
    ],
    ids=["beside a full head", "by head"],
)
class TestKeptTokensAreOneGraph:
    """In every call of several tokens, of which each block decides which of them stay."""

    @pytest.fixture
    def models(self, bits, heads):
        """One, and the same compiled, which raises at a graph break."""
        torch._dynamo.reset()
        options = {"cache_bits": bits, "num_hidden_layers": 1, "layer_types": ["sliding_heads"]}
        model = make_model(CASE["attention-kept"], **options, **heads).double()
        return model, torch.compile(model, backend="eager", fullgraph=True)

    def test_of_training(self, models):
        model, compiled = models
        tokens = random_tokens(2, 14)
        parameters = list(model.train().parameters())
        outputs = [m(tokens, use_cache=False).logits for m in (compiled, model)]
        assert_close(*outputs)
        assert_close(*(torch.autograd.grad(x.logsumexp(-1).sum(), parameters) for x in outputs))

    @torch.no_grad()
    def test_of_a_prefill_and_of_a_piece_after_it(self, models):
        model, compiled = models
        tokens = random_tokens(2, 25)
        cache = StaticCache(config=model.config, max_cache_len=50)
        pieces = [compiled(x, past_key_values=cache).logits for x in tokens.split([14, 11], 1)]
        assert_close(torch.cat(pieces, 1), model(tokens).logits)

    @torch.no_grad()
    def test_of_padded_rows_and_of_a_step_after_them(self, models):
        model, compiled = models
        tokens = random_tokens(2, 15)
        cache = StaticCache(config=model.config, max_cache_len=50)
        mask = torch.ones(2, 15, dtype=torch.long)
        mask[1, :4] = 0
        compiled(tokens[:, :14], attention_mask=mask[:, :14], past_key_values=cache)
        step = compiled(tokens[:, 14:], attention_mask=mask, past_key_values=cache).logits
        assert_close(step, model(tokens, attention_mask=mask).logits[:, 14:])


@pytest.mark.parametrize("padded", [0, 2], ids=["whole rows", "left-padded rows"])
@pytest.mark.parametrize("name", ["gla", "linear-window", "linear-full", "attention-kept-by-head"])
def test_generate_with_a_static_cache_compiles_its_step_to_one_graph(name, padded):
    """As it does on a GPU without being asked to."""
    model = make_model(CASE[name])
    tokens = random_tokens(2, 5)
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    config = CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    found = generate(
        model, tokens, attention_mask=mask, cache_implementation="static", compile_config=config
    )
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(found, generate(model, tokens, attention_mask=mask))


def places(cache):
    """The addresses of the counts of tokens, and the address and the shape of each state, of attention too."""
    found = {}
    for i, layer in enumerate(cache.layers):
        states = getattr(layer, "states", None) or {"keys": layer.keys, "values": layer.values}
        found |= {(i, name): (x.data_ptr(), x.shape) for name, x in states.items()}
        if hasattr(layer, "tokens_read"):
            found[i, "count"] = layer.tokens_read.data_ptr()
    return found


@every_case
@torch.no_grad()
def test_states_of_a_static_cache_are_written_in_place(case):
    """With a token or with many: none moves or grows, so that one graph goes on with all of them."""
    model = make_model(case).double()
    tokens = random_tokens(2, 30)
    cache = prefill(model, tokens[:, :8])
    assert cache.is_compileable
    before = places(cache)
    for piece in tokens[:, 8:].split([1, 1, 19, 1], 1):
        model(piece, past_key_values=cache)
        assert places(cache) == before
    cache.reset()
    again = model(tokens[:, :12], past_key_values=cache).logits
    assert_close(again, model(tokens[:, :12]).logits)
    assert places(cache) == before


def growths(case):
    """The ways in which the states of a family's memories grow: what an exported step has to write."""
    specs = [spec for spec in make_config(case).state_specs if spec]
    return {(case.model_type, *sorted({state.growth for state in spec.values()})) for spec in specs}


GROWTHS = [growths(case) for case in CASES]
EXPORTED = [case for i, case in enumerate(CASES) if GROWTHS[i] - set().union(*GROWTHS[:i])]


@pytest.mark.parametrize(
    "case", EXPORTED, ids=[case.name for case in EXPORTED]
)  # of every kind, a step is compiled
@torch.no_grad()
def test_an_exported_decode_step_equals_eager(case):
    """The states that a step returns go into the next one."""
    model = make_model(case, **one_layer(case)).double()
    tokens = random_tokens(2, 13)
    sample = {"input_ids": tokens[:, :1], "past_key_values": prefill(model, tokens[:, :8])}
    step = DynamoExporter().export(model, sample, DynamoConfig(dynamic=False))
    cache = prefill(model, tokens[:, :8])
    logits = []
    for token in tokens[:, 8:].split(1, 1):
        output = step(input_ids=token, past_key_values=cache)
        cache = output.past_key_values
        logits.append(output.logits)
    assert_close(torch.cat(logits, 1), model(tokens).logits[:, 8:])


ANY_LENGTH = [
    "linear-identity-norm",
    "attention-heads",
    "attention-sinks-bits",
    "titans-lmm-rope",
    "transformer-routing",
]


@usually([CASE[name] for name in ANY_LENGTH])
@torch.no_grad()
def test_transformers_exports_a_model_for_any_number_of_rows_and_tokens(case):
    """Traced with 2 rows of 12 tokens, which it divides into other pieces than those that it runs with."""
    layers = {} if case.name == "transformer-xl" else one_layer(case)  # two kinds of far tokens
    assert_exports(make_model(case, **layers).double())


@torch.no_grad()
def test_a_store_may_be_larger_than_the_text_of_an_export():
    options = {"num_hidden_layers": 1, "past": ["memorizing"], "memory_top_k": 20}
    model = make_model(CASE["transformer-memorizing"], **options, memory_size=30)
    assert_exports(model.double())


def assert_exports(model):
    sample = {"input_ids": random_tokens(2, 12), "use_cache": False}
    exported = DynamoExporter().export_program(model, sample, DynamoConfig(dynamic=True))[0]
    run = exported.module()
    for rows, length in ((3, 2), (2, 3), (3, 37), (1, 130)):
        tokens = random_tokens(rows, length)
        assert_close(run(input_ids=tokens).logits, model(tokens).logits)


LARGER_THAN_THE_EXAMPLE = {  # blocks and windows of more tokens than the example of an export
    pattern: ("transformer", {"pattern": pattern, "pattern_size": 64})
    for pattern in ("strided", "bigbird", "fixed", "linformer")
}
LARGER_THAN_THE_EXAMPLE |= {
    "window of DeltaFormer": (
        "deltaformer-window",
        {"layer_types": ["sliding_memory"], "sliding_window": 64},
    ),
}


@pytest.mark.parametrize("name", LARGER_THAN_THE_EXAMPLE)
@torch.no_grad()
def test_an_export_by_a_text_shorter_than_a_block_reads_texts_of_any_length(name):
    case, options = LARGER_THAN_THE_EXAMPLE[name]
    assert_exports(make_model(CASE[case], num_hidden_layers=1, **options).double())


IN_OTHER_DTYPES = {
    "a state in 16 bits": ("deltanet", {"recurrent_states": 16}, torch.float32),
    "a model in 16 bits": ("linear-elu", None, torch.bfloat16),
    "a memory that learns, in 16 bits": ("titans-mal", None, torch.bfloat16),
}


@pytest.mark.parametrize("name", IN_OTHER_DTYPES)
@torch.no_grad()
def test_an_exported_step_has_states_in_the_dtypes_of_its_model(name):
    """transformers' exporters cast an example to the dtype of the model's weights, its states too."""
    case, bits, dtype = IN_OTHER_DTYPES[name]
    model = make_model(CASE[case], num_hidden_layers=1, cache_bits=bits).to(dtype)
    tokens = random_tokens(2, 11)
    sample = {"input_ids": tokens[:, :1], "past_key_values": prefill(model, tokens[:, :8])}
    step = DynamoExporter().export(model, sample, DynamoConfig(dynamic=False))
    cache, eager = (prefill(model, tokens[:, :8]) for _ in range(2))
    for token in tokens[:, 8:].split(1, 1):
        output = step(input_ids=token, past_key_values=cache)
        cache = output.past_key_values
        expected = model(token, past_key_values=eager).logits
        assert (output.logits - expected).norm() <= 0.01 * expected.norm()
    dtypes = [{key: x.dtype for key, x in c.layers[0].states.items()} for c in (cache, eager)]
    assert dtypes[0] == dtypes[1]


class DeltaRule(nn.Module):
    def forward(self, k, beta):
        return delta_rule(k, k, k, beta)[0]


class SelectiveScan(nn.Module):
    def forward(self, k, g):
        return selective_scan(k, k, k, -g[..., None].expand_as(k), k.new_ones(1, 4, 4))[0]


@pytest.mark.complete
@pytest.mark.parametrize("op", [DeltaRule(), SelectiveScan()])
@torch.no_grad()
def test_an_exported_op_has_any_number_of_rows_after_decompositions(op):
    """Exporters to ONNX decompose what they are given; where parts of unbind are written to, that fixes the rows."""

    def inputs(rows, length):
        k = torch.randn(rows, length, 1, 4, dtype=torch.float64)
        return F.normalize(k, dim=-1), torch.rand(rows, length, 1, dtype=torch.float64)

    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(op, inputs(2, 12), dynamic_shapes=(auto, auto))
    run = exported.run_decompositions().module()
    for shape in ((3, 37), (1, 130)):
        read = inputs(*shape)
        assert_close(run(*read), op(*read))


def test_an_export_for_any_length_says_that_it_has_no_gradients():
    model = make_model(CASE["linear-identity-norm"], num_hidden_layers=1)
    length = {1: torch.export.Dim("length", min=2)}
    with pytest.raises(ValueError, match=r"must run under torch.no_grad\(\), got gradients"):
        torch.export.export(model, (random_tokens(1, 9),), dynamic_shapes={"input_ids": length})
