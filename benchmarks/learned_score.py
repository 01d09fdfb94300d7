"""Does a learned score choose better which old tokens stay than the moving average of the attention they received?

    python benchmarks/learned_score.py             # all rows that are missing
    python benchmarks/learned_score.py "average"   # one row

The student is "kept before training, 8 heads, 256 entries, seed 0" of twins.py. For each of its heads a ridge
regression predicts the logarithm of the attention that an old token will receive from the next 512 tokens, as the
teacher gives it in 8 texts of 2,048 tokens, from the logarithms of its moving average and age, its value, and its key
before rotation. Tokens are then ranked by what is predicted. A regression is fitted to any tokens and times, with the
averages that the teacher gives, or to the tokens that the student holds, with the averages that it knows. The last rows
rank by the teacher's true attention to come. KL is of 4 held-out windows of 2,048 tokens, recall as in smollm2.py, and
the part of the variance that is explained the mean over heads, of 2 held-out texts. Writes
benchmarks/results/learned_score.json and prints a table.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import smollm2
import twins
from hf_memory.evaluation import agreement
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text
from hf_memory.mixers.retention import DECAY, Entries, Retention
from hf_memory.mixers.windowed import WindowedMixer

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "learned_score.json"
STUDENT = "kept before training, 8 heads, 256 entries, seed 0"
NAME = "learned score"  # of the folder
WORK = smollm2.folder_of(NAME)
LENGTH, AHEAD = 2048, 512  # tokens of a text, and of what is predicted
TEXTS = {"fitted": 8, "held out": 2}
SAMPLES = 4096  # tokens and times of a head and a text
EVERY = 4  # of so many choices of the student one is watched
WINDOWS = 4  # for KL
TINY = 1e-3  # attention beside which less makes no difference
RIDGE = 1e-3  # of the variance of each feature
AVERAGE = "average"  # as the library chooses
FEATURES = {  # how many of the columns of `features`
    AVERAGE: 2,
    "average and age": 3,
    "average, age and values": 67,
    "average, age, values and keys": 131,
}
TRUTH: dict[str, int | None] = {"attention of the next 512 tokens": AHEAD, "attention of all later tokens": None}
PARTS = {", all layers but the first ten": slice(10, None), ", the first ten layers": slice(10)}
Score = Callable[[Entries], Tensor]


class Reading(NamedTuple):
    """What a layer of the teacher makes of a text."""

    attention: Tensor  # [H, blocks, T], what tokens received from the queries of each block, summed over a group
    keys: Tensor  # [H, T, D], not rotated
    values: Tensor  # [H, T, D]

    def average(self) -> Tensor:
        """The moving average after each block [H, blocks, T]."""
        found = [torch.zeros_like(self.attention[:, 0])]
        for more in self.attention.unbind(1):
            found.append(DECAY * found[-1] + more)
        return torch.stack(found[1:], 1)

    def later(self, blocks: int | None) -> Tensor:
        """The attention in so many blocks after each, or in all of them [H, blocks, T]."""
        total, last = self.attention.cumsum(1), self.attention.shape[1] - 1
        ends = torch.arange(last + 1).add(last if blocks is None else blocks).clamp(max=last)
        return total[:, ends] - total


class Scored(Retention):
    """Old tokens that stay by a score in place of the moving average, which goes on as it was."""

    score: Score

    def _replace(self, **changes) -> "Scored":
        changed = super()._replace(**changes)
        changed.score = self.score
        return changed

    def _after(self, entries: Entries, ends: Tensor) -> Entries:
        values = torch.cat([entries.values, entries.received[..., None]], -1)
        left = super()._after(entries._replace(values=values, received=self.score(entries)), ends)
        return left._replace(values=left.values[..., :-1], received=left.values[..., -1])


def mixers_of(student: PreTrainedModel) -> list[WindowedMixer]:
    """One for each layer."""
    return [x for x in student.modules() if isinstance(x, WindowedMixer)]


def choose_by(student: PreTrainedModel, scores: Sequence[Score], layers: slice = slice(None)) -> None:
    """Keep tokens by the score of each layer, in some layers."""
    for mixer, score in list(zip(mixers_of(student), scores))[layers]:
        mixer.retention = Scored(*mixer.retention)
        mixer.retention.score = score


@torch.no_grad()
def readings(teacher: PreTrainedModel, block: int, row: Tensor) -> list[Reading]:
    """What each layer makes of a text [T], from a file if it has been read before."""
    file = WORK / "readings" / f"{hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]}.pt"
    if not file.exists():
        found: list[Reading] = []
        hooks = [
            x.self_attn.register_forward_hook(partial(note, found, block), with_kwargs=True)
            for x in teacher.model.layers
        ]
        teacher.model(row[None])
        for hook in hooks:
            hook.remove()
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as partly:
            torch.save([tuple(x.half() for x in reading) for reading in found], partly)
    return [Reading(*(x.float() for x in reading)) for reading in torch.load(file)]


def note(found: list[Reading], block: int, layer, args, kwargs, output) -> None:
    """Add what a layer of attention made of a text."""
    hidden = kwargs["hidden_states"]
    parts = (project(hidden)[0].unflatten(1, (-1, layer.head_dim)) for project in (layer.k_proj, layer.v_proj))
    keys, values = (x.transpose(0, 1) for x in parts)
    weights = output[1][0].unflatten(0, (len(keys), -1)).unflatten(2, (-1, block))  # [H, group, blocks, block, T]
    found.append(Reading(weights.sum((1, 3)), keys, values))


def frequencies_of(teacher: PreTrainedModel) -> Tensor:
    """Those of the rotation."""
    return teacher.model.rotary_emb.inv_freq


def features(received: Tensor, age: Tensor, values: Tensor, keys: Tensor) -> Tensor:
    """What a score is computed from, for entries [..., n]."""
    logarithms = (received + TINY).log(), age.to(received.dtype).log()
    return torch.cat([torch.stack([torch.ones_like(received), *logarithms], -1), values, keys], -1)


def features_of(entries: Entries, frequencies: Tensor) -> Tensor:
    """The same of what a student holds; the rotation of its keys is taken back."""
    angle = (entries.number - 1)[..., None] * frequencies
    a, b = entries.keys.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    keys = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
    age = entries.number.amax(-1, keepdim=True) - entries.number + 1
    return features(entries.received, age, entries.values, keys)


def moments(x: Tensor, later: Tensor, counts: Tensor | None = None) -> Tensor:
    """The sums of products of features [H, n, F] and of the attention to come, the last one, where `counts` [H, n]."""
    columns = torch.cat([x, (later + TINY).log()[..., None]], -1).double()
    if counts is not None:
        columns *= counts[..., None]
    return columns.mT @ columns


def of_any_tokens(teacher: PreTrainedModel, student: PreTrainedModel, row: Tensor) -> Tensor:
    """The moments [layers, H, F + 1, F + 1] of tokens and times by chance."""
    sizes = mixers_of(student)[0].retention
    block, token = sizes.block, torch.arange(len(row))
    blocks = torch.arange(len(row) // block - AHEAD // block)[:, None]
    time, token = ((token >= sizes.first) & (token < block * (blocks + 1) - sizes.size)).nonzero().T
    drawn = torch.randperm(len(time), generator=torch.Generator().manual_seed(0))[:SAMPLES]
    time, token = time[drawn], token[drawn]
    found = []
    for reading in readings(teacher, block, row):
        age = (block * (time + 1) - token).expand(len(reading.keys), -1)
        x = features(reading.average()[:, time, token], age, reading.values[:, token], reading.keys[:, token])
        found.append(moments(x, reading.later(AHEAD // block)[:, time, token]))
    return torch.stack(found)


@torch.no_grad()
def of_held_tokens(teacher: PreTrainedModel, student: PreTrainedModel, row: Tensor) -> Tensor:
    """The same of the old tokens that a student holds when it chooses by the moving average."""
    mixers, read = mixers_of(student), readings(teacher, mixers_of(student)[0].retention.block, row)
    watched = [Watched(mixer, reading, frequencies_of(teacher)) for mixer, reading in zip(mixers, read)]
    choose_by(student, watched)
    student(row[None], use_cache=False, logits_to_keep=1)
    return torch.stack([x.sums for x in watched])


class Watched:
    """The moving average as a score, which notes the moments of what it is asked for."""

    def __init__(self, mixer: WindowedMixer, reading: Reading, frequencies: Tensor):
        self.heads, self.sizes, self.frequencies = mixer.near_heads, mixer.retention, frequencies
        self.later = reading.later(AHEAD // self.sizes.block)
        F = FEATURES["average, age, values and keys"] + 1
        self.sums = torch.zeros(len(reading.keys), F, F, dtype=torch.double)

    def __call__(self, entries: Entries) -> Tensor:
        number, sizes = entries.number[0], self.sizes
        now = int(number.max())
        time = now // sizes.block - 1
        if time % EVERY == 0 and now + AHEAD <= self.later.shape[2]:
            later = self.later[self.heads, time].gather(1, (number - 1).clamp(min=0).long())
            x = features_of(entries, self.frequencies)[0]
            self.sums[self.heads] += moments(x, later, (number > sizes.first) & (number <= now - sizes.size))
        return entries.received


class Predicted:
    """The attention that weights [H, F] predict of features."""

    def __init__(self, weights: Tensor, frequencies: Tensor):
        self.weights, self.frequencies = weights.float(), frequencies

    def __call__(self, entries: Entries) -> Tensor:
        x = features_of(entries, self.frequencies)[..., : self.weights.shape[1]]
        return torch.einsum("bhnf,hf->bhn", x, self.weights).exp()


def near_heads(student: PreTrainedModel) -> Tensor:
    """[layers, H] bool, the heads that keep tokens."""
    return torch.tensor([[h in x.near_heads for h in range(len(x.places))] for x in mixers_of(student)])


def predicted(student: PreTrainedModel, weights: Tensor, frequencies: Tensor) -> list[Predicted]:
    """A score for each layer from the weights [heads that keep tokens, F] of all."""
    parts = weights.split([len(x.near_heads) for x in mixers_of(student)])
    return [Predicted(x, frequencies) for x in parts]


class Truth:
    """The attention to come of one layer, in the texts that are being read."""

    later: Tensor  # [B, H, blocks, T]

    def __init__(self, mixer: WindowedMixer):
        self.heads, self.block = mixer.near_heads, mixer.retention.block

    def __call__(self, entries: Entries) -> Tensor:
        time = int(entries.number.max()) // self.block - 1
        return self.later[:, self.heads, time].gather(2, (entries.number - 1).clamp(min=0).long())


def truths(teacher: PreTrainedModel, student: PreTrainedModel, ahead: int | None) -> list[Truth]:
    """The attention of the next tokens, or all, as scores; the teacher reads what the student is about to read."""
    scores = [Truth(mixer) for mixer in mixers_of(student)]
    block = scores[0].block

    def look(_, args) -> None:
        for layer, score in zip(zip(*(readings(teacher, block, row) for row in args[0])), scores):
            score.later = torch.stack([x.later(ahead and ahead // block) for x in layer])

    student.register_forward_pre_hook(look)
    return scores


KINDS = {"any tokens": of_any_tokens, "held tokens": of_held_tokens}  # that regressions are fitted to


def summed(kind: str, split: str, texts: Tensor, teacher: PreTrainedModel, student: PreTrainedModel) -> Tensor:
    """The moments of some texts; each is a file."""
    found = []
    for i, row in enumerate(texts):
        file = WORK / "moments" / f"{kind}, {split}, {i}.pt".replace(", ", "-").replace(" ", "_")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as partly:
                torch.save(KINDS[kind](teacher, student, row), partly)
            print(f"  {kind}, {split}, {i}: {time.process_time():.0f} s", flush=True)
        found.append(torch.load(file))
    return torch.stack(found).sum(0)


def fitted(sums: Tensor, size: int) -> Tensor:
    """The weights [..., size] of a ridge regression on the first features, which is the same in all units."""
    products, mean = sums[..., :size, :size], sums[..., 0, :size] / sums[..., :1, 0]
    variance = products.diagonal(dim1=-2, dim2=-1) - sums[..., :1, 0] * mean**2  # none of the constant
    return torch.linalg.solve(products + RIDGE * variance.diag_embed(), sums[..., :size, -1])


def explained(weights: Tensor, sums: Tensor) -> float:
    """The part of the variance that weights [heads, F] explain of these moments, the mean over heads."""
    size = weights.shape[-1]
    total = sums[:, -1, -1] - sums[:, 0, -1] ** 2 / sums[:, 0, 0]
    known = torch.einsum("hf,hf->h", weights, sums[:, :size, -1])
    squares = torch.einsum("hf,hfg,hg->h", weights, sums[:, :size, :size], weights)
    return (1 - (sums[:, -1, -1] - 2 * known + squares) / total).mean().item()


def regressions() -> dict[str, tuple[str, int, slice]]:
    """Name of a row: what its regression is fitted to, how many features it has, and the layers that choose by it."""
    found = {}
    for kind, (name, size) in product(KINDS, list(FEATURES.items())[1:]):
        found[f"{name}, fitted to {kind}"] = kind, size, slice(None)
    last = f"{name}, fitted to {kind}"
    return {**found, **{f"{last}{part}": (kind, size, layers) for part, layers in PARTS.items()}}


def rows() -> list[str]:
    """The names of all rows."""
    return [AVERAGE, *regressions(), *TRUTH]


def scored(name: str, teacher: PreTrainedModel, student: PreTrainedModel, sums: dict[tuple[str, str], Tensor]) -> dict:
    """Let the student choose as of a row; the part of the variance that its score explains of each kind of tokens."""
    near = near_heads(student)
    of_near = {x: found[near] for x, found in sums.items()}
    if name == AVERAGE:
        known = {kind: fitted(of_near[kind, "fitted"], 2) for kind in KINDS}
    elif name in TRUTH:
        choose_by(student, truths(teacher, student, TRUTH[name]))
        return {}
    else:
        kind, size, layers = regressions()[name]
        weights = fitted(of_near[kind, "fitted"], size)
        known = dict.fromkeys(KINDS, weights)
        choose_by(student, predicted(student, weights, frequencies_of(teacher)), layers)
    return {kind: explained(x, of_near[kind, "held out"]) for kind, x in known.items()}


def measured(student: PreTrainedModel, teacher: PreTrainedModel, held_out: Text) -> dict:
    """How near a student is to its teacher, and how much it recalls."""
    remembered, gains = twins.Remembered(teacher, WORK / "teacher"), smollm2.teachers_recall(teacher, held_out)
    like = agreement(student, remembered, held_out, length=LENGTH, max_tokens=WINDOWS * LENGTH)
    return {
        "KL": like.kl,
        "KL of each window": like.kl.samples.tolist(),
        "perplexity / teacher": like.ratio,
        "recall": {gap: gain / gains[gap] for gap, gain in smollm2.recall(student, held_out).items()},
    }


def table(found: dict[str, dict]) -> str:
    """The rows in Markdown."""
    header = ["old tokens stay by", "explained of any tokens", "of held tokens", "KL", "recall at 512", "at 2,048"]
    lines = []
    for name, row in found.items():
        known = [f"{row['variance explained'][kind]:.0%}" if row["variance explained"] else "" for kind in KINDS]
        lines.append([name, *known, f"{row['KL']:.4f}", *(f"{x:.0%}" for x in row["recall"].values())])
    return smollm2.markdown(header, lines)


def read() -> dict[str, dict]:
    """The rows that are there."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}


def write(found: dict[str, dict]) -> None:
    """The rows in their order."""
    about = {
        "command": "python benchmarks/learned_score.py",
        "texts": TEXTS,
        "windows": WINDOWS,
        "torch": torch.__version__,
    }
    ordered = {name: found[name] for name in rows() if name in found}
    with replaced(RESULTS) as partly:
        partly.write_text(json.dumps({**about, "rows": ordered}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Make the rows that are asked for, or all, as far as they are missing."""
    logging.disable_progress_bar()
    teacher, tokenizer, tokens, held_out = smollm2.materials()
    folder, _ = smollm2.make(NAME, twins.recipes()[STUDENT], teacher, tokenizer, tokens, {"bf16": True})
    teacher.set_attn_implementation("eager")  # which gives its weights
    student = AutoModelForCausalLM.from_pretrained(folder).eval()
    sums = {}
    for (split, count), part in zip(TEXTS.items(), (tokens, held_out)):
        texts = part.windows(torch.linspace(0, len(part) - LENGTH, count).long(), LENGTH)
        sums |= {(kind, split): summed(kind, split, texts, teacher, student) for kind in KINDS}
    for name in sys.argv[1:] or rows():
        if name not in read():
            start, student = time.process_time(), AutoModelForCausalLM.from_pretrained(folder).eval()
            known = scored(name, teacher, student, sums)
            row = {"variance explained": known, **measured(student, teacher, held_out)}
            write({**read(), name: row | {"CPU seconds": time.process_time() - start}})
            print(name, row, flush=True)
    print(table(read()))


if __name__ == "__main__":
    main()
