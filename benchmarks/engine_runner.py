"""Runs a model in one engine, in that engine's own environment; started by engines.py.

Reads {"engine", "model", "dtype", "prompts", "new", "contexts"} from stdin and prints {"version", "tokens", "speed"} on
stdout: greedy tokens of each prompt, and tokens a second of CPU time after so many tokens, on one thread.
"""

import json
import os
import sys
import time
from functools import partial

MEASURED = 16  # tokens, after two to warm up
STEP = 512  # tokens that an engine reads at once: longer prompts are read in chunks


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python, which can read several sequences at once."""

    def __init__(self, file: str):
        import llama_cpp

        self.c = llama_cpp
        self.silence = llama_cpp.llama_log_callback(lambda *_: None)
        self.c.llama_log_set(self.silence, None)
        self.c.llama_backend_init()
        self.model = self.c.llama_model_load_from_file(file.encode(), self.c.llama_model_default_params())
        self.words = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))

    def state(self, length: int, sequences: int, exact: bool):
        """For so many tokens; exact is a cache in float32."""
        options = self.c.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = length, sequences, True
        options.n_threads = options.n_threads_batch = 1
        if exact:
            options.type_k = options.type_v = self.c.GGML_TYPE_F32
            options.flash_attn_type = self.c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return self.c.llama_init_from_model(self.model, options)

    def read(self, state, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Read (token, position, sequence, whether the next is wanted); the next tokens of those that want one."""
        import numpy as np

        batch = self.c.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self.c.llama_decode(state, batch):
            raise RuntimeError("llama.cpp could not read the batch")
        logits = [self.c.llama_get_logits_ith(state, i) for i, row in enumerate(rows) if row[3]]
        self.c.llama_batch_free(batch)
        return [int(np.ctypeslib.as_array(row, (self.words,)).argmax()) for row in logits]

    def greedy(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """So many tokens after each prompt, all prompts written to at once."""
        state = self.state(sum(map(len, prompts)) + len(prompts) * (new + 1), len(prompts), exact=True)
        tokens = []
        for i, prompt in enumerate(prompts):
            tokens.append(self.read(state, [(token, t, i, t == len(prompt) - 1) for t, token in enumerate(prompt)]))
        for step in range(new - 1):
            rows = [(made[-1], len(prompts[i]) + step, i, True) for i, made in enumerate(tokens)]
            for made, token in zip(tokens, self.read(state, rows)):
                made.append(token)
        self.c.llama_free(state)
        return tokens

    def speed(self, length: int) -> float:
        """Tokens a second after so many."""
        state = self.state(length + 2 * MEASURED, 1, exact=False)
        for start in range(0, length, STEP):
            self.read(state, [(1, t, 0, False) for t in range(start, min(start + STEP, length))])
        positions = iter(range(length, length + 2 * MEASURED))
        found = measured(lambda: self.read(state, [(1, next(positions), 0, True)]))
        self.c.llama_free(state)
        return found


def llama_cpp(request: dict) -> dict:
    """All that is asked, of llama.cpp."""
    engine = LlamaCpp(request["model"])
    return {
        "version": engine.c.__version__,
        "tokens": engine.greedy(request["prompts"], request["new"]),
        "speed": {length: engine.speed(length) for length in request["contexts"]},
    }


def mlx(request: dict) -> dict:
    """mlx-lm, one prompt after the other."""
    from importlib.metadata import version
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(request["model"]), trust_remote_code=True)  # Qwen3.5 has a file of Python for mlx-lm

    def read(cache, tokens: list[int]) -> int:
        return int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]))

    made = []
    for prompt in request["prompts"]:
        cache = make_prompt_cache(model)
        row = [read(cache, prompt)]
        while len(row) < request["new"]:
            row.append(read(cache, row[-1:]))
        made.append(row)
    speed = {}
    for length in request["contexts"]:
        cache = make_prompt_cache(model)
        for start in range(0, length, STEP):
            read(cache, [1] * min(STEP, length - start))
        speed[length] = measured(partial(read, cache, [1]))
    return {"version": version("mlx-lm"), "tokens": made, "speed": speed}


def vllm(request: dict) -> dict:
    """vLLM in this process, all prompts at once."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1"}
    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # speed beyond a teacher's positions is asked for, too
    from vllm import LLM, SamplingParams, __version__

    longest = max(*request["contexts"], *map(len, request["prompts"]), 0) + max(request["new"], 2 * MEASURED)
    options = {
        "max_num_batched_tokens": STEP,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    options |= {"dtype": request["dtype"], "max_model_len": longest, "skip_tokenizer_init": True}
    llm = LLM(request["model"], **options)
    writing = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    answers = llm.generate(prompts, SamplingParams(max_tokens=request["new"], **writing), use_tqdm=False)
    speed, engine = {}, llm.llm_engine
    for length in request["contexts"]:
        sampling = SamplingParams(max_tokens=2 * MEASURED, **writing)
        engine.add_request(str(length), {"prompt_token_ids": [1] * length}, sampling)
        while not any(output.outputs for output in engine.step()):  # until all of the context is read
            pass
        speed[length] = measured(engine.step)
        engine.abort_request([str(length)])
        engine.step()
    return {
        "version": __version__,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "speed": speed,
    }


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
