"""Runs a model in one engine, in that engine's own environment; started by engines.py.

Reads {"engine", "model", "adapter", "dtype", "cache", "prompts", "again", "new", "contexts", "caches_prefixes"} from
stdin and prints {"version", "tokens", "likeliest", "speed", "bytes", "cached"} on stdout: greedy tokens of each prompt,
and of `again` after them; for each of them the likeliest tokens with log-probabilities; tokens a second of CPU time
after so many tokens, on one thread; bytes of the cache that the engine has for so many tokens; and how many tokens of
each prompt of `again` were read before. `cache` is the engine's type of numbers in the cache, or "exact": those of the
model, but float16 in llama.cpp where speed and bytes are measured.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

MEASURED = 16  # tokens, after two to warm up
SPOKEN = 2 * MEASURED  # last tokens of a context, among which these are
STEP = 512  # tokens that an engine reads at once: longer prompts are read in chunks
LIKELIEST = 20  # tokens with log-probabilities
SPARE = 8  # tokens that the server of llama.cpp writes and may hold back
SMALL_STEP = 64  # the same in llama.cpp, which keeps so many tokens more than a window has


class LlamaCpp:
    """The server of llama.cpp, inside this process."""

    def __init__(self, file: str, length: int, sequences: int = 1, cache: str = "F16"):
        """For so many tokens and sequences, with a cache of these numbers."""
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = file
        options.n_ctx = length
        options.n_parallel = sequences
        options.kv_unified = True
        options.n_batch = STEP
        options.n_ubatch = SMALL_STEP
        options.warmup = False
        options.verbosity = 4
        options.cache_ram_mib = 0
        options.n_ctx_checkpoints = 0
        options.fit_params = False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
        options.cache_type_k = options.cache_type_v = kind
        attention = {"F32": "DISABLED", "F16": "AUTO"}.get(cache, "ENABLED")
        options.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{attention}"
        )
        with logged() as log:
            self.server = xllamacpp.Server(options)
            sizes = re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", log.read_text())
        self.bytes = round(sum(map(float, sizes)) * 2**20)

    def write(
        self, prompt: list[int], new: int, each: Callable[[], object] = lambda: None
    ) -> list[tuple[int, dict[int, float]]]:
        """So many tokens after a prompt, with the likeliest; `each` is called after each of them."""
        written: list[tuple[int, dict[int, float]]] = []

        def keep(part: dict) -> None:
            for found in (part["choices"][0]["logprobs"] or {}).get("content", ()):
                likeliest = {x["id"]: x["logprob"] for x in found["top_logprobs"]}
                written.append((found["id"], likeliest))
                each()

        options = {
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "logprobs": LIKELIEST,
        }
        options |= {
            "prompt": prompt,
            "n_predict": new + SPARE,
            "stream": True,
        }  # it holds back parts of a letter
        self.server.handle_completions(options, keep)
        return written[:new]

    def speed(self, length: int) -> float:
        """Tokens a second after so many."""
        times: list[float] = []
        self.write([5] * length, MEASURED + 3, lambda: times.append(time.process_time()))
        return MEASURED / (times[MEASURED + 1] - times[1])


@contextlib.contextmanager
def logged():
    """What this process writes to stderr goes to a file."""
    with tempfile.NamedTemporaryFile() as file:
        usual = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(usual, 2)


def llama_cpp(request: dict) -> dict:
    """All that is asked, of llama.cpp."""
    from importlib.metadata import version

    prompts = request["prompts"]
    new = request["new"]
    file = request["model"]
    prompts = [*prompts, *request["again"]]
    is_exact = request["cache"] == "exact"
    engine = LlamaCpp(
        file,
        sum(map(len, prompts)) + len(prompts) * (new + SPARE),
        len(prompts),
        "F32" if is_exact else request["cache"],
    )
    with ThreadPoolExecutor(len(prompts)) as pool:  # all at once
        rows = list(pool.map(lambda prompt: engine.write(prompt, new), prompts))
    answer = {"version": version("xllamacpp"), "speed": {}, "bytes": {}}
    answer["tokens"] = [[token for token, _ in row] for row in rows]
    answer["likeliest"] = [[likeliest for _, likeliest in row] for row in rows]
    for length in request["contexts"]:
        engine = LlamaCpp(file, length, cache="F16" if is_exact else request["cache"])
        answer["speed"][length] = engine.speed(length - SPOKEN)
        answer["bytes"][length] = engine.bytes
    return answer


def mlx(request: dict) -> dict:
    """mlx-lm, one prompt after the other."""
    from importlib.metadata import version

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(
        Path(request["model"]), trust_remote_code=True
    )  # Qwen3.5 has a file of Python for mlx-lm

    def read(cache, tokens: list[int]) -> int:
        return int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]))

    made = []
    for prompt in (*request["prompts"], *request["again"]):
        cache = make_prompt_cache(model)
        row = [read(cache, prompt)]
        while len(row) < request["new"]:
            row.append(read(cache, row[-1:]))
        made.append(row)
    speed = {}
    for length in request["contexts"]:
        cache = make_prompt_cache(model)
        for start in range(0, length - SPOKEN, STEP):
            read(cache, [1] * min(STEP, length - SPOKEN - start))
        speed[length] = measured(partial(read, cache, [1]))
    return {"version": version("mlx-lm"), "tokens": made, "speed": speed, "bytes": {}}


def vllm(request: dict) -> dict:
    """vLLM in this process, all prompts at once."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    os.environ |= {
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"
    }  # speed beyond a teacher's positions is asked for, too
    from vllm import LLM, SamplingParams, __version__

    prompts = [*request["prompts"], *request["again"]]
    longest = max(*request["contexts"], *(len(prompt) + request["new"] for prompt in prompts), 0)
    options = {"max_num_batched_tokens": STEP, "max_num_seqs": 16, "skip_tokenizer_init": True}
    options["enable_prefix_caching"] = request["caches_prefixes"]
    if request["caches_prefixes"]:
        options["prefix_cache_retention_interval"] = (
            None  # what is before a window anywhere in a prompt, too
        )
    if request["cache"] != "exact":
        options["kv_cache_dtype"] = request["cache"]
    adapter = None
    if request["adapter"]:
        from vllm.lora.request import LoRARequest

        options |= {"enable_lora": True, "max_lora_rank": 8}
        adapter = LoRARequest("adapter", 1, request["adapter"])
    llm = LLM(request["model"], dtype=request["dtype"], max_model_len=longest, **options)
    writing = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(max_tokens=request["new"], logprobs=LIKELIEST, **writing)
    answers = []
    for prompts in (request["prompts"], request["again"]):
        answers += llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=adapter,
        )
    found = {
        "version": __version__,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
    }
    found["likeliest"] = [
        [{token: x.logprob for token, x in place.items()} for place in answer.outputs[0].logprobs]
        for answer in answers
    ]
    if request["again"]:
        found["cached"] = [x.num_cached_tokens for x in answers[len(request["prompts"]) :]]
    engine = llm.llm_engine
    found["speed"] = {}
    found["bytes"] = {}
    for length in request["contexts"]:
        sampling = SamplingParams(max_tokens=SPOKEN, **writing)
        engine.add_request(str(length), {"prompt_token_ids": [5] * (length - SPOKEN)}, sampling)
        while not any(
            output.outputs for output in engine.step()
        ):  # until all of the context is read
            pass
        found["speed"][length] = measured(engine.step)
        found["bytes"][length] = allocated(engine)
        engine.abort_request([str(length)])
        engine.step()
    return found


def allocated(engine) -> int:
    """Bytes of the blocks that sequences have in vLLM."""
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    blocks = manager.block_pool
    groups = manager.kv_cache_config.kv_cache_groups
    used = blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks()  # the first block is none
    return used * max(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups
    )


def measured(step) -> float:
    """Calls a second of CPU time, which other processes do not change."""
    for _ in range(2):
        step()
    start = time.process_time()
    for _ in range(MEASURED):
        step()
    return MEASURED / (time.process_time() - start)


ENGINES = {"llama.cpp": llama_cpp, "MLX": mlx, "vLLM": vllm}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(ENGINES[asked["engine"]](asked)))
