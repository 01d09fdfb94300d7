"""A talk with a model reads what its chat template makes of the whole."""

from itertools import islice

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cases import CASE, SIZES, make_model
from hf_memory import Conversation, generate_stream
from hf_memory.files import chat_template
from hf_memory.serving import conversation

CHATML = """{% if messages[0].role != 'system' %}<|start|> system w3 w4 <|end|> w0 {% endif %}
{%- for m in messages %}<|start|> {{ m.role }} {{ m.content }} <|end|> w0 {% endfor %}
{%- if add_generation_prompt %}<|start|> assistant {% endif %}"""
INSTRUCT = """{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ '' if loop.last else ' <|end|>' }}
{%- else %}<|start|> [INST] {{ m.content }} [/INST] {% endif %}{% endfor %}"""
PLAIN = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}{{ m.role }} w1 {{ m.content | trim }} w2 {% endfor %}
{%- if add_generation_prompt %}assistant w1 {% endif %}"""
TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT, "plain": PLAIN}
SPECIAL = ["<|end|>", "<|start|>", "[INST]", "[/INST]"]
END = 0
ENDINGS = {
    "cut": {"suppress_tokens": [0, 1, 2, 3]},
    "ended": {"suppress_tokens": [1, 2, 3], "forced_eos_token_id": END},
}


def make_tokenizer(template):
    words = [*SPECIAL, "system", "user", "assistant", *(f"w{i}" for i in range(SIZES["vocab_size"] - 7))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w9"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


class Talk:
    """A conversation, what was said in it, and the tokens that were read before each answer."""

    def __init__(self, monkeypatch, template, **options):
        self.model, self.tokenizer = make_model(CASE["linear-full"], eos_token_id=END), make_tokenizer(template)
        self.messages, self.caches = [], []
        monkeypatch.setattr(conversation, "generate_stream", self.recorded)
        self.go_on(**options)

    def go_on(self, **options):
        self.conversation = Conversation(self.model, self.tokenizer, max_new_tokens=5, **options)

    def recorded(self, model, requests, **options):
        """A stream of one request; keeps in mind what each cache has read."""
        (request,) = requests
        before = next((tokens for cache, tokens in self.caches if cache is request.cache), [])
        self.read = before + request.input_ids.tolist()
        tokens = []
        for step in generate_stream(model, requests, **options):
            tokens.append(step.token)
            if step.cache is not None:
                self.caches.append((step.cache, self.read + tokens[:-1]))
            yield step

    def say(self, line, listen=5):
        self.messages.append({"role": "user", "content": line})
        answer = self.conversation.answer(line)
        tokens = list(islice(answer, listen))
        answer.close()
        whole = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)["input_ids"]
        assert self.read == whole
        self.messages.append({"role": "assistant", "content": self.tokenizer.decode(tokens, skip_special_tokens=True)})
        return tokens


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_read_is_the_template_of_the_whole(monkeypatch, template, ending):
    talk = Talk(monkeypatch, TEMPLATES[template], options=ENDINGS[ending])
    assert (talk.say("w7 w8")[-1] == END) == (ending == "ended")
    talk.say("w9 w10")
    assert len(talk.say("w11", listen=2)) == 2  # stopped
    talk.say("w12")
    talk.go_on(options=ENDINGS[ending], cache=talk.conversation.memory())
    talk.say("w13 w13")
    talk.conversation.reset()
    talk.messages.clear()
    talk.say("w8")


def test_a_system_prompt_is_said_once_and_first(monkeypatch):
    talk = Talk(monkeypatch, CHATML, system="w5 w6")
    talk.messages.append({"role": "system", "content": "w5 w6"})
    talk.say("w7")
    talk.say("w8")
    for template, cache in ((CHATML, talk.conversation.memory()), (None, None)):
        with pytest.raises(ValueError, match="system must be None with"):
            Conversation(talk.model, make_tokenizer(template), cache=cache, system="w5")
    with pytest.raises(ValueError, match="raised an error for this conversation: no system"):
        next(Conversation(talk.model, make_tokenizer(PLAIN), system="w5").answer("w7"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{{ 'x' * 2000000 }}", "it wrote 2,000,000 characters"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it took more than 1 seconds",
        ),
    ],
)
def test_a_template_that_fails_or_never_ends_is_explained(monkeypatch, template, reason):
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    with pytest.raises(ValueError, match=f"template raised an error for this conversation: {reason}"):
        next(Conversation(make_model(CASE["linear-elu"]), make_tokenizer(template)).answer("w7"))


def test_a_line_that_cannot_be_read_is_not_part_of_the_talk(monkeypatch):
    talk = Talk(monkeypatch, CHATML)
    talk.say("w7")
    talk.conversation.options = {"temperature": -1.0, "do_sample": True}
    with pytest.raises(ValueError, match="temperature"):
        next(talk.conversation.answer("w8"))
    talk.conversation.options = {}
    talk.say("w9")


def test_a_tokenizer_that_does_not_say_where_its_tokens_are():
    tokenizer = ByT5Tokenizer(
        extra_ids=0, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    talk = Conversation(make_model(CASE["linear-elu"], vocab_size=300), tokenizer, max_new_tokens=2)
    list(talk.answer("a"))
    assert tokenizer.decode(talk._turn("b")) == "user: b\n"


def test_without_a_template_lines_follow_each_other():
    talk = Conversation(make_model(CASE["linear-elu"]), make_tokenizer(None), max_new_tokens=3)
    tokens = list(talk.answer("w7"))
    assert talk.unread == tokens[-1:]
    assert talk.memory().get_seq_length() == 1 + 3
