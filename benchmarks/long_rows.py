"""Training on rows of 8,192 tokens, whole and in chunks of 2,048, beside whole rows of 2,048: memory and time.

    python benchmarks/long_rows.py            # about two minutes on one core

Sizes are those of training.py. One model is a DeltaNet of which each second layer has full attention, the other has
windows, and a full head in each second layer. A step is forward, loss (slice by slice, as in distillation), backward
and AdamW. Each row has a process of its own; its peak is above what the process held with the model, gradients and
optimizer. Time is CPU seconds. Writes benchmarks/results/long_rows.json.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial

import torch

import hf_memory
from decode import DEVICE, DTYPE, MODELS, make
from hf_memory.conversion.stages.divergence import cross_entropy, sliced_loss
from training import RESULTS, SIZES, peak_bytes

CHUNK = 2048
ROWS = ((CHUNK, None), (4 * CHUNK, None), (4 * CHUNK, CHUNK))  # length, and tokens of a chunk
LAYERS = SIZES["num_hidden_layers"]
HYBRID, HEADS = "Gated DeltaNet, half of the layers full", "windows of 256, full heads in half of the layers"
NAMES = (HYBRID, HEADS)
MODELS[HYBRID] = partial(
    hf_memory.DeltaNetConfig, gate="scalar", layer_types=["memory", "full_attention"] * (LAYERS // 2)
)
MODELS[HEADS] = partial(
    hf_memory.MemoryTransformerConfig,
    layer_types=["sliding_heads"] * LAYERS,
    sliding_window=256,
    num_sink_tokens=4,
    full_attention_heads=[[], [0]] * (LAYERS // 2),
)


def measure(name: str, length: int, chunk_length: int | None) -> dict:
    """One row."""
    torch.set_num_threads(1)
    model = make(name, SIZES).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor, chunk_length: int | None = None) -> None:
        targets = tokens[0, 1:]
        text = lambda logits, where: cross_entropy(logits, targets[where])  # noqa: E731
        loss_from = lambda head, x: sliced_loss(head, x[:, :-1], text)  # noqa: E731
        model(tokens, use_cache=False, loss_from=loss_from, chunk_length=chunk_length).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    tokens = torch.randint(SIZES["vocab_size"], (1, length), device=model.device)
    step(tokens[:, :64])  # gradients and the optimizer's moments
    before, start = peak_bytes(), time.process_time()
    step(tokens, chunk_length)
    seconds, peak = time.process_time() - start, (peak_bytes() - before) / 1e6
    return {"model": name, "length": length, "chunk": chunk_length, "peak_megabytes": peak, "cpu_seconds": seconds}


def main() -> None:
    """Print and write the table; with a model, a length and a chunk (0: none), that row alone as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", nargs="*", metavar="MODEL LENGTH CHUNK")
    row = parser.parse_args().row
    if row:
        print(json.dumps(measure(row[0], int(row[1]), int(row[2]) or None)))
        return
    rows = []
    for name in NAMES:
        for length, chunk in ROWS:
            command = [sys.executable, __file__, name, str(length), str(chunk or 0)]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            how = "whole" if chunk is None else f"in chunks of {chunk}"
            print(
                "{model:50} {length:5} {how:18} {peak_megabytes:6.0f} MB {cpu_seconds:5.1f} s".format(
                    how=how, **rows[-1]
                ),
                flush=True,
            )
    about = {"device": DEVICE.type, "dtype": str(DTYPE).removeprefix("torch."), "torch": torch.__version__, **SIZES}
    (RESULTS / "long_rows.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
