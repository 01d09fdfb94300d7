"""What a user may ask for: it works, or it is refused in one sentence before any work."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases import WORDS, word_tokenizer
from hf_memory.evaluation import lengths_beyond

STEP = "steps=1,batch_size=1,length=8"
LEARN = {
    "convert": ("--distillation", STEP, "-o", "sliding_window=4"),
    "fine-tune": ("--steps", 1, "--batch-size", 1, "--length", 8),
}


@pytest.fixture(scope="module", params=[8, 32, 100])
def short_teacher(request, tmp_path_factory):
    """A folder with a Llama of few positions."""
    folder = tmp_path_factory.mktemp("teacher")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=request.param, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(WORDS, eos_token="end", unk_token="end").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", LEARN)
def test_a_teacher_with_few_positions_gives_a_model_with_a_card(run, short_teacher, text, tmp_path, command):
    output = tmp_path / "student"
    code, _, err = run(command, short_teacher, "--text", text, "--output", output, *LEARN[command])
    assert (code, err) == (0, "")
    assert (output / "README.md").exists()


def test_models_are_measured_at_lengths_that_positions_and_text_allow():
    assert lengths_beyond(LlamaConfig(max_position_embeddings=255), 10**6) == (128,)
    assert lengths_beyond(LlamaConfig(), 250) == (128,)
    assert lengths_beyond(LlamaConfig(), 256)[0] == 256
