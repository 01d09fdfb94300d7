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
from answering import answer_both, prompt_tokens
from drawing import numbers, panels, plot, waiting
from models import Models, load
from prompts import prompts_for

from hf_memory.evaluation import text_of_tokens

INTERVAL = 0.25  # seconds between two pictures of what has been written
MOST_TOKENS = 4096  # of a prompt and its answer
MOST_CHARACTERS = 40_000  # of a prompt, so that nobody's browser sends a library
WAITING = 16  # visitors who wait for their turn; others are told to come back
STYLE = Path(__file__).with_name("style.css")
INTRO = """
# One prompt, two caches

A language model keeps keys and values of the tokens that it has read: its **cache**. The **teacher** keeps those of all
tokens, in every head of every layer. The **student** has the same weights, and heads with room for some older tokens
only: each keeps those whose loss would change its output most. A token is <span class="mark" style="--share: 1">dark
</span> if all of these heads hold it, <span class="mark" style="--share: 0.3">light</span> if a few do, and white if all
have dropped it for good.
"""
THEME = gr.themes.Soft(
    primary_hue="orange",
    neutral_hue="slate",
    font=("system-ui", "sans-serif"),
    font_mono=("ui-monospace", "monospace"),
)


def page(models: Models) -> gr.Blocks:
    """The page."""
    tokenizer = models.tokenizer
    prompts = prompts_for(tokenizer)
    budgets = [*models.students]

    def answer(prompt: str, budget: int, max_new_tokens: int) -> Iterator[tuple[str, ...]]:
        """Both panels, the plot and the numbers, again and again until both answers are complete."""
        tokens = prompt_tokens(tokenizer, prompt) if prompt.strip() else []
        longest = min(MOST_TOKENS, models.teacher.config.max_position_embeddings) - max_new_tokens
        if not tokens:
            gr.Warning("There is no prompt yet: write one, or take an example.")
        if len(tokens) > longest:
            gr.Warning(
                f"The prompt has {len(tokens):,} tokens, and at most {longest:,} fit beside the answer: shorten it."
            )
        if not 0 < len(tokens) <= longest:
            yield (gr.skip(),) * 4
            return
        words = [*text_of_tokens(tokenizer, tokens)]
        shown = 0.0
        for both in answer_both(models.teacher, models.students[budget], tokens, max_new_tokens):
            is_last = all(each.is_finished for each in both)
            if not is_last and time.monotonic() < shown + INTERVAL:
                continue
            for each in both:
                each.measure()
            yield *panels(*both, words, tokenizer), plot(*both), numbers(*both)
            shown = time.monotonic()

    with gr.Blocks(title="One prompt, two caches") as made:
        gr.Markdown(INTRO.format(name=models.name))
        with gr.Row():
            with gr.Column(scale=3):
                prompt = gr.Textbox(
                    prompts[0], label="Prompt", lines=7, max_lines=7, max_length=MOST_CHARACTERS
                )
            with gr.Column(scale=2):
                budget = gr.Radio(
                    budgets,
                    value=budgets[-2],
                    label="Older tokens that a head of the student keeps, in the mean",
                )
                longest = gr.Slider(
                    16, 256, 80, step=16, label="Longest answer, in tokens"
                )
                with gr.Row():
                    start = gr.Button("Answer", variant="primary")
                    stop = gr.Button("Stop", interactive=False)
        gr.Examples([[each] for each in prompts], prompt, label="Examples", cache_examples=False)
        with gr.Row():
            with gr.Column():
                gr.Markdown("### Teacher: every head keeps every token")
                left = gr.HTML(waiting("Its answer is written here."))
            with gr.Column():
                gr.Markdown("### Student: each head keeps what it needs most")
                right = gr.HTML(waiting("Its answer is written here."))
        with gr.Row():
            with gr.Column(scale=3):
                gr.Markdown("### Both caches, in megabytes")
                growth = gr.HTML()
            with gr.Column(scale=2):
                gr.Markdown("### In numbers")
                measured = gr.HTML()
        shown = [left, right, growth, measured]
        begun = start.click(lambda: buttons(is_running=True), None, [start, stop], queue=False)
        running = begun.then(answer, [prompt, budget, longest], shown, show_progress_on=growth)
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
    parser.add_argument("--config", help="folder or name of the config of a student of this teacher")
    parser.add_argument("--port", type=int, help="default: 7860, or the next one that is free")
    given = parser.parse_args()
    made = page(load(given.teacher, given.config))
    made.launch(theme=THEME, css_paths=STYLE, server_port=given.port, footer_links=["api"])


if __name__ == "__main__":
    main()
