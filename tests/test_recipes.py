"""The recipes: run files that fit their teachers, the arithmetic of their cost, and a launch as it is documented."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

import hf_memory_cli
from cases import WORDS, word_tokenizer
from hf_memory import conversion
from hf_memory.cli.options import read_pairs

RECIPES = Path(__file__).parents[1] / "recipes"
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    RECIPES / "fsdp2.yaml",
]
SCRIPT = Path(__file__).with_name("distributed_conversion.py")
SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
}


@pytest.fixture
def tokenizer():
    """That of the words of `text`."""
    return word_tokenizer(WORDS, eos_token="end", unk_token="end")


TEACHERS = {
    name: AutoConfig.for_model(**sizes)
    for name, sizes in json.loads((RECIPES / "teachers.json").read_text()).items()
}
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
GEMMA3 = Gemma3TextConfig(
    vocab_size=262144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    sliding_window=512,
    layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
)


@pytest.mark.parametrize(
    ("name", "teacher", "stages"),
    [(name, teacher, (8_192_000,)) for name, teacher in TEACHERS.items()]
    + [
        ("smollm2", SMOLLM2, (40_960,)),
        ("smollm2-small", SMOLLM2, (40_960,)),
        ("smollm2-smallest", SMOLLM2, (40_960,)),
        ("smollm2-constant", SMOLLM2, (40_960,)),
        ("smollm2-slots", SMOLLM2, (12_288, 40_960)),
    ]
    + [
        ("smollm2-7-layers", SMOLLM2, (24_576, 122_880)),
        ("smollm2-4-layers", SMOLLM2, (24_576, 36_864)),
    ]
    + [("gemma3", GEMMA3, ())],
)
def test_a_recipe_fits_its_teacher(
    name, teacher, stages, tokenizer, text, tmp_path, monkeypatch, capsys
):
    for x in (teacher, tokenizer):
        x.save_pretrained(tmp_path)
    recipe = [
        "--config",
        RECIPES / f"{name}.yaml",
        "--text",
        text,
        "--output",
        tmp_path / "student",
    ]
    monkeypatch.setattr(
        sys, "argv", ["hf-memory", "convert", str(tmp_path), *map(str, recipe), "--dry-run"]
    )
    files = []
    dry_run = conversion.dry_run

    def planned(request, **how):
        plan = dry_run(request, **how)
        files.append(request.extra_files(plan))
        return plan

    monkeypatch.setattr(conversion, "dry_run", planned)
    with pytest.raises(SystemExit) as exit_:
        hf_memory_cli.app()
    printed, error = (" ".join(x.split()) for x in capsys.readouterr())
    assert (exit_.value.code or 0) == 0
    assert error == ""
    assert [tokens for tokens in stages if f"{tokens:,} tokens" not in printed] == []
    (of_run,) = files
    repeated = read_pairs(yaml.safe_load(of_run["run.yaml"])["option"])
    given = yaml.safe_load((RECIPES / f"{name}.yaml").read_text()).get("option", {})
    assert {key: repeated[key] for key in given} == given


def test_the_page_has_the_recipes_and_says_what_was_not_run():
    page = (RECIPES / "README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name in TEACHERS:
        assert any(f"| `{name}.yaml` |" in row and row.endswith("% |") for row in rows), name
        assert (RECIPES / f"{name}.yaml").read_text().startswith("# Not run to the end yet.")
    assert "not been run to the end" in page.partition("##")[0]


@pytest.mark.slow
def test_the_launch_writes_and_prints_once(tokenizer, text, tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0)
    for x in (Qwen3ForCausalLM(config), tokenizer):
        x.save_pretrained(tmp_path / "teacher")
    flags = {"text": text, "output": tmp_path / "student", "checkpoints": tmp_path / "checkpoints"}
    flags |= {"to": "deltanet", "keep": "none", "items": 0}
    sizes = dict.fromkeys(("transfer", "distillation"), "steps=2,batch_size=4,length=32")
    command = [*LAUNCH, "--num_processes", "2", SCRIPT, "convert", tmp_path / "teacher"]
    command += [x for name, value in (flags | sizes).items() for x in (f"--{name}", value)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Wrote") == done.stdout.count("2/2") // 2 == 1
    assert (tmp_path / "student" / "model.safetensors").exists()
    assert (
        tmp_path / "checkpoints" / "distillation" / "checkpoint-2" / "pytorch_model_fsdp_0"
    ).is_dir()
