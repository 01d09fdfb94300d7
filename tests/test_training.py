"""Training with the tools people use: Trainer, peft, TRL."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from cases import (
    CASES,
    FIRST_OF_FAMILY,
    every_case,
    every_family,
    generate,
    make_model,
    random_tokens,
    usually,
)
from comparing import assert_close
from hf_memory.conversion import Schedule, train
from hf_memory.files.manual import sections

ARGUMENTS = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


def lora(model):
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@every_family
def test_every_adapter_matrix_gets_a_gradient(case):
    model = lora(make_model(case)).train()
    tokens = random_tokens(2, 9)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)  # at their start of zero, A gets no gradient
    model(tokens, labels=tokens).loss.backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    linears = [
        m
        for name, m in make_model(case).named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    ]
    assert len(adapters) == 2 * len(linears)
    assert not [
        name for name, p in adapters.items() if p.grad is None or not p.grad.abs().sum() > 0
    ]


@every_case
@torch.no_grad()
def test_a_merged_adapter_is_the_same_model(case):
    model = lora(make_model(case).double())
    tokens = random_tokens(1, 12)
    plain = model(tokens).logits
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    adapted = model(tokens).logits
    assert not torch.allclose(adapted, plain, atol=1e-2)
    assert_close(model.merge_and_unload()(tokens).logits, adapted)


@every_family
def test_lora_has_targets_where_none_are_named(case):
    adapted = get_peft_model(make_model(case), LoraConfig(task_type="CAUSAL_LM"))
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_adapter_is_made_without_warnings(recwarn):
    get_peft_model(make_model(CASES[0]), LoraConfig(task_type="CAUSAL_LM"))
    assert [str(x.message) for x in recwarn if x.category is FutureWarning] == []


@every_family
def test_lora_trains_saves_reloads_merges_and_generates(case, tmp_path):
    data = [{"input_ids": row, "labels": row} for row in random_tokens(8, 9)]
    model = lora(make_model(case))
    arguments = TrainingArguments(str(tmp_path), max_steps=5, learning_rate=1e-2, **ARGUMENTS)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    expected = generate(model, random_tokens(1, 5))
    reloaded = PeftModel.from_pretrained(make_model(case), tmp_path / "adapter")
    assert torch.equal(generate(reloaded, random_tokens(1, 5)), expected)
    merged = reloaded.merge_and_unload()
    assert torch.equal(generate(merged, random_tokens(1, 5)), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(
        generate(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), random_tokens(1, 5)),
        expected,
    )


@usually(FIRST_OF_FAMILY)  # every parameter of every case gets its gradient in other tests
def test_every_mixer_learns_the_demos_text(case):
    text = torch.tensor(list("".join(sections())[:20_000].encode()))
    model = make_model(case, vocab_size=256, initializer_range=0.05)
    losses = train(model, text, Schedule(steps=12, learning_rate=1e-2, batch_size=4, length=32))
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.5


@every_family
@pytest.mark.parametrize("packing", [False, True])
def test_sft_trainer_packs_without_changing_the_loss(case, packing, tmp_path, tokenizer):
    lengths = (9, 4, 7, 5)
    rows = [row[:n].tolist() for row, n in zip(random_tokens(4, 9), lengths, strict=True)]
    torch.manual_seed(0)
    model = make_model(case)
    config = SFTConfig(
        str(tmp_path), max_steps=1, packing=packing, max_length=32, per_device_train_batch_size=1 if packing else 4,
        learning_rate=0.0, bf16=False, **ARGUMENTS,
    )  # fmt: skip
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    with torch.no_grad():
        parts = [
            (model(torch.tensor([r]), labels=torch.tensor([r])).loss, len(r) - 1) for r in rows
        ]
    expected = sum(loss * n for loss, n in parts) / sum(n for _, n in parts)
    assert logged == pytest.approx(expected.item(), rel=2e-3)  # the log rounds to four digits


def test_a_model_learns_to_repeat():
    """A tiny model fits a fixed text, so that gradients point where they should."""
    model = make_model(CASES[0], initializer_range=0.05).train()
    tokens = random_tokens(1, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
