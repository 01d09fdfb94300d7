"""Where the time of a decoded token goes in vLLM on a CPU: a teacher and its student, in turn in one process.

    .engines/vLLM/bin/python benchmarks/vllm_decode.py TEACHER STUDENT     # folders; after `make engines`

One sequence on one thread, in float32, compiled as vLLM does by default. A turn is 16 tokens, in which one block of
kept tokens ends. Times are CPU time of the process, and ratios are those of turns that follow each other; what is
printed are medians. Then torch.profiler divides the time of 16 tokens: linear layers, vLLM's attention, memories
(whole, with the Python in them), and all else, whose parts are scaled to the CPU time.
"""

import argparse
import os
import statistics
import sys
import time

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}

import torch
from torch.profiler import ProfilerActivity, profile
from vllm import LLM, SamplingParams, __version__

TURN = 16  # tokens
STEP = 512  # tokens of a prompt that are read at once
PARTS = {  # operations of each part, whose time includes those that they call
    "linear layers": ("_C::onednn_mm",),
    "attention of vLLM": (
        "vllm::unified_attention_with_output",
        "vllm::unified_kv_cache_update",
    ),
    "memories": ("vllm::hf_memory_mix",),
}


def turn(llm: LLM) -> float:
    """Milliseconds of CPU time of a token."""
    start = time.process_time()
    for _ in range(TURN):
        llm.llm_engine.step()
    return (time.process_time() - start) / TURN * 1e3


def begin(llm: LLM, context: int, tokens: int) -> None:
    """Read a prompt, so that so many tokens end at a context."""
    prompt = [5 + i % 1000 for i in range(context - tokens)]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    engine.add_request(str(context), {"prompt_token_ids": prompt}, sampling)
    while not any(output.outputs for output in engine.step()):
        pass


def divided(llm: LLM) -> dict[str, tuple[float, float]]:
    """The share of each part in the time of tokens, and its number of calls a token."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        turn(llm)
    rows = {row.key: row for row in found.key_averages()}
    total = sum(row.self_cpu_time_total for row in rows.values())
    parts = {}
    for name, operations in PARTS.items():
        own = [rows[x] for x in operations if x in rows]
        share = sum(row.cpu_time_total for row in own) / total
        parts[name] = share, sum(row.count for row in own) / TURN
    parts["all else"] = 1 - sum(share for share, _ in parts.values()), 0
    return parts


def python_calls(llm: LLM) -> int:
    """Python functions that are called for a token."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    llm.llm_engine.step()
    sys.setprofile(None)
    return calls


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="folders; ratios are to the first")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    options = {
        "dtype": "float32",
        "max_model_len": max(arguments.contexts),
        "max_num_batched_tokens": STEP,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }
    llms = [LLM(model, **options) for model in arguments.models]
    print(f"vLLM {__version__}, torch {torch.__version__}", flush=True)
    for context in arguments.contexts:
        for llm in llms:
            begin(llm, context, TURN * (arguments.rounds + 3))
        turns = [[turn(llm) for llm in llms] for _ in range(arguments.rounds + 1)][1:]
        times = [statistics.median(x) for x in zip(*turns)]
        ratios = [statistics.median(x[0] / x[i] for x in turns) for i in range(len(llms))]
        for model, llm, ms, ratio in zip(arguments.models, llms, times, ratios):
            load = os.getloadavg()[0]
            print(f"{context} {model}: {ms:.1f} ms, {ratio:.2f} times as fast, load {load:.1f}")
            for name, (share, calls) in divided(llm).items():
                print(f"    {name:20} {share * ms:5.1f} ms  {calls:6.1f} calls")
            print(f"    {python_calls(llm)} Python calls", flush=True)
            llm.llm_engine.abort_request([str(context)])
            llm.llm_engine.step()


if __name__ == "__main__":
    main()
