"""Ways to decode that need no model of ours: with a datastore."""

import itertools
import json
import os
from functools import partial
from inspect import signature

import faiss
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cases import CASE, make_model, random_tokens
from comparing import assert_close
from hf_memory.decoding import (
    Datastore,
    NearestNeighbours,
    RetrievalGate,
    Spalm,
    build_datastore,
    tune,
)
from hf_memory.decoding.datastore import inputs_of, key_module
from hf_memory.evaluation import perplexity
from teachers import gpt2, llama
from test_own_losses import make as make_own

MODELS = {"llama": llama, "gpt2": gpt2, "gated-deltanet-sliding": None, "mosaic-full": None}


def make(name):
    return (MODELS[name] or (lambda: make_model(CASE[name])))()


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_mixed_with_what_followed_the_nearest_keys(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_memory.decoding.datastore.SLICE", 32 * 7
    )  # so that a search takes several slices
    model = make(name).double()
    read = random_tokens(40)
    asked = random_tokens(2, 9, seed=1)
    store = build_datastore(model, read, tmp_path / "store", length=80, dtype=torch.float64)
    k = 5
    weight = 0.3
    temperature = 2.0

    inputs = []
    with model.get_submodule(key_module(model)).register_forward_pre_hook(
        lambda _, x: inputs.append(x[0])
    ):
        model(read[None, :-1])
        plain = model(asked).logits.softmax(-1)
    keys = inputs[0][0]
    queries = inputs[1]
    assert_close(store.keys, keys)
    expected = torch.empty_like(plain)
    for b in range(2):
        for t in range(9):
            distances = (queries[b, t] - keys).pow(2).sum(-1)
            nearest = distances.argsort()[:k]
            weights = (-distances[nearest] / temperature).exp()
            retrieved = torch.zeros(64, dtype=torch.float64)
            for place, w in zip(nearest.tolist(), weights / weights.sum()):
                retrieved[read[place + 1]] += w
            expected[b, t] = weight * retrieved + (1 - weight) * plain[b, t]
    with NearestNeighbours(model, store, k=k, weight=weight, temperature=temperature):
        found = model(asked, labels=asked)
        last = model(asked, logits_to_keep=1).logits
    assert_close(found.logits, expected.log())
    assert_close(last, found.logits[:, -1:])
    losses = -expected[:, :-1].log().gather(-1, asked[:, 1:, None])
    assert_close(found.loss, losses.mean(), losses.float().mean())
    assert_close(model(asked).logits.softmax(-1), plain)  # the model is itself again


def by_position(model, batch):
    tokens, labels = batch
    names = list(signature(model.forward).parameters)
    nothing = [None] * (names.index("labels") - 1)
    return model(tokens, *nothing, labels)


def of_two_micro_batches(model, batch):
    tokens, labels = batch
    return model(tokens, labels=labels, num_items_in_batch=2 * labels[:, 1:].numel())


def of_shifted_labels(model, batch):
    tokens, labels = batch
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    return model(tokens, labels=labels.flip(1), shift_labels=shifted)


def test_neighbours_want_outputs_with_names(tmp_path):
    model = llama().float()
    store = build_datastore(model, random_tokens(40), tmp_path / "store", dtype=torch.float32)
    message = "return_dict must be True with NearestNeighbours"
    with NearestNeighbours(model, store, k=3), pytest.raises(ValueError, match=message):
        model(random_tokens(1, 9), return_dict=False)


@pytest.mark.parametrize(
    ("call", "part"), [(by_position, 1), (of_two_micro_batches, 1 / 2), (of_shifted_labels, 1)]
)
@pytest.mark.parametrize("make", [llama, partial(make_own, "routing")], ids=["llama", "own losses"])
def test_the_loss_of_a_mixture_is_that_which_the_call_asks_for(call, part, make, tmp_path):
    model = make().float()
    store = build_datastore(model, random_tokens(40), tmp_path / "store", dtype=torch.float32)
    asked = random_tokens(2, 9, seed=1)
    batch = asked, asked
    plain = call(model, batch)
    with NearestNeighbours(model, store, k=3):
        found = call(model, batch)
    of_predictions = [
        F.cross_entropy(x.logits[:, :-1].flatten(0, 1), asked[:, 1:].flatten())
        for x in (found, plain)
    ]
    added = plain.loss - part * of_predictions[1]
    assert (float(added) > 1e-3) == model.training  # what parts of the model add
    assert float(found.loss) == pytest.approx(float(part * of_predictions[0] + added), rel=1e-5)


def test_the_mixture_that_is_chosen_is_the_least_surprised(tmp_path):
    model = llama()
    read = random_tokens(100)
    store = build_datastore(model, read, tmp_path / "store", dtype=torch.float32)
    other = torch.cat([read[30:50], random_tokens(20, seed=1)])
    choices = {"weights": (0.1, 0.5, 0.9), "temperatures": (0.1, 3.0, 30.0)}
    losses = {}
    for weight, temperature in itertools.product(*choices.values()):
        with (
            NearestNeighbours(model, store, k=4, weight=weight, temperature=temperature),
            torch.no_grad(),
        ):
            losses[weight, temperature] = float(model(other[None], labels=other[None]).loss)
    best = tune(model, store, other, k=4, **choices)
    assert (best["weight"], best["temperature"]) == min(losses, key=losses.get)
    assert sorted(losses.values())[1] > min(losses.values()) + 1e-3
    assert set(tune(model, store, other, k=4)) == {"weight", "temperature"}


def test_a_gate_mixes_retrieved_tokens_into_what_the_head_reads(tmp_path):
    model = llama().double()
    read = random_tokens(40)
    asked = random_tokens(2, 9, seed=1)
    store = build_datastore(model, read, tmp_path / "store", dtype=torch.float64)
    gate = RetrievalGate(32).double()
    plain = model(asked, output_hidden_states=True)
    h = plain.hidden_states[-1]
    W = model.lm_head.weight
    with inputs_of(model, key_module(model)) as seen:
        model(asked)
    near = store.nearest(seen[0].flatten(0, 1), 3).tokens.view(2, 9, 3)
    expected = torch.empty_like(plain.logits)
    for b in range(2):
        for t in range(9):
            y = W[near[b, t]]
            m = (torch.softmax(y @ h[b, t], 0)[:, None] * y).sum(0)
            g = torch.sigmoid(gate.weight[0] @ h[b, t])
            expected[b, t] = W @ ((1 - g) * m + g * h[b, t])
    with Spalm(model, store, gate, k=3):
        found = model(asked, labels=asked)
        last = model(asked, logits_to_keep=1).logits
        found.loss.backward()
    assert_close(found.logits, expected)
    assert_close(last, expected[:, -1:])
    assert gate.weight.grad.abs().sum() > 0
    assert_close(model(asked).logits, plain.logits)


def test_a_text_that_was_kept_is_written_and_predicted_again(tmp_path):
    model = llama()
    read = random_tokens(300)
    store = build_datastore(model, read, tmp_path / "store", length=32, dtype=torch.float32)
    assert len(store) == 299
    alone = float(perplexity(model, read, length=32))
    with NearestNeighbours(model, store, k=4, weight=0.9, temperature=0.01):
        together = float(perplexity(model, read, length=32))
        written = model.generate(read[None, :16], max_new_tokens=6, do_sample=False)[0]
    assert together < min(1.5, alone / 10)
    assert written.tolist() == read[:22].tolist()


def test_an_index_finds_what_all_keys_give(tmp_path):
    faiss.omp_set_num_threads(1)
    model = llama()
    read = random_tokens(200)
    exact = build_datastore(model, read, tmp_path / "exact")
    queries = exact.keys[:20].float() + 0.01
    all_lists = build_datastore(model, read, tmp_path / "index", index="IVF4,Flat")
    found, indexed = (store.nearest(queries, 5) for store in (exact, all_lists))
    squares = (queries.double()[:, None] - exact.keys.double()).square().sum(-1)
    assert_close(indexed.distances, squares.topk(5, largest=False).values, found.distances)
    assert torch.equal(indexed.tokens, found.tokens)
    all_lists.index.nprobe = 1
    found = all_lists.nearest(queries, 150)
    assert found.distances.isinf().any()  # a list has fewer keys than that
    assert exact.nearest(queries, 300).distances.shape == (20, 199)


def test_what_does_not_fit_is_refused(tmp_path):
    model = llama()
    read = random_tokens(20)
    store = build_datastore(model, read, tmp_path / "store")
    with pytest.raises(ValueError, match="folder must be a new one"):
        build_datastore(model, read, tmp_path / "store")
    with pytest.raises(ValueError, match="module must be the name of a module"):
        build_datastore(model, read, tmp_path / "other", module="nowhere")
    with pytest.raises(ValueError, match=r"index must be a description.*Nonsense"):
        build_datastore(model, read, tmp_path / "other", index="Nonsense")
    with pytest.raises(
        ValueError, match=r"index must be .*training points \(19\) should be at least"
    ):
        build_datastore(model, read, tmp_path / "other", index="IVF64,Flat")
    with pytest.raises(
        ValueError, match=r"module must be one that hidden states go through, .* got 'lm_head'"
    ):
        build_datastore(model, read, tmp_path / "other", module="lm_head")
    with pytest.raises(ValueError, match="module must be given for Rwkv7ForCausalLM"):
        build_datastore(make_model(CASE["rwkv7"]), read, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    model.lm_head.weight.data.mul_(2)
    NearestNeighbours(model, store).remove()  # the head makes no keys
    model.model.norm.weight.data.mul_(2)
    with pytest.raises(ValueError, match="datastore must be made by the same model"):
        NearestNeighbours(model, store)
    for name, value in (("k", 0), ("weight", 1.0), ("temperature", 0.0)):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            NearestNeighbours(model, store, **{name: value})
    (tmp_path / "store" / "keys.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"keys.bin must have 1216 bytes, got 3"):
        Datastore(tmp_path / "store")
    for described in ("[]", "{}", "[" * 100_000):
        (tmp_path / "store" / "datastore.json").write_text(described)
        with pytest.raises(ValueError, match=r"datastore.json is damaged"):
            Datastore(tmp_path / "store")


def described(**fields):
    def change(folder):
        file = folder / "datastore.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def changed(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def index_of_another(folder):
    index = faiss.IndexFlatL2(5)
    index.add(torch.zeros(3, 5).numpy())
    faiss.write_index(index, str(folder / "index.faiss"))


DAMAGES = {
    "no object": (
        lambda folder: (folder / "datastore.json").write_text("[]"),
        "json is damaged; .* must be an object",
    ),
    "no JSON": (
        changed("datastore.json", lambda content: content[:-9]),
        "datastore.json is damaged",
    ),
    "zeros": (
        changed("datastore.json", lambda content: bytes(len(content))),
        "datastore.json is damaged",
    ),
    "other format": (
        described(format="1"),
        "must have the format 'hf_memory datastore 1', got '1'",
    ),
    "dtype of integers": (
        described(dtype="int32"),
        "json is damaged; .* dtype must be one of float16.*got 'int32'",
    ),
    "no dtype": (described(dtype="nn"), "dtype must be one of"),
    "dtype as a number": (described(dtype=16), "dtype must be a word, got 16"),
    "wider dtype": (described(dtype="float32"), r"keys.bin must have \d+ bytes"),
    "module as a number": (described(module=3), "module must be a word, got 3"),
    "shape as a word": (described(shape="ab"), "shape must be the numbers"),
    "shape of one": (described(shape=[19]), "shape must be the numbers"),
    "shape of fractions": (described(shape=[19.0, 32.0]), "shape must be the numbers"),
    "negative shape": (described(shape=[-19, -32]), "shape must be the numbers"),
    "empty shape": (described(shape=[0, 32]), "shape must be the numbers"),
    "huge shape": (described(shape=[2**62, 2**62]), r"keys.bin must have \d+ bytes"),
    "truth as shape": (described(shape=[True, 32]), "shape must be the numbers"),
    "mixture as a list": (described(mixture=[0.5]), "mixture must have a weight and a temperature"),
    "unknown mixture": (
        described(mixture={"x": 1}),
        "mixture must have a weight and a temperature",
    ),
    "weight of 2": (described(mixture={"weight": 2}), "mixture must have a weight between 0 and 1"),
    "weight as a word": (
        described(mixture={"weight": "x"}),
        "mixture must have a weight between 0 and 1",
    ),
    "no number": (described(mixture={"temperature": float("nan")}), "and a positive temperature"),
    "keys cut": (
        changed("keys.bin", lambda content: content[:-1]),
        r"keys.bin must have \d+ bytes",
    ),
    "keys longer": (
        changed("keys.bin", lambda content: content + b"x"),
        r"keys.bin must have \d+ bytes",
    ),
    "infinite keys": (
        changed("keys.bin", lambda content: b"\xff" * len(content)),
        "keys.bin is damaged; .* not finite",
    ),
    "tokens empty": (
        changed("tokens.bin", lambda content: b""),
        r"tokens.bin must have \d+ bytes, got 0",
    ),
    "negative tokens": (
        changed("tokens.bin", lambda content: b"\xff" * 4 + content[4:]),
        "it has the token -1",
    ),
    "other tokens": (
        changed("tokens.bin", lambda content: b"\xff\0\0\0" + content[4:]),
        "below 64, got 255 in .*store",
    ),
    "index of nothing": (
        lambda folder: (folder / "index.faiss").write_bytes(b""),
        "index.faiss is damaged; delete it",
    ),
    "index of noise": (
        lambda folder: (folder / "index.faiss").write_bytes(b"IxFI" + b"\xff" * 99),
        "index.faiss is da",
    ),
    "another index": (index_of_another, "it is of 3 keys of 5 channels for 19 of"),
    "pipe": (
        lambda folder: ((folder / "keys.bin").unlink(), os.mkfifo(folder / "keys.bin")),
        "got the pipe .*keys.bin",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_datastore_is_refused_in_one_sentence(damage, tmp_path):
    model, (change, sentence) = llama(), DAMAGES[damage]
    build_datastore(model, random_tokens(20), tmp_path / "store")
    change(tmp_path / "store")
    with (
        pytest.raises(ValueError, match=sentence),
        NearestNeighbours(model, Datastore(tmp_path / "store"), k=4),
    ):
        model(random_tokens(1, 3))


def test_of_two_datastores_in_one_folder_one_is_refused(tmp_path):
    model = llama()
    read = random_tokens(20)
    refused = []

    def meanwhile(_):
        with pytest.raises(
            ValueError, match=r"folder must not be in use, got .*store, to which process \d+ on"
        ) as error:
            build_datastore(model, read, tmp_path / "store")
        refused.append(error)

    build_datastore(model, read, tmp_path / "store", report=meanwhile)
    assert refused
    assert [x.name for x in tmp_path.iterdir()] == ["store"]
    assert len(Datastore(tmp_path / "store")) == 19


def test_a_datastore_is_made_and_used_by_commands(run, teacher, text, tmp_path):
    store = tmp_path / "store"
    code, out, err = run(
        "datastore", teacher, "--text", text, "--output", store, "--max-tokens", 300, "--length", 64
    )
    assert err == ""
    assert code == 0
    assert "299 keys of 16 channels, 0.0 MB" in out
    tuned = run("datastore", teacher, "--tune", text, "--output", store, "--length", 64)
    assert tuned[0] == 0
    mixture = Datastore(store).mixture
    assert f"weight {mixture['weight']:.3g}, temperature {mixture['temperature']:.3g}" in tuned[1]
    with NearestNeighbours(AutoModelForCausalLM.from_pretrained(teacher), Datastore(store)) as used:
        assert {"weight": used.weight, "temperature": used.temperature} == mixture
    output = ["--output", tmp_path / "evaluation", "--tasks", "perplexity", "--lengths", 256]
    found = run(
        "evaluate", teacher, "--against", teacher, "--datastore", store, "--text", text, *output
    )
    assert found[0] == 0
    rows = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["models"]
    assert list(rows) == [str(teacher), f"{teacher} with store"]
    alone, beside = (
        row["found"]["perplexity"]["256"]["perplexity"]["value"] for row in rows.values()
    )
    assert beside < 0.9 * alone  # of a text that is in the datastore
    prompt = ["--prompt", "the snake", "--max-new-tokens", 4, "--greedy"]
    assert (
        run("generate", teacher, *prompt, "--datastore", store, "--datastore-weight", 0.5)[0] == 0
    )
    code, _, err = run("datastore", teacher, "--text", text, "--output", store)
    assert code == 2
    assert "which is not empty" in err
    assert "--overwrite" not in err
    code, _, err = run("datastore", teacher, "--output", tmp_path / "other")
    assert code == 2
    assert "text must be given for a new datastore, or tune for an old one" in err
