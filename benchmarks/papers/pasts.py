"""How much a model remembers with each kind of past, by the bytes of its cache.

At equal bytes, a window is said to be improved by seeing the segment before it, by compressing older tokens, and by
searching a store of them ([1901.02860](https://arxiv.org/abs/1901.02860),
[1911.05507](https://arxiv.org/abs/1911.05507), [2203.08913](https://arxiv.org/abs/2203.08913),
[1911.00172](https://arxiv.org/abs/1911.00172)). Segments and stores help as claimed; compression loses to a window
here, since random tokens cannot be compressed.

**Claim.** A model with a window knows more of a long text if its segments see the segment before (Dai et al.,
https://arxiv.org/abs/1901.02860). At equal memory it knows still more if older tokens are compressed (Rae et al.,
https://arxiv.org/abs/1911.05507), if a store of them is searched (Wu et al., https://arxiv.org/abs/2203.08913), or if a
datastore of hidden states is searched beside a model with a short window (Khandelwal et al.,
https://arxiv.org/abs/1911.00172). The first tokens of the text, kept beside a window, keep a model stable but let it
remember nothing more (Xiao et al., https://arxiv.org/abs/2309.17453).

**Setting.** A text has 16 passages of eight random tokens out of 256, none of which occurs twice; then the same
passages follow in another order, and all tokens of a passage except its first must be predicted. A uniform guess costs
ln 256 = 5.5 nats. Models have one layer of attention of width 64 without positions, behind the convolution of
[associative recall](#associative-recall). They are trained for 200 steps of 2,048 tokens, in texts of one to four
passages in the first two fifths of the steps and then of up to 16, with learning rate 0.01 and three seeds. Segments
have 32 tokens. A compressed slot holds four tokens: their mean; what a map makes of them that is learned by its own
loss, that of reconstructing attention to them; or for each head the one of them that got most attention. The memorizing
model reads the best eight entries of its store. kNN-LM uses the model whose window is 32 tokens, and a datastore of the
first half of a text, whose keys are the inputs of the attention at each token (eight neighbours; weight and temperature
are tuned on another text). The bytes are those of the layer's cache and, for kNN-LM, also those of the datastore, that
is, its keys in 16 bits and its tokens.

**Expected.** The loss falls as a window grows. At equal memory (that of a window of 128 tokens), compression has a
lower loss than the window and than segments, and segments that see earlier ones have a lower loss than one segment
alone. The store and the datastore that hold everything recall nearly everything, and the datastore takes fewer bytes
than a window that reaches as far.

**How the results differ.** Random tokens are the text that can be compressed least: the mean of four keys matches each
of them only a quarter as well, and fewer tokens remain uncompressed. The learned map starts as the mean and moves from
it by 25 % (values) to 41 % (keys) of its norm, but loses as much as the mean; only texts of more than two segments have
its loss, which are a quarter of the steps. The most used token of four is kept as it was, so that a quarter of the
older tokens can still be found in each head. A window has a lower loss than segments of equal memory, since a token
sees all of that memory only at the end of a segment. A model that does not see the answer guesses among the tokens that
it sees, which costs more than ln 256.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional as F

from claim import Claim, Rows, spread
from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.decoding import NearestNeighbours, build_datastore, tune
from hf_memory.evaluation import cache_bytes
from learning import IGNORED, in_turn, learn
from pictures import dots
from recall import WithTheTokenBefore

VOCABULARY = 256
PASSAGE = 8
PASSAGES = 16
SEEDS = 3
STEPS = 200
TOKENS = 2048
TEXTS = 16
NEIGHBOURS = 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 64**-0.5,
    "position": "none",
    "segment_length": 32,
    "compression_rate": 4,
    "memory_top_k": 8,
    "num_block_shifts": 1,
}
WINDOWS = {
    f"window of {n}": {"layer_types": ["sliding_heads"], "sliding_window": n}
    for n in (32, 64, 128, 256)
}
SLOTS = {
    "mean": "mean",
    "learned map": "convolution",
    "most used token": "most_used",
}  # what a slot is of its tokens
DATASTORE = "kNN-LM"
KEYS = "model.layers.0.mixer"  # beside the first of these; what its attention reads
MODELS = {
    **WINDOWS,
    "one segment alone": {"pattern": "blockwise", "pattern_size": 32},
    "segments, 96 before": {"past": "xl", "past_window": 96},
    **{
        f"48 slots, {said}": {
            "past": "compressive",
            "past_window": 32,
            "compressed_length": 48,
            "compression": word,
        }
        for said, word in SLOTS.items()
    },
    "memorizing, store of 96": {"past": "memorizing", "sliding_window": 32, "memory_size": 96},
    "memorizing, store of 224": {"past": "memorizing", "sliding_window": 32, "memory_size": 224},
    "4 first tokens and window of 124": {
        "past": "infinite",
        "sliding_window": 124,
        "num_sink_tokens": 4,
    },
}


def texts(
    passages: int, tokens: int, generator: torch.Generator, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Passages, then these in another order; rows of so many tokens in all, and targets in the second half."""
    rows = tokens // (2 * passages * PASSAGE)
    known = torch.rand(rows, vocabulary, generator=generator).argsort(1)[:, : passages * PASSAGE]
    order = torch.rand(rows, passages, generator=generator).argsort(1)
    again = known.unflatten(1, (passages, PASSAGE)).gather(
        1, order[..., None].expand(-1, -1, PASSAGE)
    )
    text = torch.cat([known, again.flatten(1)], 1)
    targets = torch.cat([text[:, 1:], text[:, :1]], 1)
    targets[:, PASSAGE - 1 :: PASSAGE] = IGNORED  # what begins a passage
    targets[:, : passages * PASSAGE] = IGNORED
    return text, targets


def kinds(steps: int, seed: int):
    """Rows of every step: short ones alone in the first two fifths."""
    choose = Random(seed).choice
    return (
        partial(texts, choose((1, 2, 4) if 5 * i < 2 * steps else (2, 4, 8, PASSAGES)))
        for i in range(steps)
    )


def plan(rows: Rows):
    """Every past once before any has a second seed."""
    return (
        {"model": model, "seed": seed, "steps": STEPS} for seed in range(SEEDS) for model in MODELS
    )


def measure(*, model: str, seed: int, steps: int) -> dict:
    """Train one, then ask; of the smallest window also beside a datastore."""
    torch.manual_seed(seed)
    learner = MemoryTransformerForCausalLM(MemoryTransformerConfig(**SIZES, **MODELS[model]))
    learner.set_input_embeddings(WithTheTokenBefore(learner.get_input_embeddings()))
    found = learn(
        learner, in_turn(kinds(steps, seed)), lr=1e-2, steps=steps, rows=TOKENS, seed=seed, solved=2
    )
    length = 2 * PASSAGES * PASSAGE
    text, targets = texts(PASSAGES, (TEXTS + 1) * length, torch.Generator().manual_seed(10_000))
    found |= {
        "nats": nats(learner.eval(), text[:TEXTS], targets[:TEXTS]),
        "bytes": cache_bytes(learner.config, length),
    }
    return (
        found | beside_a_datastore(learner, text, targets)
        if model == next(iter(WINDOWS))
        else found
    )


@torch.no_grad()
def nats(model, text: Tensor, targets: Tensor) -> float:
    """The mean nats of the tokens that are asked."""
    return F.cross_entropy(
        model(text, use_cache=False).logits.mT, targets, ignore_index=IGNORED
    ).item()


def beside_a_datastore(model, text: Tensor, targets: Tensor) -> dict:
    """Nats of the second halves of all texts but the last, which the mixture is tuned on; and bytes."""
    half = text.shape[1] // 2
    losses = []
    with TemporaryDirectory() as folder:
        stores = [
            build_datastore(model, row[: half + 1], Path(folder, str(i)), module=KEYS)
            for i, row in enumerate(text)
        ]
        mixture = tune(model, stores[-1], text[-1, half:], k=NEIGHBOURS)
        for row, target, store in zip(text[:-1], targets, stores):
            with NearestNeighbours(model, store, k=NEIGHBOURS, **mixture):
                losses.append(nats(model, row[None, half:], target[None, half:]))
    keys = stores[0].keys
    tokens = stores[0].tokens
    size = keys.numel() * keys.itemsize + tokens.numel() * tokens.itemsize
    return {"beside": mean(losses), "datastore": size, **mixture}


def found_by(rows: Rows) -> dict[str, tuple[int, list[float]]]:
    """Bytes, and nats of all seeds, by past."""
    found = {}
    for model in MODELS:
        if runs := [row for row in rows if row["model"] == model]:
            found[model] = runs[0]["bytes"], [row["nats"] for row in runs]
    if runs := [row for row in rows if "beside" in row]:
        found[DATASTORE] = runs[0]["bytes"] + runs[0]["datastore"], [row["beside"] for row in runs]
    return found


def table(rows: Rows) -> Rows:
    """By bytes."""
    return [
        {
            "past": model,
            "kB of cache": f"{size / 1000:.0f}",
            "loss, nats per token": spread([{"nats": x} for x in seeds], "nats"),
            "seeds": len(seeds),
        }
        for model, (size, seeds) in sorted(found_by(rows).items(), key=lambda item: item[1][0])
    ]


def draw(rows: Rows, figure) -> None:
    """A dot for each seed, in the order of bytes."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    by_size = sorted(found_by(rows).items(), key=lambda item: item[1][0])
    losses = {f"{model}: {size / 1000:.0f} kB": seeds for model, (size, seeds) in by_size}
    dots(axes, losses)
    axes.set(xlabel="nats per token, a dot per seed", xlim=(0, None))


def verdict(rows: Rows) -> tuple[str, str]:
    """Each of the claims by itself."""
    found = found_by(rows)
    loss = {model: mean(seeds) for model, (_, seeds) in found.items()}
    windows = [loss[model] for model in WINDOWS]
    slots = [loss[f"48 slots, {kind}"] for kind in SLOTS]
    equal, alone, segments = (
        loss[x] for x in ("window of 128", "one segment alone", "segments, 96 before")
    )
    few, many, beside = (
        loss[x] for x in ("memorizing, store of 96", "memorizing, store of 224", DATASTORE)
    )
    holds = [
        windows == sorted(windows, reverse=True),
        segments < alone,
        min(slots) < min(equal, segments),
        many < few,
        beside < equal and found[DATASTORE][0] < found["window of 256"][0],
    ]
    share = found[DATASTORE][0] / found["window of 256"][0]
    said = f"""losses in nats per token. Windows of 32, 64, 128 and 256 tokens: {in_words(windows)}. A segment alone: \
{alone:.2f}; with 96 tokens before it: {segments:.2f}, {compared(segments, equal)} the window of as many bytes (128). \
48 slots beside 32 tokens before a segment: {in_words(slots)} with {in_words(SLOTS)}; the best of these is \
{compared(min(slots), segments)} the segments with 96 tokens before them and {compared(min(slots), equal)} the window \
of 128. A store of 96 tokens: {few:.2f}; of 224: {many:.2f}. The first four tokens and a window of 124: \
{loss["4 first tokens and window of 124"]:.2f}. kNN-LM beside the window of 32, with {share:.0%} of the bytes of a \
window of 256: {beside:.2f}"""
    return (
        "reproduced" if all(holds) else "partly reproduced" if any(holds[1:]) else "not reproduced"
    ), said


def compared(loss: float, other: float) -> str:
    """Where a loss is, seen from another."""
    return "below" if loss < other else "above"


def in_words(found: Iterable[float | str]) -> str:
    """Figures or names: "a, b and c"."""
    *first, last = (x if isinstance(x, str) else f"{x:.2f}" for x in found)
    return f"{', '.join(first)} and {last}"


CLAIM = Claim(
    "pasts", "Kinds of past by cache size", __doc__, 6, plan, measure, table, draw, verdict
)
