"""A page on which a teacher and its student answer the same prompt, with what both remember of it.

    python examples/space/app.py                                     # the models of hf-memory demo, offline
    python examples/space/app.py HuggingFaceTB/SmolLM2-135M-Instruct # or a folder, or a GGUF file

Without an argument, the environment variable TEACHER names the teacher, as in a Space of the Hub.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio

import gradio as gr
from answering import Answer, Prompt, answer_both, read_prompt
from drawing import answer_box, box, computed_curve, measured_curve, numbers, plot, text_box
from models import Models, count_heads, load
from prompts import prompts_for

INTERVAL = 0.25  # seconds between two pictures of what has been written
MOST_TOKENS = 4096  # of a prompt and its answer
MOST_CHARACTERS = 40_000  # of a prompt, so that nobody's browser sends a library
WAITING = 16  # visitors who wait for their turn; others are told to come back
STYLE = Path(__file__).with_name("style.css")
INTRO = """
# One prompt, two caches

A language model holds keys and values of the tokens that it has read: its **cache**. The **teacher**, {name}, keeps
those of all tokens, in each of its {heads} heads. The **student** has the same weights, but {few} of its heads have
room for few tokens: each keeps the last ones, and those older ones without which its output would change most.

<span class="mark" style="--share: 1">dark</span> all {few} heads hold the token
<span class="mark" style="--share: .2">light</span> some do
<span class="mark" style="--share: 0">white</span> none does; {whole} other heads keep everything
"""
THEME = gr.themes.Default(
    primary_hue="orange",
    neutral_hue="slate",
    font=("system-ui", "sans-serif"),
    font_mono=("ui-monospace", "monospace"),
)


def answers(
    models: Models, text: str, budget: int, max_new_tokens: int
) -> Iterator[tuple[str | dict, ...]]:
    """What the page shows, again and again until both answers are complete; what has not changed is skipped."""
    prompt = read_prompt(models.tokenizer, text)
    count = len(prompt.tokens)
    most = min(MOST_TOKENS, models.teacher.config.max_position_embeddings) - max_new_tokens
    if not count:
        gr.Warning("There is no prompt yet: write one, or take an example.")
        return
    if count > most:
        fit = f"at most {most:,} fit beside the answer"
        gr.Warning(f"The prompt has {count:,} tokens, and {fit}: shorten it.")
        return
    shown = [""] * 6
    next_time = 0.0
    student = models.students[budget]
    for both in answer_both(models.teacher, student, prompt.tokens, max_new_tokens):
        is_last = all(each.is_finished for each in both)
        if time.monotonic() < next_time and not is_last:
            continue
        before = shown
        shown = show(both, prompt, models)
        yield tuple(gr.skip() if new == old else new for new, old in zip(shown, before))
        next_time = time.monotonic() + INTERVAL


def show(both: tuple[Answer, Answer], prompt: Prompt, models: Models) -> list[str]:
    """The boxes of teacher and student, the plot and the numbers."""
    teacher, student = both
    for each in both:
        each.measure()
    few, heads = count_heads(student.model.config)
    curves = {"teacher": measured_curve(teacher), "student": measured_curve(student)}
    return [
        answer_box("Teacher", teacher, models.tokenizer),
        answer_box("Student", student, models.tokenizer, teacher),
        text_box(teacher, prompt.words, f"all {heads} heads"),
        text_box(student, prompt.words, f"the {few} heads with room for few tokens"),
        plot(curves, teacher.max_length, teacher.prompt_length),
        numbers(teacher.model.config, student.model.config, both),
    ]


def before_answers(models: Models, budget: int) -> list[str]:
    """The same before the first answer: what caches will take."""
    configs = {"teacher": models.teacher.config, "student": models.students[budget].config}
    longest = models.teacher.config.max_position_embeddings
    curves = {name: computed_curve(config, longest) for name, config in configs.items()}
    nothing = "<b>0 MB</b> of cache: nothing was read yet"
    boxes = [box(name, nothing, "<i>Press Answer.</i>") for name in ("Teacher", "Student")]
    return [*boxes, "", "", plot(curves, longest), numbers(*configs.values())]


def page(models: Models) -> gr.Blocks:
    """The page."""
    prompts = prompts_for(models.tokenizer)
    budgets = [*models.students]
    usual = budgets[-2]

    def answer(text: str, budget: int, max_new_tokens: int) -> Iterator[tuple[str | dict, ...]]:
        yield from answers(models, text, budget, max_new_tokens)

    first, *_ = prompts.values()
    config = models.students[usual].config
    few, heads = count_heads(config)
    intro = INTRO.format(name=models.name, heads=heads, few=few, whole=heads - few)
    held = f"In the mean, beside the first {config.num_sink_tokens} and the last {config.sliding_window}"
    with gr.Blocks(title="One prompt, two caches") as made:
        gr.Markdown(intro)
        with gr.Row():
            with gr.Column(scale=3):
                text = gr.Textbox(
                    first, label="Prompt", lines=6, max_lines=6, max_length=MOST_CHARACTERS
                )
                gr.Examples(
                    [[each] for each in prompts.values()],
                    text,
                    label="Examples",
                    example_labels=[*prompts],
                    cache_examples=False,
                )
            with gr.Column(scale=2):
                budget = gr.Radio(
                    budgets,
                    value=usual,
                    label=f"Older tokens that each of the {few} heads keeps",
                    info=held,
                )
                longest = gr.Slider(16, 256, 80, step=16, label="Longest answer, in tokens")
                with gr.Row():
                    start = gr.Button("Answer", variant="primary")
                    stop = gr.Button("Stop", interactive=False)
        shown = []
        drawn = iter(before_answers(models, usual))
        for scales in ((1, 1), (1, 1), (3, 2)):
            with gr.Row():
                for scale in scales:
                    with gr.Column(scale=scale):
                        shown.append(gr.HTML(next(drawn), apply_default_css=False))
        begun = start.click(lambda: buttons(is_running=True), None, [start, stop], queue=False)
        running = begun.then(answer, [text, budget, longest], shown, show_progress_on=shown[:2])
        over = {"fn": lambda: buttons(is_running=False), "outputs": [start, stop], "queue": False}
        running.then(**over)
        stop.click(**over, cancels=running)
    return made.queue(max_size=WAITING)


def buttons(*, is_running: bool) -> tuple[gr.Button, gr.Button]:
    """The buttons that start and stop an answer."""
    return gr.Button(interactive=not is_running), gr.Button(interactive=is_running)


def main() -> None:
    """Load the models and serve the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", nargs="?", default=os.environ.get("TEACHER"))
    parser.add_argument(
        "--config", help="folder or name of the config of a student of this teacher"
    )
    parser.add_argument("--port", type=int, help="default: 7860, or the next one that is free")
    given = parser.parse_args()
    made = page(load(given.teacher, given.config))
    made.launch(theme=THEME, css_paths=STYLE, server_port=given.port, footer_links=[])


if __name__ == "__main__":
    main()
