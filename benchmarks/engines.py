"""The same model in several engines: greedy tokens against ours, and tokens a second, for students and their teacher.

    make engines                              # builds llama.cpp, mlx-lm and vLLM in .engines, then all below
    python benchmarks/engines.py --teacher FOLDER --student FOLDER ...     # models of your own

Without folders the models are random, of the width of SmolLM2-135M: a Llama, and its students. Gated DeltaNet runs as
Qwen3.5, pure or with every fourth layer kept (and pinned norms), Mamba-2 as Granite; vLLM runs each also as it is, by
our plugin, and so GLA and Gated DeltaNet's preset too, which no export covers. Weights are in float32, in which vLLM's
build for the CPU has no Qwen3.5: its kernel takes bfloat16 alone. vLLM reads 512 tokens a step, of all prompts at once,
and the longest in chunks. Tokens a second are of one thread's CPU time, after reading contexts of that length.
Writes benchmarks/results/engines.{json,png}.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import gguf
import matplotlib.pyplot as plt
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_memory import export_model
from hf_memory.conversion import carry_over, make_student
from hf_memory.export import find_target

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RUNNER = HERE / "engine_runner.py"
PACKAGES = {  # of each engine's environment; llama-cpp-python is compiled, in ten minutes; vLLM is 2 GB
    "llama.cpp": ["--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"],
    "MLX": ["mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2"],
    "vLLM": ["--no-deps", "--requirement", str(HERE / "vllm.txt"), "--editable", str(HERE.parent)],
}
CONTEXTS = (1024, 8192, 32768)
LENGTHS = (1, 3, 17, 64, 200, 350, 700)  # of random prompts
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a snake who",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "Three reasons to learn a language:\n1.",
)
GATED_DELTANET = {"gate": "scalar", "output_gate": "silu", "memory_rope": False}
STUDENTS = {  # the family, whether every fourth layer is kept, and options
    "Gated DeltaNet, pure": ("deltanet", False, GATED_DELTANET),
    "Gated DeltaNet": ("deltanet", True, GATED_DELTANET),
    "Mamba-2": ("gated", True, {"gate": "mamba2", "memory_rope": False}),
    "GLA, preset": ("gated", False, {}),
    "Gated DeltaNet, preset": ("deltanet", True, {"gate": "scalar"}),
}


def random_models(layers: int) -> dict[str, PreTrainedModel]:
    """A Llama and its students, untrained."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = LlamaConfig(**sizes, vocab_size=8192, num_hidden_layers=layers, max_position_embeddings=65536)
    config.initializer_range = 0.05  # so that greedy tokens are not all the same
    models: dict[str, PreTrainedModel] = {"teacher": LlamaForCausalLM(config).eval()}
    for name, (to, keeps, options) in STUDENTS.items():
        models[name] = make_student(models["teacher"], to, keep=range(3, layers, 4) if keeps else (), **options)
        carry_over(models[name], models["teacher"])
    return models


def greedy(model: PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What transformers writes after each prompt."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = model.config.vocab_size  # never: engines go on, too
    rows = (model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts)
    return [row.tolist() for row in rows]


def write_llama(model: PreTrainedModel, file: Path) -> None:
    """A teacher as GGUF, for llama.cpp; without tokenizer."""
    config, kind = model.config, gguf.MODEL_ARCH.LLAMA
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
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, count in heads.items():
            if part in name:
                x = x.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), x.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files_of(model: PreTrainedModel, folder: Path) -> dict[str, Path]:
    """What each engine that has the model reads."""
    if model.config.model_type == "llama":
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        flat = {"rope_theta": config["rope_parameters"]["rope_theta"]}  # where mlx-lm looks for it
        (folder / "config.json").write_text(json.dumps(config | flat))
        write_llama(model, folder / "model.gguf")
        return {"transformers": folder, "llama.cpp": folder / "model.gguf", "MLX": folder, "vLLM": folder}
    own = folder.with_name("own")
    model.save_pretrained(own)
    found: dict[str, Path | None] = {"vLLM by our plugin": own}
    try:
        target = find_target(model.config)
    except ValueError:  # no engine has it as an architecture
        return found
    faults = target.engines(model.config)
    file = folder.with_suffix(".gguf") if not faults["llama.cpp"] else None
    export_model(model, folder, gguf=file)
    found |= {"transformers": folder, "llama.cpp": file, "MLX": None if faults["MLX"] else folder}
    found["vLLM"] = folder if target.name == "granite" else None
    return {name: path for name, path in found.items() if path}


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
    """An environment for each engine that has none yet."""
    for engine, packages in PACKAGES.items():
        if not (environments / engine).exists():
            venv.create(environments / engine, with_pip=True)
            pip = [environments / engine / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(pip, check=True, env={**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"})


def measure(name: str, model: PreTrainedModel, prompts, new: int, contexts, environments: Path) -> Iterator[dict]:
    """One row for each engine."""
    expected = greedy(model, prompts, new)
    with tempfile.TemporaryDirectory() as work:
        for engine, path in files_of(model, Path(work) / "model").items():
            if engine == "transformers":
                found = greedy(AutoModelForCausalLM.from_pretrained(path), prompts, new)
                answer = {"version": transformers.__version__, "tokens": found, "speed": {}}
            else:
                program = next(name for name in PACKAGES if engine.startswith(name))
                if not (environments / program).exists():
                    continue
                request = {"model": str(path), "prompts": prompts, "new": new, "contexts": contexts}
                answer = run(program, environments / program, request)
            same = sum(a == b for xs, ys in zip(expected, answer.pop("tokens")) for a, b in zip(xs, ys))
            speed = "  ".join(f"{length}: {x:.1f}" for length, x in answer["speed"].items())
            print(f"{name:22} {engine:29} same tokens {same}/{new * len(prompts)}  tokens/s {speed}", flush=True)
            yield {"model": name, "engine": engine, "same": same, "of": new * len(prompts), **answer}


def draw(rows: list[dict], file: Path) -> None:
    """Tokens a second over the context, a picture an engine."""
    engines = list(dict.fromkeys(row["engine"] for row in rows if row["speed"]))
    figure, axes = plt.subplots(1, len(engines), figsize=(4.5 * len(engines), 3.4), layout="constrained", squeeze=False)
    for axis, engine in zip(axes[0], engines):
        for row in (row for row in rows if row["engine"] == engine):
            style = "--" if row["model"] == "teacher" else "-"
            axis.plot(
                [int(n) for n in row["speed"]], list(row["speed"].values()), style, marker="o", label=row["model"]
            )
        axis.set(xscale="log", title=engine, xlabel="context, tokens", ylabel="tokens/s, one thread", ylim=(0, None))
        lengths = sorted({int(n) for row in rows for n in row["speed"]})
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Build what is missing, measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", help="folder; default: random models")
    parser.add_argument("--student", action="append", default=[], help="folder; may be repeated")
    parser.add_argument("--environments", type=Path, default=Path(".engines"), help="folder of the engines")
    parser.add_argument("--build", action="store_true", help="build the engines that are not there")
    parser.add_argument("--layers", type=int, default=8, help="of random models")
    parser.add_argument("--new", type=int, default=24, help="tokens after each prompt")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.environments)
    torch.set_num_threads(1)
    if arguments.teacher or arguments.student:
        folders = {"teacher": arguments.teacher} if arguments.teacher else {}
        folders |= {Path(folder).name: folder for folder in arguments.student}
        models = {name: AutoModelForCausalLM.from_pretrained(folder).float() for name, folder in folders.items()}
        tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))
        prompts = [tokenizer(text).input_ids for text in TEXTS]
    else:
        models = random_models(arguments.layers)
        prompts = [torch.randint(3, 8192, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
    sizes = {name: model.num_parameters() for name, model in models.items()}
    results = {**machine, "dtype": "float32", "threads": 1, "parameters": sizes, "prompts": len(prompts), "rows": []}
    RESULTS.mkdir(exist_ok=True)
    for name, model in models.items():
        for row in measure(name, model.eval(), prompts, arguments.new, arguments.contexts, arguments.environments):
            results["rows"].append(row)
            (RESULTS / "engines.json").write_text(json.dumps(results, indent=1) + "\n")
    if arguments.contexts:
        draw(results["rows"], RESULTS / "engines.png")


if __name__ == "__main__":
    main()
