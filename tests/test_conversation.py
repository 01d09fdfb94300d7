"""A talk with a model reads what its chat template makes of the whole."""

from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, DynamicCache, PreTrainedTokenizerFast, StaticCache

from cases import CASE, SIZES, every_kind_of_cache, make_model, random_tokens, read
from hf_memory import Conversation
from hf_memory.cache_argument import cache_name
from hf_memory.files import chat_template

CHATML = """{% if messages[0].role != 'system' %}<|start|> system w3 w4 <|end|> w0 {% endif %}
{%- for m in messages %}<|start|> {{ m.role }} {{ m.content }} <|end|> w0 {% endfor %}
{%- if add_generation_prompt %}<|start|> assistant {% endif %}"""
INSTRUCT = """{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ '' if loop.last else ' <|end|>' }}
{%- else %}<|start|> [INST] {{ m.content }} [/INST] {% endif %}{% endfor %}"""
PLAIN = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}{{ m.role }} w1 {{ m.content | trim }} w2 {% endfor %}
{%- if add_generation_prompt %}assistant w1 {% endif %}"""
LOOP = "{% for m in messages %}<|start|> {{ m.role }} {{ m.content }} "
ASK = "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
END_OF_TEXT = (
    f"{LOOP}<|end|> {{% endfor %}}{ASK}{{% if not add_generation_prompt %}}w0{{% endif %}}"
)
LAST_OTHERWISE = (
    LOOP
    + "{% if loop.last and m.role == 'assistant' %}w0{% else %}<|end|>{% endif %} w1 {% endfor %}"
    + ASK
)
TEMPLATES = {
    "chatml": CHATML,
    "instruct": INSTRUCT,
    "plain": PLAIN,
    "end of text after the last turn": END_OF_TEXT,
    "the last answer ends otherwise": LAST_OTHERWISE,
}
ASKS_OTHERWISE = f"{LOOP}<|end|> {{% endfor %}}{ASK[:-11]}w5 {{% endif %}}"
DROPS_THINKING = (
    LOOP.replace("m.content", "m.content.split('w6')[-1]") + "<|end|> {% endfor %}" + ASK
)
SPECIAL = ["<|end|>", "<|start|>", "[INST]", "[/INST]"]
END = 0
ENDINGS = {
    "cut": {"suppress_tokens": [0, 1, 2, 3]},
    "ended": {"suppress_tokens": [1, 2, 3], "forced_eos_token_id": END},
}


def make_tokenizer(template):
    words = [
        *SPECIAL,
        "system",
        "user",
        "assistant",
        *(f"w{i}" for i in range(SIZES["vocab_size"] - 7)),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w9")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template
    )


class Talk:
    """A conversation, what was said in it, and the tokens that were read before each answer."""

    def __init__(self, template, **options):
        self.model = make_model(CASE["linear-full"], eos_token_id=END)
        self.tokenizer = make_tokenizer(template)
        self.messages = []
        self.seen = []  # the tokens of the cache that the model was called with last, after that call
        self.model.register_forward_pre_hook(self.recorded, with_kwargs=True)
        self.go_on(**options)

    def go_on(self, **options):
        self.conversation = Conversation(self.model, self.tokenizer, max_new_tokens=5, **options)

    def recorded(self, model, args, kwargs):
        """What the model has read after each call."""
        before = kwargs[cache_name(model)].get_seq_length()
        self.seen = self.seen[:before] + args[0][0].tolist()
        self.read = self.read or self.seen

    def say(self, line, listen=5):
        self.messages.append({"role": "user", "content": line})
        self.read = None
        answer = self.conversation.answer(line)
        tokens = list(islice(answer, listen))
        answer.close()
        whole = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)[
            "input_ids"
        ]
        assert self.read == whole
        self.messages.append(
            {
                "role": "assistant",
                "content": self.tokenizer.decode(tokens, skip_special_tokens=True),
            }
        )
        return tokens


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_read_is_the_template_of_the_whole(template, ending):
    talk = Talk(TEMPLATES[template], options=ENDINGS[ending])
    assert (talk.say("w7 w8")[-1] == END) == (ending == "ended")
    talk.say("w9 w10")
    assert len(talk.say("w11", listen=2)) == 2  # stopped
    talk.say("w12")
    talk.go_on(options=ENDINGS[ending], cache=talk.conversation.memory())
    talk.say("w13 w13")
    talk.conversation.reset()
    talk.messages.clear()
    talk.say("w8")


@pytest.mark.parametrize("template", TEMPLATES)
def test_penalties_see_all_of_the_conversation(template):
    """As in `generate` with the template of the whole."""
    options = {
        "suppress_tokens": [0, 1, 2, 3],
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
    }
    talk = Talk(TEMPLATES[template], options=options)
    plain = make_model(CASE["linear-full"], eos_token_id=END)
    for line in ("w7 w8", "w9", "w9 w10"):
        answer = talk.say(line)
        asked = talk.tokenizer.apply_chat_template(
            talk.messages[:-1], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        whole = plain.generate(asked, max_new_tokens=5, do_sample=False, **options)
        assert answer == whole[0, asked.shape[1] :].tolist()


@pytest.mark.parametrize("template", [ASKS_OTHERWISE, DROPS_THINKING])
def test_a_template_that_changes_earlier_answers_is_refused_when_a_message_follows(template):
    """The first answer is right; the conversation stays as it was."""
    think = {"suppress_tokens": [0, 1, 2, 3], "forced_bos_token_id": None}
    talk = Talk(template, options=think)
    talk.conversation.max_new_tokens = 3
    w6 = talk.tokenizer.convert_tokens_to_ids("w6")
    talk.conversation.options = {"sequence_bias": {(w6,): 1e9}}
    talk.say("w7")
    before = list(talk.conversation.tokens)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"must show an answer, when another .* as it was read"
        ):
            next(talk.conversation.answer("w8"))
    assert talk.conversation.tokens == before
    if template == DROPS_THINKING:
        with pytest.warns(UserWarning, match="would show otherwise before another message"):
            memory = talk.conversation.memory()
    else:
        memory = talk.conversation.memory()
    assert memory.get_seq_length() == len(before)


def test_a_system_prompt_is_said_once_and_first():
    talk = Talk(CHATML, system="w5 w6")
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
    with pytest.raises(
        ValueError, match=f"template raised an error for this conversation: {reason}"
    ):
        next(Conversation(make_model(CASE["linear-elu"]), make_tokenizer(template)).answer("w7"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"temprature": 1}, "options must have names of GenerationConfig, got temprature"),
        ({"num_beams": 2}, "must have no beams"),
        ({"sequence_bias": {(3,): float("nan")}, "do_sample": True}, "nan"),
    ],
)
def test_a_line_that_cannot_be_answered_is_not_part_of_the_talk(options, message):
    talk = Talk(CHATML)
    talk.say("w7")
    talk.conversation.options = options
    with pytest.raises((ValueError, RuntimeError), match=message):
        next(talk.conversation.answer("w8"))
    talk.conversation.options = {}
    talk.say("w9")


@every_kind_of_cache
def test_a_conversation_goes_on_from_its_cache(case):
    model = make_model(case).double()
    first = random_tokens(5)
    second = random_tokens(3, seed=1)
    model.generation_config.eos_token_id = None
    prefix = random_tokens(1, 7, seed=2)
    texts = [
        [f"w{token - 7}" if token >= 7 else "w0" for token in x.tolist()] for x in (first, second)
    ]
    tokenizer = make_tokenizer(None)
    start = read(model, prefix)
    for _ in range(2):  # the cache stays as it is
        talk = Conversation(model, tokenizer, cache=start, max_new_tokens=6)
        whole = prefix[0].tolist()
        for words in texts:
            line = " ".join(words)
            whole += tokenizer(line, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([whole])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
            )
            answer = list(talk.answer(line))
            assert answer == expected[0, len(whole) :].tolist()
            whole += answer


def test_an_answer_heeds_the_models_generation_config():
    model = make_model(CASE["linear-elu"])
    tokenizer = make_tokenizer(None)
    line = "w1 w2 w3 w4 w5 w6 w7 w8"
    ids = tokenizer(line, return_tensors="pt")["input_ids"]
    model.generation_config.eos_token_id = None
    plain = list(Conversation(model, tokenizer, max_new_tokens=12).answer(line))
    end = {"eos_token_id": plain[0], "min_new_tokens": 6, "suppress_tokens": [plain[1]]}
    model.generation_config.update(repetition_penalty=1.3, no_repeat_ngram_size=2, **end)
    answer = list(Conversation(model, tokenizer, max_new_tokens=12).answer(line))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer == expected
    assert answer != plain


@pytest.mark.parametrize(
    ("given", "of_options", "of_model", "expected"),
    [(None, 2, 3, 2), (None, None, 3, 3), (2, None, 3, 2), (None, None, None, 200)],
)
def test_an_answer_is_as_long_as_is_asked_for(given, of_options, of_model, expected):
    model = make_model(CASE["linear-elu"])
    model.generation_config.update(eos_token_id=None, max_new_tokens=of_model)
    options = {"max_new_tokens": of_options}
    talk = Conversation(model, make_tokenizer(None), max_new_tokens=given, options=options)
    assert len(list(talk.answer("w7"))) == expected


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (0, {}, "^max_new_tokens must be a number of tokens above 0, got 0"),
        (-1, {}, "^max_new_tokens must be a number of tokens above 0, got -1"),
        ("3", {}, "^max_new_tokens must be a number of tokens above 0, got '3'"),
        (None, {"max_new_tokens": 2.5}, "^max_new_tokens of options must be a number"),
        (3, {"max_new_tokens": 2}, "^max_new_tokens must be given alone or in options, got both"),
        (None, {"max_length": 9}, "^options must be without max_length"),
    ],
)
def test_a_number_of_tokens_that_is_none_is_refused_by_its_name(given, options, message):
    model = make_model(CASE["linear-elu"])
    with pytest.raises(ValueError, match=message):
        Conversation(model, make_tokenizer(None), max_new_tokens=given, options=options)


def test_an_answer_depends_on_its_seed_alone():
    model = make_model(CASE["linear-elu"])
    tokenizer = make_tokenizer(None)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    answers = [
        list(Conversation(model, tokenizer, options=options, seed=seed).answer("w7"))
        for seed in (0, 0, 1)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_memory_of_another_model_or_of_two_texts_is_refused():
    model = make_model(CASE["linear-full"])
    tokenizer = make_tokenizer(None)
    other = read(make_model(CASE["linear-elu"]), random_tokens(1, 3))
    for cache, message in (
        (read(model, random_tokens(2, 3)), "cache must be of one text, got one of 2"),
        (other, "cache must be a DynamicCache"),
        (StaticCache(config=model.config, max_cache_len=9), "cache must be a DynamicCache"),
        (DynamicCache(config=model.config), "cache must have read tokens or be None"),
    ):
        with pytest.raises(ValueError, match=message):
            Conversation(model, tokenizer, cache=cache)


def test_a_memory_made_with_gradients_is_read_without_them():
    model = make_model(CASE["linear-full"])
    tokenizer = make_tokenizer(None)
    cache = DynamicCache(config=model.config)
    model(random_tokens(1, 7), **{cache_name(model): cache})
    talk = Conversation(model, tokenizer, cache=cache, max_new_tokens=3)
    list(talk.answer("w7"))
    assert not any(
        x.requires_grad
        for layer in talk.memory().layers
        for x in getattr(layer, "states", {}).values()
    )
    assert cache.layers[0].states["memory"].requires_grad


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize(
    "line", [torch.tensor([[3]]), b"hi", ["w7"], [{"role": "user", "content": "w7"}], None]
)
def test_a_message_that_is_no_text_is_refused(template, line):
    talk = Conversation(make_model(CASE["linear-elu"]), make_tokenizer(template))
    with pytest.raises(ValueError, match="line must be the text of one message, got"):
        next(talk.answer(line))


def test_a_message_without_tokens_is_refused():
    with pytest.raises(ValueError, match="line must have at least one token, got ''"):
        next(Conversation(make_model(CASE["linear-elu"]), make_tokenizer(None)).answer(""))


def test_a_tokenizer_that_does_not_say_where_its_tokens_are():
    tokenizer = ByT5Tokenizer(
        extra_ids=0,
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )
    talk = Conversation(make_model(CASE["linear-elu"], vocab_size=259), tokenizer, max_new_tokens=2)
    first, second = (list(talk.answer(line)) for line in "ab")
    asked = tokenizer("user: a\nassistant: ", add_special_tokens=False)["input_ids"]
    between = tokenizer("\nuser: b\nassistant: ", add_special_tokens=False)["input_ids"]
    closing = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert talk.tokens == asked + first + between + second + closing


def test_without_a_template_lines_follow_each_other():
    talk = Conversation(make_model(CASE["linear-elu"]), make_tokenizer(None), max_new_tokens=3)
    tokens = list(talk.answer("w7"))
    assert talk.unread == tokens[-1:]
    assert talk.memory().get_seq_length() == 1 + 3
