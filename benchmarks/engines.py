"""The same model in several engines: greedy tokens against ours, speed and cache, for students and their teacher.

    make engines                              # installs llama.cpp, mlx-lm and vLLM in .engines, then both tables below
    python benchmarks/engines.py --build      # the same, from an environment that has hf_memory[test]
    python benchmarks/engines.py --teacher FOLDER --student FOLDER ...     # models of your own: a third table

Without folders the models are random. The first table has small ones: each target of an export in each engine that has
it, and each model that vLLM runs by our plugin. The second has a Llama of the width of SmolLM2-135M and students of it,
and counts tokens a second of one thread's CPU time at the end of contexts of some lengths, and bytes of the engine's
cache. Gated DeltaNet runs as Qwen3.5 (with pinned norms where the teacher has no q/k norm), Mamba-2 as Granite. vLLM
reads 512 tokens a step, of all prompts at once, and the longest in chunks; its build for the CPU has Qwen3.5 in
bfloat16 alone (`--dtype bfloat16`), where tokens need not agree. Models that keep nothing but keys and values run there
compiled. They and what our plugin runs have prefix caching: of the last prompts one begins as the longest one, and one
goes on after it. With `--caches` engines have keys and values in few bits (`q8_0` and `q4_0` of llama.cpp with flash
attention, `fp8` of vLLM), where tokens need not agree either: the KL is that of ours from the engine's predictions of
each token that it wrote, over its likeliest tokens and the rest. Writes benchmarks/results/engines.json; rows of other
models, engines and tables stay.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hf_memory import export_model
from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student
from hf_memory.evaluation import cache_bytes
from hf_memory.export import NotExportable, find_target
from hf_memory.export.gguf import LAYOUTS, _add_tokens
from hf_memory.integrations.vllm.placement import memory_layers

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCUMENTS = HERE.parent / "docs"
RUNNER = HERE / "engine_runner.py"
FROZEN = HERE / "vllm.txt"
TORCH = next(line for line in FROZEN.read_text().split() if line.startswith("torch=="))
INSTALLED = {  # what pip installs into each engine's environment, call by call
    "llama.cpp": [["xllamacpp==2026.10.11549"]],
    "MLX": [["mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2"]],
    "vLLM": [  # 3 GB
        ["--no-deps", "--extra-index-url=https://download.pytorch.org/whl/cpu", TORCH],
        ["--no-deps", f"--requirement={FROZEN}", f"--editable={HERE.parent}"],
    ],
}
CACHES = {  # the types of numbers that a cache can have, by engine; exact: those of the model
    "llama.cpp": ("exact", "q8_0", "q4_0"),
    "vLLM": ("exact", "fp8"),
}
CONTEXTS = (1024, 8192)
LONGEST = {"MLX": 1024}  # on the CPU mlx-lm reads a gated delta rule token by token
LENGTHS = (1, 3, 17, 64, 200, 350, 700)  # of random prompts
LONG = 4096  # tokens of the longest prompt of the other tables
PROMPTS = ("prompts", "again")
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a snake who",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "Three reasons to learn a language:\n1.",
)
GATED_DELTANET = {"gate": "scalar", "output_gate": "silu", "memory_rope": False}
SINKS = {"sliding_window": 192, "num_sink_tokens": 0, "attention_sinks": True}
STUDENTS = {  # the family, whether every fourth layer is kept, and options
    "heads": ("attention", False, {"full_attention_heads": [[1], [], [], []], **SINKS}),
    "layers": ("attention", True, SINKS),
    "Gated DeltaNet, pure": ("deltanet", False, GATED_DELTANET),
    "Gated DeltaNet": ("deltanet", True, GATED_DELTANET),
    "Mamba-2": ("gated", True, {"gate": "mamba2", "memory_rope": False}),
    "GLA, preset": ("gated", False, {}),
    "Gated DeltaNet, preset": ("deltanet", True, {"gate": "scalar"}),
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,  # so that greedy tokens are not all the same
    "pad_token_id": 0,
}
IN_VLLM = ("granite", "granite_swa", "mamba2")  # targets that its build for the CPU has in float32
HYBRID = {"layer_types": ["memory", "memory", "memory", "full_attention"]}
WINDOWS = {"layer_types": ["sliding_heads"] * 4, "sliding_window": 64, "attention_sinks": True}
SQUARE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


class Small(NamedTuple):
    """A small model of each kind: what an export covers, then what vLLM runs by our plugin alone."""

    family: str
    options: dict
    target: str = "auto"


FULL = {"full_attention_heads": [[1], [], [0, 1], [0]]}
FIRST = {"sliding_window": 32, "num_sink_tokens": 4}
WINDOW = {"layer_types": ["sliding_memory"] * 4, **FIRST}
KEPT = {
    "layer_types": ["sliding_heads"] * 4,
    "num_kept_tokens": [20, 8, 20, 40],
    "kept_block_size": 16,
}
SUNK = {"sliding_window": 32, "num_sink_tokens": 0, "attention_sinks": True}
BY_HEAD = {"num_kept_tokens": [[20, 8], [8, 0], [0, 40], [20, 20]]}
KINDS = {
    "Gated DeltaNet": Small("deltanet", {**GATED_DELTANET, **SQUARE}),
    "Gated DeltaNet, attention": Small("deltanet", {**GATED_DELTANET, **SQUARE, **HYBRID}),
    "Gated DeltaNet, attention with q/k norm": Small(
        "deltanet",
        {**GATED_DELTANET, **SQUARE, **HYBRID, "use_qk_norm": True, "memory_qk_norm": False},
    ),
    "DeltaNet": Small("deltanet", {"output_gate": "silu", **SQUARE}),
    "DeltaNet, negative eigenvalues": Small(
        "deltanet",
        {
            "output_gate": "silu",
            "allow_negative_eigenvalues": True,
            "output_norm_eps": 1e-5,
            **SQUARE,
        },
    ),
    "KDA": Small("deltanet", {"gate": "vector", **SQUARE}),
    "KDA, low-rank gate": Small(
        "deltanet", {"gate": "vector", "output_gate_low_rank_dim": 16, **SQUARE}, "kimi"
    ),
    "Mamba-2": Small("gated", {"gate": "mamba2"}),
    "Mamba-2, attention": Small(
        "gated", {"gate": "mamba2", "linear_num_value_heads": 2, **SQUARE, **HYBRID}
    ),
    "Mamba-2, no MLP": Small("gated", {"gate": "mamba2", "intermediate_size": 0}),
    "Linear Transformer": Small("linear", {}),
    "retention": Small("gated", {"gate": "retention"}),
    "GLA": Small("gated", {}),
    "GLA, attention": Small("gated", HYBRID),
    "Gated DeltaNet, preset": Small("deltanet", {"gate": "scalar", "memory_rope": True}),
    "RWKV-7": Small("rwkv7", {}),
    "RWKV-7, attention": Small("rwkv7", HYBRID),
    "Titans LMM": Small("titans", {"variant": "lmm"}),
    "Titans MAG": Small("titans", {"variant": "mag", "sliding_window": 64}),
    "Titans MAL": Small("titans", {"variant": "mal", "sliding_window": 64}),
    "Titans MAC": Small("titans", {"variant": "mac", "segment_length": 64}),
    "windows and full heads": Small("transformer", {**WINDOWS, **FULL}),
    "windows, first tokens and full heads": Small(
        "transformer", {"layer_types": ["sliding_heads"] * 4, **FIRST, **FULL}
    ),
    "kept tokens and full heads": Small("transformer", {**KEPT, **FIRST, **FULL}),
    "kept tokens, sinks and full heads": Small("transformer", {**KEPT, **SUNK, **FULL}),
    "kept tokens of each head": Small("transformer", {**KEPT, **FIRST, **BY_HEAD}),
    "kept tokens of each head in 8 bits": Small(
        "transformer", {**KEPT, **FIRST, **BY_HEAD, "cache_bits": {"window": 8}}
    ),
    "kept tokens in 8 bits": Small(
        "transformer",
        {**KEPT, **FIRST, "cache_bits": {"window": 8}, "eviction": "change_of_output"},
    ),
    "kept tokens and full heads of 128 tokens": Small(
        "transformer", {**KEPT, **FIRST, **FULL, "full_attention_window": 128}
    ),
    "windows and first tokens with forget gates": Small(
        "transformer", {"layer_types": ["sliding_heads"] * 4, **FIRST, "position": "forget"}
    ),
    "windows and a full layer": Small(
        "transformer", {**WINDOWS, "layer_types": ["sliding_heads"] * 3 + ["full_attention"]}
    ),
    "a memory beside a window": Small("deltanet", {"gate": "scalar", **WINDOW}),
    "a memory beside a window and full heads": Small(
        "deltanet", {"gate": "scalar", **WINDOW, **FULL}
    ),
}


def small_models() -> dict[str, PreTrainedModel]:
    """One of each kind, with every weight random."""
    models = {}
    for name, (family, options, _) in KINDS.items():
        torch.manual_seed(0)
        models[name] = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(f"hf_memory_{family}", **{**SMALL, **options})
        )
        for parameter in models[name].parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return models


def random_models(layers: int) -> dict[str, PreTrainedModel]:
    """A Llama and its students, untrained."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    }
    config = LlamaConfig(
        **sizes, vocab_size=8192, num_hidden_layers=layers, max_position_embeddings=65536
    )
    config.initializer_range = 0.05  # so that greedy tokens are not all the same
    models: dict[str, PreTrainedModel] = {"teacher": LlamaForCausalLM(config).eval()}
    for name, (to, keeps, options) in STUDENTS.items():
        models[name] = make_student(
            models["teacher"], to, keep=range(3, layers, 4) if keeps else (), **options
        )
        carry_over(models[name], models["teacher"])
    return models


def greedy(model: PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What transformers writes after each prompt."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = model.config.vocab_size  # never: engines go on, too
    rows = (
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts
    )
    return [row.tolist() for row in rows]


def with_adapter(model: PreTrainedModel) -> PeftModel:
    """A model with a random LoRA adapter of all linear layers that vLLM divides."""
    kinds = ("colwise", "rowwise")
    divided = {name.rpartition(".")[2] for name, x in model.tp_plan.items() if x in kinds}
    linear = {n.rpartition(".")[2] for n, x in model.named_modules() if type(x) is torch.nn.Linear}
    torch.manual_seed(0)
    options = {"r": 8, "target_modules": sorted(divided & linear), "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**options)).eval()


@torch.no_grad()
def divergence(
    model: PreTrainedModel, prompt: list[int], written: list[int], likeliest: list[dict]
) -> list[float]:
    """KL of the model's predictions from an engine's at each token written, over its likeliest tokens and the rest.

    Args:
        model: predicts what follows the prompt and the tokens before.
        prompt: tokens that both have read.
        written: tokens that the engine wrote.
        likeliest: for each of them log-probabilities of some tokens, by the number of the token.
    """
    tokens = torch.tensor([prompt + written[:-1]])
    logits = model(tokens, logits_to_keep=len(written)).logits[0].double()
    found = []
    for expected, given in zip(logits.log_softmax(-1), likeliest, strict=True):
        log_p = expected[[int(token) for token in given]]
        log_q = torch.tensor([*given.values()], dtype=torch.double)
        p, q = (torch.cat([x.exp(), (1 - x.exp().sum())[None]]) for x in (log_p, log_q))
        p, q = (x.clamp(min=1e-9) for x in (p, q))
        found.append(float((p * (p / q).log()).sum()))
    return found


def write_llama(model: PreTrainedModel, file: Path) -> None:
    """A teacher as GGUF, for llama.cpp, with the tokenizer beside it."""
    config = model.config
    kind = gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokens(writer, file.parent, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, count in heads.items():
            if part in name:
                x = x.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), x.float().contiguous().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def some_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """One of so many words, since the server of llama.cpp wants a tokenizer."""
    letters = sorted(
        filter(str.isascii, ByteLevel.alphabet())
    )  # the server drops what is a part of a letter
    names = [*letters, letters[0] + letters[1], *(f"<{i}>" for i in range(len(letters) + 1, words))]
    tokenizer = Tokenizer(
        BPE({name: i for i, name in enumerate(names)}, [(letters[0], letters[1])])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=names[-1]
    )  # else GGUF's default, a usual word


def files_of(model: PreTrainedModel, tokenizer, folder: Path, target: str) -> dict[str, Path]:
    """What each engine that has the model reads."""
    if model.config.model_type == "llama":
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        flat = {"rope_theta": config["rope_parameters"]["rope_theta"]}  # where mlx-lm looks for it
        (folder / "config.json").write_text(json.dumps(config | flat))
        write_llama(model, folder / "model.gguf")
        return {
            "transformers": folder,
            "llama.cpp": folder / "model.gguf",
            "MLX": folder,
            "vLLM": folder,
        }
    own = folder.with_name("own")
    model.save_pretrained(own)
    tokenizer.save_pretrained(own)
    found = {"vLLM by our plugin": own}
    with contextlib.suppress(NotExportable):
        found |= exported(model, own, folder, target)
    return found


def exported(model: PreTrainedModel, own: Path, folder: Path, target: str) -> dict[str, Path]:
    """The same of what an export of the model in `own` writes."""
    found = find_target(model.config, target)
    faults = found.engines(model.config)
    file = folder.with_suffix(".gguf")
    written = found.name in LAYOUTS and not faults["llama.cpp"]
    export_model(own, folder, found.name, gguf=file if written else None)
    engines = {"transformers": folder} | ({"llama.cpp": file} if written else {})
    engines |= {"MLX": folder} if faults.get("MLX", "not there") == "" else {}
    return engines | (
        {"vLLM": folder} if found.name in IN_VLLM or model.dtype == torch.bfloat16 else {}
    )


def run(engine: str, environment: Path, request: dict) -> dict:
    """One model in one engine."""
    done = subprocess.run(
        [environment / "bin" / "python", RUNNER],
        input=json.dumps({"engine": engine, **request}),
        env={**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{engine} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def build(environments: Path) -> None:
    """An environment for each engine, as it is where it was built before from the same packages."""
    for engine, calls in INSTALLED.items():
        folder = environments / engine
        mark = environments / engine / "installed.json"
        if mark.exists() and json.loads(mark.read_text()) == calls:
            print(f"{engine}: {folder} is there", flush=True)
            continue
        print(f"{engine}: building {folder}", flush=True)
        start = time.time()
        venv.create(folder, with_pip=True)
        for packages in calls:
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(pip, check=True)
        mark.write_text(json.dumps(calls))
        print(f"{engine}: built in {time.time() - start:.0f} s", flush=True)


def measure(
    model: PreTrainedModel, tokenizer, target: str, request: dict, environments: dict[str, Path]
) -> Iterator[dict]:
    """One row for each engine that is there."""
    config = model.config
    new = request["new"]
    contexts = request["contexts"]
    prompts = [*request["prompts"], *request["again"]]
    expected = greedy(model, prompts, new)
    is_attention = config.model_type == "llama" or not memory_layers(config)
    with tempfile.TemporaryDirectory() as work:
        files = files_of(model, tokenizer, Path(work) / "model", target)
        if request["adapter"]:
            model = with_adapter(model)
            expected = greedy(model, prompts, new)
            request = {**request, "adapter": str(Path(work) / "adapter"), "contexts": []}
            model.save_pretrained(request["adapter"])
            files = {engine: path for engine, path in files.items() if engine.startswith("vLLM")}
            contexts = []
        for engine, path in files.items():
            program = engine.partition(" by ")[0]
            if program not in environments or request["cache"] not in CACHES.get(
                program, ("exact",)
            ):
                continue
            if program == "transformers":
                again = AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype)
                answer = {
                    "version": transformers.__version__,
                    "tokens": greedy(again, prompts, new),
                }
                answer |= {"speed": {}, "bytes": {}}
            else:
                most = LONGEST.get(program, math.inf)
                asked = {"contexts": [n for n in contexts if n <= most], "model": str(path)}
                asked["caches_prefixes"] = is_attention or engine.endswith("by our plugin")
                asked |= {
                    name: [prompt for prompt in request[name] if len(prompt) <= most]
                    for name in PROMPTS
                }
                answer = run(program, environments[program], {**request, **asked})
            read = [
                (prompt, row)
                for prompt, row in zip(prompts, expected)
                if len(prompt) <= LONGEST.get(program, math.inf)
            ]
            rows = [row for _, row in read]
            tokens = answer.pop("tokens")
            if likeliest := answer.pop("likeliest", []):
                texts = ((prompt, *row) for (prompt, _), *row in zip(read, tokens, likeliest))
                kl = [x for text in texts for x in divergence(model, *text)]
                answer["kl"] = sum(kl) / len(kl)
            if (
                program == "llama.cpp" and tokenizer is not None
            ):  # told to go on, it never writes the end of a text
                end = tokenizer.eos_token_id
                rows = [row[: row.index(end)] if end in row else row for row in rows]
            same = sum(
                a == b for ours, row in zip(rows, tokens, strict=True) for a, b in zip(ours, row)
            )
            card = {length: cache_bytes(config, int(length)) for length in answer.get("bytes", {})}
            yield {
                "engine": engine,
                "same": same,
                "of": sum(map(len, rows)),
                **answer,
                "card": card,
            }


def described(row: dict) -> str:
    """A row in a line."""
    speed = "  ".join(f"{length}: {x:.1f}" for length, x in row["speed"].items())
    cache = "  ".join(
        f"{length}: {x / 1e6:.1f} of {row['card'][length] / 1e6:.1f}"
        for length, x in row["bytes"].items()
    )
    kl = f"{row['kl']:.5f}" if "kl" in row else ""
    parts = {
        "KL": kl,
        "tokens/s": speed,
        "cache, MB": cache,
        "read before": str(row.get("cached") or ""),
    }
    counted = "".join(f"  {name} {text}" for name, text in parts.items() if text)
    return f"{row['model']:40} {row['engine']:20} {row['cache']:5} same tokens {row['same']}/{row['of']}{counted}"


def keep(table: str, row: dict) -> None:
    """Write a row into the results, in place of one of the same model, engine and precisions."""
    file = RESULTS / "engines.json"
    tables = json.loads(file.read_text()) if file.exists() else {}
    key = ("model", "engine", "dtype", "cache")
    others = [
        other
        for other in tables.get(table, [])
        if any({"cache": "exact", **other}[name] != row[name] for name in key)
    ]
    tables[table] = [*others, row]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(tables, indent=1) + "\n")
    partial.replace(file)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", help="folder or GGUF file; default: random models")
    parser.add_argument(
        "--student", type=Path, action="append", default=[], help="folder; may be repeated"
    )
    parser.add_argument(
        "--tables", nargs="*", default=["small", "random"], choices=["small", "random"]
    )
    parser.add_argument("--models", nargs="*", help="rows of these tables; default: all")
    parser.add_argument(
        "--environments", type=Path, default=Path(".engines"), help="folder of the engines"
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="build the engines that are not there, with pip: it takes the indexes and wheels that PIP_INDEX_URL, "
        "PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS name, and for vLLM's torch also https://download.pytorch.org/whl/cpu",
    )
    parser.add_argument(
        "--engines",
        nargs="*",
        default=["transformers", *INSTALLED],
        choices=["transformers", *INSTALLED],
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of all models"
    )
    parser.add_argument(
        "--caches",
        nargs="*",
        default=["exact"],
        choices=sorted({name for names in CACHES.values() for name in names}),
        help="numbers of keys and values in the engines that have them",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="give each model a random LoRA adapter, in vLLM alone",
    )
    parser.add_argument("--layers", type=int, default=4, help="of random models of SmolLM2's width")
    parser.add_argument("--new", type=int, default=24, help="tokens after each prompt")
    parser.add_argument("--prompts", type=int, help="how many; default: all")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    return parser.parse_args()


class Table(NamedTuple):
    """Models that read the same prompts."""

    name: str
    models: dict[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]  # the longest is the last one
    contexts: list[int]  # after which models are timed


def tables_of(arguments: argparse.Namespace) -> Iterator[Table]:
    """The tables that are asked for."""
    if arguments.teacher or arguments.student:
        models = {"teacher": load_teacher(arguments.teacher)} if arguments.teacher else {}
        models |= {
            name_of(folder): AutoModelForCausalLM.from_pretrained(folder)
            for folder in arguments.student
        }
        tokenizer = load_tokenizer(arguments.teacher or arguments.student[0])
        texts = [*TEXTS, "".join(map(Path.read_text, sorted(DOCUMENTS.glob("*.md"))))]
        prompts = [tokenizer(text).input_ids[:LONG] for text in texts]
        yield Table("real", models, tokenizer, prompts, arguments.contexts)
        return
    for table in arguments.tables:
        models = small_models() if table == "small" else random_models(arguments.layers)
        words = next(iter(models.values())).config.vocab_size
        lengths, contexts = (
            (LENGTHS, []) if table == "small" else ((*LENGTHS, LONG), arguments.contexts)
        )
        yield Table(
            table,
            models,
            some_tokenizer(words),
            [random_prompt(n, words) for n in lengths],
            contexts,
        )


def name_of(student: Path) -> str:
    """The name of the folder, or of the folder that it is the student in."""
    return student.parent.name if student.name == "student" else student.name


def random_prompt(length: int, words: int) -> list[int]:
    """A prompt of any tokens but the first three."""
    return torch.randint(
        3, words, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def main() -> None:
    """Build what is missing, measure, print, draw and write."""
    arguments = parse()
    if arguments.build:
        build(arguments.environments)
    torch.set_num_threads(1)
    environments = {name: arguments.environments / name for name in arguments.engines}
    environments = {
        name: x for name, x in environments.items() if name == "transformers" or x.exists()
    }
    RESULTS.mkdir(exist_ok=True)
    about = {
        "dtype": arguments.dtype,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
    }
    about["command"] = shlex.join(["python", "benchmarks/engines.py", *sys.argv[1:]])
    for table in tables_of(arguments):
        longest = table.prompts[-1]
        request = {
            "prompts": table.prompts[: arguments.prompts],
            "again": [[*longest[: len(longest) // 2], 5, 6, 7], [*longest, 5, 6, 7]],
        }
        request |= {"new": arguments.new, "contexts": table.contexts, "dtype": arguments.dtype}
        request["adapter"] = arguments.adapter
        for name, model in table.models.items():
            if arguments.models and name not in arguments.models:
                continue
            target = KINDS[name].target if table.name == "small" else "auto"
            model = model.eval().to(getattr(torch, arguments.dtype))
            about["parameters"] = model.num_parameters()
            for cache in arguments.caches:
                asked = {**request, "cache": cache}
                for row in measure(model, table.tokenizer, target, asked, environments):
                    label = f"{name}, LoRA adapter" if arguments.adapter else name
                    row = {"model": label, "cache": cache, **row, **about}
                    keep(table.name, row)
                    print(described(row), flush=True)


if __name__ == "__main__":
    main()
