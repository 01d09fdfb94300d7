"""Without training: how many tokens can influence the last one, for each attention pattern and each kind of past.

A token that sees few tokens in one layer sees more through several layers, and each paper says how many
([2004.05150](https://arxiv.org/abs/2004.05150), [1904.10509](https://arxiv.org/abs/1904.10509),
[1901.02860](https://arxiv.org/abs/1901.02860) and others). With random weights all numbers that can be computed are
met exactly; in brackets is what was expected.

**Claim.** With an attention pattern, a token sees few tokens in one layer and more through several layers. For n
layers, a size of w tokens and a context of T tokens, the papers say how many tokens are within reach:

- A sliding window reaches n (w - 1) + 1 tokens (Beltagy et al., https://arxiv.org/abs/2004.05150). If it is dilated by
  s, the farthest of these is n (w - 1) s tokens back. If only half of the heads are dilated, by s = 2, the farthest is
  as far back, and of the farthest w tokens (w - 2) / 2 are not reached. If the first tokens of the text are visible to
  all, they are within reach as well.
- Blocks that also see the block before them reach (n + 1) w tokens (Parmar et al., https://arxiv.org/abs/1802.05751),
  and so do blocks with heads that look one block back (https://arxiv.org/abs/1911.02972).
- Heads that learn their span start as a window that is as long as the ramp of the span (Sukhbaatar et al.,
  https://arxiv.org/abs/1905.07799).
- Strided and fixed patterns reach a multiple of sqrt(T) tokens in one layer and all T in two (Child et al.,
  https://arxiv.org/abs/1904.10509).
- Linformer's summaries reach all tokens (Wang et al., https://arxiv.org/abs/2006.04768).
- BigBird with r random blocks reaches at most 3 + r blocks in one layer (Zaheer et al.,
  https://arxiv.org/abs/2007.14062).
- With b buckets, a token sees a fraction 1 - (1 - 1 / b)^h of all tokens, where h counts the hashes of all heads, or
  the heads where there are no hashes (Kitaev et al., https://arxiv.org/abs/2001.04451; Roy et al.,
  https://arxiv.org/abs/2003.05997). If half of the heads see a window instead, its tokens are added.
- Transformer-XL reaches n segments further back (Dai et al., https://arxiv.org/abs/1901.02860), Compressive
  Transformers n times as many tokens as their cached and compressed slots stand for (Rae et al.,
  https://arxiv.org/abs/1911.05507), and a store reaches all tokens that it holds (Wu et al.,
  https://arxiv.org/abs/2203.08913).

**Setting.** A `MemoryTransformer` in float64 with random weights, two heads and one to three layers reads 144 tokens;
windows, blocks and segments have 12 = sqrt(144) tokens. Each token in turn is changed a little. It is within reach if
the output of the last token changes. Patterns that are random have three seeds.

**Expected.** Exactly the numbers above. For buckets in one layer, approximately these numbers, since random weights do
not fill buckets evenly.

**What is different here.** These patterns are causal. The first tokens, which every token sees, therefore see nothing
that comes after them, and they cannot carry information from one token to another. So BigBird reaches far only through
its random blocks, and Longformer only through its window.
"""

from statistics import mean

import torch

from claim import Claim, Rows
from hf_memory import MemoryTransformerConfig, MemoryTransformerModel
from pictures import curve, label_ends

T = 144
W = 12
LAYERS = (1, 2, 3)
SEEDS = 3
HEADS = 2
FIRST = 4
RANDOM = 2
BUCKETS = 16
HASHES = 4
SLOTS = 6
RATE = 4
SIZES = {
    "vocab_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": HEADS,
    "initializer_range": 0.3,
    "max_position_embeddings": T,
    "pattern_size": W,
    "sliding_window": W,
    "num_summary_tokens": 2,
    "num_random_blocks": RANDOM,
    "num_buckets": BUCKETS,
    "num_hashes": HASHES,
    "max_span": T,
    "span_ramp": W,
    "segment_length": W,
    "past_window": W,
    "compressed_length": SLOTS,
    "compression_rate": RATE,
    "memory_size": T,
    "memory_top_k": T,
}
PATTERNS = {  # tokens that reach the last one in n layers: of the papers, for a token that ends a block
    "full": lambda n: T,
    "sliding": lambda n: n * (W - 1) + 1,
    "adaptive_span": lambda n: n * (W - 1) + 1,
    "dilated": lambda n: n * (W - 1) + 1,
    "longformer": lambda n: n * (W - 1) + 1 + FIRST,
    "longformer_by_head": lambda n: 2 * n * (W - 1) + 1 - (W - 2) // 2 + FIRST,
    "block_local": lambda n: (n + 1) * W,
    "blockwise": lambda n: (n + 1) * W,
    "strided": lambda n: W + T // W - 1 if n == 1 else T,
    "strided_by_head": lambda n: W + T // W - 1 if n == 1 else T,
    "fixed": lambda n: W + 2 * (T // W - 1) if n == 1 else T,
    "fixed_by_head": lambda n: W + 2 * (T // W - 1) if n == 1 else T,
    "linformer": lambda n: T,
}
PASTS = {
    "xl": lambda n: (n + 1) * W,
    "compressive": lambda n: W + n * (W + SLOTS * RATE),
    "memorizing": lambda n: T,
    "infinite": lambda n: n * (W - 1) + 1 + FIRST,
}
EXACT = PATTERNS | PASTS
WINDOWS = {
    "sliding": "`sliding_heads`",
    "longformer": f"`sliding_heads`, `num_sink_tokens={FIRST}`",
}  # layer types
ABOUT = {
    "reformer": T * (1 - (1 - 1 / BUCKETS) ** (HASHES * HEADS)),
    "routing": T * (1 - (1 - 1 / BUCKETS) ** HEADS),
    "routing_by_head": W + (T - W) * (1 - (1 - 1 / BUCKETS) ** (HEADS / 2)),
}
DRAWN = ("bigbird", *ABOUT)
SHOWN = ("full", "sliding", "xl", "compressive", "bigbird", "strided")  # in the picture


def plan(rows: Rows):
    """Seeds where it matters."""
    return (
        {"word": word, "layers": n, "seed": seed}
        for word in (*EXACT, *DRAWN)
        for n in LAYERS
        for seed in range(SEEDS if word in DRAWN else 1)
    )


@torch.no_grad()
def measure(*, word: str, layers: int, seed: int) -> dict:
    """How many tokens change the last output, and how far back the first of them is."""
    torch.manual_seed(seed)
    kind = {"past": word} if word in PASTS else {"pattern": word}
    kind = {"layer_types": ["sliding_heads"] * layers} if word in WINDOWS else kind
    kind["num_sink_tokens"] = (
        FIRST if word in ("longformer", "longformer_by_head", "infinite") else 0
    )
    kind |= {"pattern_seed": seed} if word == "bigbird" else {}
    config = MemoryTransformerConfig(**SIZES, num_hidden_layers=layers, **kind)
    model = MemoryTransformerModel(config).double().eval()
    text = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    changed = 1e-3 * torch.eye(T, dtype=torch.float64)[..., None] * torch.randn_like(text)
    outputs = [
        model(inputs_embeds=torch.cat([text, text + x])).last_hidden_state[:, -1]
        for x in changed.split(W)
    ]
    effect = torch.cat([(x[1:] - x[0]).abs().amax(-1) for x in outputs])
    reaching = (effect > 1e-13).nonzero().flatten()
    return {"tokens": len(reaching), "farthest": T - 1 - int(reaching[0])}


def numbers(rows: Rows, word: str, n: int) -> list[int]:
    """How many tokens reach the last one, for all seeds."""
    return [row["tokens"] for row in rows if (row["word"], row["layers"]) == (word, n)]


def table(rows: Rows) -> Rows:
    """Measured and expected tokens by layers; patterns that reach the same share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for word in EXACT:
        if any(row["word"] == word for row in rows):
            figures = tuple(cell(rows, word, n) for n in LAYERS)
            alike.setdefault(figures, []).append(WINDOWS.get(word) or f"`{word}`")
    heads = [f"{n} layer{'s' * (n > 1)} (expected)" for n in LAYERS]
    return [
        {"pattern or past": ", ".join(words), **dict(zip(heads, figures))}
        for figures, words in alike.items()
    ]


def cell(rows: Rows, word: str, n: int) -> str:
    """Tokens, and what was expected."""
    found = f"{mean(numbers(rows, word, n)):.0f}"
    if word in ABOUT and n == 1:
        return f"{found} (about {ABOUT[word]:.0f})"
    return f"{found} ({EXACT[word](n)})" if word in EXACT else found


def draw(rows: Rows, figure) -> None:
    """Tokens by layers."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    for word in SHOWN:
        seeds = list(zip(*(numbers(rows, word, n) for n in LAYERS)))
        curve(axes, LAYERS, seeds, label=word)
    axes.set(xlabel="layers", ylabel=f"tokens of {T} that reach the last one", xticks=LAYERS)
    label_ends(axes)


def verdict(rows: Rows) -> tuple[str, str]:
    """Exact where the papers are, and about right in the first layer of what is drawn."""
    off = [
        f"{word} with {n} layers reaches {found[0]} instead of {EXACT[word](n)} tokens"
        for word in EXACT
        for n in LAYERS
        if (found := numbers(rows, word, n)) != [EXACT[word](n)]
    ]
    off += [
        f"{word} with one layer reaches {mean(found):.0f} tokens, but about {x:.0f} were expected"
        for word, x in ABOUT.items()
        if not x / 2 < mean(found := numbers(rows, word, 1)) < 2 * x
    ]
    if max(numbers(rows, "bigbird", 1)) > (3 + RANDOM) * W:
        off.append("bigbird reaches more than its blocks in one layer")
    words = ("sliding", "strided", "xl", "compressive", *DRAWN)
    by_layers = {
        word: " / ".join(f"{mean(numbers(rows, word, n)):.0f}" for n in LAYERS) for word in words
    }
    figures = f"{len(EXACT) * len(LAYERS)} numbers equal those of the papers; "
    figures += f"of {T} tokens, so many reach the last one with 1 / 2 / 3 layers: "
    figures += ", ".join(f"{word} {x}" for word, x in by_layers.items())
    return ("partly reproduced", "; ".join(off)) if off else ("reproduced", figures)


CLAIM = Claim(
    "reach", "Reach of attention patterns", __doc__, 1, plan, measure, table, draw, verdict
)
