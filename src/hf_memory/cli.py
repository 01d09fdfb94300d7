"""The command line: hf-memory demo, convert, fine-tune, generate, chat, info."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    TextStreamer,
    TrainerCallback,
    pipeline,
)
from transformers.utils import logging

from hf_memory import conversion
from hf_memory.conversion.checkpoints import check_room, written
from hf_memory.conversion.report import HEADER, RESULTS, check_free, table
from hf_memory.conversion.run_file import RUN, read_flags, read_schedule, write_flags
from hf_memory.demo import PROMPTS, Demo, run_demo
from hf_memory.evaluation import cache_bytes, kv_cache_bytes, layer_types
from hf_memory.serving import Conversation, load_memory, save_memory

SOURCES = "text file, .jsonl or .parquet with a field text, or name[:config] of a Hub data set"
MINIMUM = 2560  # tokens of a text, so that there is a window to compare two models on in the last tenth
TEACHER_TYPES = ", ".join(teacher.model_type for teacher in conversion.TEACHERS)
FINE_TUNING = conversion.FINE_TUNING_SCHEDULE
OF_BLOCKS = ("transfer_steps", "distill_steps", "batch_size", "length")  # flags that say what blocks do
MAXIMUM = 2**18  # tokens to compare models on, however long a text is
CONTEXTS = (1024, 8192, 32768, 131072)
IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher started; the others say nothing
console, errors = Console(quiet=not IS_FIRST), Console(stderr=True, quiet=not IS_FIRST)
commands = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Keep = Annotated[
    str,
    typer.Option("--keep-attention", "--keep", help=f"Layers that keep their attention: {conversion.KEEP_WORDS}."),
]
Option = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="name=value of the student's config; may be repeated.")
]
Texts = Annotated[list[str], typer.Option("--text", help=f"To learn on: {SOURCES}; may be repeated.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of the text to read; default: all.", min=1)]
Checkpoints = Annotated[Path | None, typer.Option(help="Folder to resume from when a run was stopped.")]
LoraRank = Annotated[
    int | None, typer.Option(help="Of low-rank updates that fine-tuning learns; default: all weights.")
]
Training = Annotated[
    list[str] | None,
    typer.Option("--training", "-t", help="name=value of transformers' TrainingArguments; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option(help="Replace the result of an earlier run.")]
DryRun = Annotated[bool, typer.Option(help="Show the plan, and whether all fits together; write nothing.")]
Seed = Annotated[int, typer.Option(help="Of new weights, the order of the text, and sampling.")]


def app() -> None:
    """Run the command line; an error is one sentence on stderr and exit code 2."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        commands()
    except (ValueError, OSError, StrictDataclassError) as error:
        errors.print(f"[red]Error:[/red] {_sentence(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _flags_of_file(context: typer.Context, file: Path | None) -> Path | None:
    """Let a YAML file give what the command line does not; the names are those of the flags."""
    if file is not None:
        context.default_map = read_flags(file, context.command.params)
    return file


Config = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=_flags_of_file, help=f"YAML file with flags, such as {RUN} of a result."),
]


def _stage(name: str) -> typer.models.OptionInfo:
    fields = ", ".join(conversion.Schedule._fields)
    return typer.Option(help=f"name=value,... of {name}, with names from {fields}; may be repeated.")


class StageProgress(TrainerCallback):
    """Shows each stage of training as a bar with its loss."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def on_train_begin(self, args, state, control, **kwargs):
        """A new bar."""
        self.task = self.progress.add_task(args.run_name, total=state.max_steps, loss="")

    def on_step_end(self, args, state, control, **kwargs):
        """One step further."""
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """The loss, when the Trainer reports it."""
        if logs and "loss" in logs:
            self.progress.update(self.task, loss=f"loss {float(logs['loss']):.3f}")


@commands.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for teacher and student.")] = Path("demo_output"),
    to: Annotated[str, typer.Option(help="The student's family.")] = "linear",
    option: Option = None,
) -> None:
    """Train a small Llama on Python's documentation, convert it, compare the two; offline, in minutes."""
    check_free(output, overwrite=True)
    with _progress() as progress:
        callbacks = (StageProgress(progress),)
        made = run_demo(to=to, callbacks=callbacks, say=progress.console.print, **_options(option))
    with conversion.new_folder(output, overwrite=True) as folder:
        _write_demo(folder, made)
    _print_results(made.results)
    for name in ("teacher", "student"):
        _show_continuations(name, str(output / name))
    console.print(_how_to_load(output / "student"), markup=False, soft_wrap=True)


@commands.command()
def convert(
    context: typer.Context,
    teacher: Annotated[str, typer.Argument(help=f"Folder or Hub name of a model of type {TEACHER_TYPES}.")],
    text: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the student.")],
    to: Annotated[str, typer.Option(help="The student's family.")] = "linear",
    keep: Keep = "none",
    option: Option = None,
    transfer: Annotated[list[str] | None, _stage("attention transfer")] = None,
    distillation: Annotated[list[str] | None, _stage("logit distillation")] = None,
    fine_tuning: Annotated[list[str] | None, _stage("fine-tuning, of no steps by default")] = None,
    transfer_steps: Annotated[int | None, typer.Option(help="Steps of attention transfer; default: 100.")] = None,
    distill_steps: Annotated[int | None, typer.Option(help="Steps of logit distillation; default: 250.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows a step of these two; default: 8.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window of these two; default: 256.")] = None,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(help="Of the distillation.")] = 1.0,
    cross_entropy: Annotated[
        float | None, typer.Option(help="Part of the distillation's loss that is the text's own, 0 to 1; default: 0.")
    ] = None,
    teacher_bits: Annotated[
        int | None, typer.Option(help="8 or 4: learn from a teacher in so many bits, with bitsandbytes.")
    ] = None,
    teacher_logits: Annotated[
        Path | None, typer.Option(help="Folder to save the teacher's likely tokens to, before distillation from them.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many of them at each place.")] = conversion.TOP_K,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Turn a trained Transformer into a memory model; the last tenth of the text is held out to compare the two."""
    check_free(output, overwrite=overwrite)
    options, shared = _options(option), _options(arguments)
    conversion.check_training(shared)
    conversion.check_cross_entropy(cross_entropy or 0)
    tokenizer, training, held_out = _read(teacher, text, max_tokens)
    stages = _schedules(context)
    how = {"to": to, "keep": keep, "lora_rank": lora_rank, **stages, **options}
    saved = top_k if teacher_logits else None
    if teacher_bits is not None:
        conversion.check_bits(teacher_bits)
    plan = conversion.plan(AutoConfig.from_pretrained(teacher), training, teacher_bits=teacher_bits, top_k=saved, **how)
    if dry_run:
        _print_plan(plan)
        return
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    check_room(output, model)
    processes = conversion.processes()  # each has its own device from here on
    device = _device()
    quantized = None if teacher_bits is None else conversion.load_quantized(teacher, teacher_bits, device)
    model.to(device if quantized is None else "cpu")  # type: ignore[arg-type]
    with _progress() as progress:
        made = conversion.convert(
            model,
            training,
            temperature=temperature,
            cross_entropy=cross_entropy,
            quantized=quantized,
            teacher_logits=teacher_logits,
            top_k=top_k,
            seed=seed,
            checkpoints=checkpoints,
            callbacks=(StageProgress(progress),),
            training=shared,
            **how,
        )
    processes.destroy_process_group()
    if not processes.is_main_process:
        return
    del quantized
    model.to(device)  # type: ignore[arg-type]
    recipe: dict = {
        "to": to,
        "transfer": stages["transfer"],
        "distillation": stages["distillation"],
        conversion.FINE_TUNING: str(stages["fine_tuning"]) if stages["fine_tuning"].steps else None,
        "cross_entropy": cross_entropy,
        "lora_rank": lora_rank,
        "teacher_bits": teacher_bits,
        "top_k": saved,
        "kept_layers": _kept(made, keep),
        "seed": seed,
    }
    results = conversion.Results(
        teacher=teacher,
        model_type=made.student.config.model_type,
        text=_names_of(text),
        recipe=conversion.recipe(**{name: x for name, x in recipe.items() if x is not None}, **options, **shared),
        losses=made.losses,
        rows=[
            conversion.measure("teacher", model, held_out, None),
            conversion.measure("student", made.student, held_out, model),
        ],
    )
    with _result(output, overwrite, checkpoints) as folder:
        conversion.write_report(folder, made.student, tokenizer, results)
        blocks = {name: schedule._asdict() for name, schedule in stages.items()}
        write_flags(folder / RUN, context.command.params, context.params | dict.fromkeys(OF_BLOCKS) | blocks)
    if made.ranking:
        _print_ranking(made)
    _print_results(results)
    console.print(_how_to_load(output), markup=False, soft_wrap=True)


@commands.command()
def fine_tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a student.")],
    text: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the model that it becomes.")],
    steps: Annotated[int, typer.Option(help="Of learning.")] = FINE_TUNING.steps,
    learning_rate: Annotated[float, typer.Option(help="Highest, after a warmup.")] = FINE_TUNING.learning_rate,
    batch_size: Annotated[int, typer.Option(help="Windows a step.")] = FINE_TUNING.batch_size,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = FINE_TUNING.length,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Teach a student the text itself, at a longer context; with LoRA the output has it merged, and in adapter/."""
    check_free(output, overwrite=overwrite)
    shared = _options(arguments)
    conversion.check_training(shared)
    tokenizer, training, held_out = _read(model, text, max_tokens)
    schedule = conversion.Schedule(steps, learning_rate, batch_size, length)
    plan = conversion.plan_fine_tuning(AutoConfig.from_pretrained(model), training, schedule, lora_rank=lora_rank)
    if dry_run:
        _print_plan(plan)
        return
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    check_room(output, student)
    processes = conversion.processes()
    student.to(_device())  # type: ignore[arg-type]
    before = conversion.measure("before", student, held_out, None) if processes.is_main_process else None
    with _progress() as progress, tempfile.TemporaryDirectory() as adapter:
        losses = conversion.fine_tune(
            student,
            training,
            schedule,
            lora_rank=lora_rank,
            adapter=Path(adapter) if lora_rank else None,
            seed=seed,
            checkpoints=checkpoints,
            callbacks=(StageProgress(progress),),
            training=shared,
        )
        processes.destroy_process_group()
        if before is None:
            return
        recipe = {conversion.FINE_TUNING: str(schedule), "lora_rank": lora_rank, "seed": seed, **shared}
        results = conversion.Results(
            teacher=model,
            model_type=student.config.model_type,
            text=_names_of(text),
            recipe={name: x for name, x in recipe.items() if x is not None},
            losses={conversion.FINE_TUNING: losses},
            rows=[before, conversion.measure("after", student, held_out, None)],
        )
        with _result(output, overwrite, checkpoints) as folder:
            conversion.write_report(folder, student, tokenizer, results)
            if lora_rank:
                shutil.copytree(adapter, folder / "adapter")
            write_flags(folder / RUN, context.command.params, context.params)
    _print_results(results)
    console.print(_how_to_load(output), markup=False, soft_wrap=True)


@commands.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder or Hub name.")],
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 100,
    seed: Seed = 0,
) -> None:
    """Continue a prompt."""
    console.print(_generate(model, prompt, max_new_tokens, seed), markup=False, highlight=False, soft_wrap=True)


@commands.command()
def chat(
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a memory model.")],
    memory: Annotated[Path | None, typer.Option(help="File to remember from, if it exists, and to keep.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 200,
    seed: Seed = 0,
) -> None:
    """Talk line by line on one memory, which does not grow; an empty line or the end of the input ends it."""
    tokenizer = AutoTokenizer.from_pretrained(_found(model))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    cache = load_memory(memory, loaded) if memory and memory.exists() else None
    conversation = Conversation(loaded, tokenizer, cache=cache, max_new_tokens=max_new_tokens, seed=seed)
    while line := _line():
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        for token in conversation.answer(line):
            streamer.put(torch.tensor([token]))
        streamer.end()
    if memory and conversation.cache is not None:
        kept = conversation.memory()
        save_memory(kept, memory, loaded)
        console.print(f"kept {memory}: {kept.get_seq_length()} tokens", highlight=False, soft_wrap=True)


def _line() -> str:
    try:
        return console.input("> ")
    except EOFError:
        return ""


@commands.command()
def info(model: Annotated[str, typer.Argument(help="Folder or Hub name; its weights are not loaded.")]) -> None:
    """Show parameters, layers, and the memory that a sequence needs against the KV cache of the same Transformer."""
    config = AutoConfig.from_pretrained(_found(model))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    kinds = layer_types(config)
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(f"{model}: {config.model_type}, {parameters:,} parameters, layers: {layers}", highlight=False)
    console.print(_memory_table(config))


def _schedules(context: typer.Context) -> dict[str, conversion.Schedule]:
    """Of the stages of a conversion: a stage's block over the flags of its fields, the command line over the file."""
    sources = (context.default_map or {}, {x: y for x, y in context.params.items() if _is_typed(context, x)})
    both = {"batch_size": "batch_size", "length": "length"}
    return {
        "transfer": _schedule("transfer", conversion.TRANSFER_SCHEDULE, sources, steps="transfer_steps", **both),
        "distillation": _schedule(
            "distillation", conversion.DISTILLATION_SCHEDULE, sources, steps="distill_steps", **both
        ),
        "fine_tuning": _schedule("fine_tuning", conversion.NO_FINE_TUNING, sources),
    }


def _is_typed(context: typer.Context, flag: str) -> bool:
    source = context.get_parameter_source(flag)
    return source is not None and source.name == "COMMANDLINE"


def _schedule(stage: str, schedule: conversion.Schedule, sources: Iterable[Mapping], **flags: str):
    for given in sources:
        words = [f"{field}={given[flag]}" for field, flag in flags.items() if flag in given]
        schedule = read_schedule(stage, schedule, [*words, *(given.get(stage) or [])])
    return schedule


@contextmanager
def _result(output: Path, overwrite: bool, checkpoints: Path | None) -> Iterator[Path]:
    """A folder to write a result to, which is there whole or not at all."""
    goes_on = f"the same command goes on from {checkpoints}" if checkpoints else "with --checkpoints it would go on"
    with (
        written("result", output, f"what was there is unchanged, and {goes_on}"),
        conversion.new_folder(output, overwrite=overwrite) as folder,
    ):
        yield folder


def _names_of(text: list[str]) -> str:
    return ", ".join(Path(source).name if Path(source).exists() else source for source in text)


def _memory_table(config: PreTrainedConfig) -> Table:
    header = "context (tokens)", "this model", "all layers attention", "ratio"
    rows = Table(*header, box=SIMPLE_HEAD, collapse_padding=True, title="memory of one sequence")
    for tokens in CONTEXTS:
        ours, theirs = cache_bytes(config, tokens), kv_cache_bytes(config, tokens)
        rows.add_row(f"{tokens:,}", f"{ours / 1e6:,.2f} MB", f"{theirs / 1e6:,.2f} MB", f"{ours / theirs:.2%}")
    return rows


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[loss]}"), console=console)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(model: str, text: list[str], limit: int | None) -> tuple:
    """The tokenizer of a model, text to learn on, and text that is held out."""
    tokenizer = AutoTokenizer.from_pretrained(_found(model))
    return tokenizer, *_split(conversion.read_tokens(text, tokenizer, limit=limit))


def _split(tokens: Tensor) -> list[Tensor]:
    """Text to learn on, and the last tenth or what is enough, to compare models on."""
    if len(tokens) < MINIMUM:
        raise ValueError(f"text must have at least {MINIMUM} tokens, of which a tenth is held out, got {len(tokens)}")
    held_out = min(len(tokens) // 10, MAXIMUM)
    return list(tokens.split([len(tokens) - held_out, held_out]))


def _print_plan(plan: list[tuple[str, str]]) -> None:
    rows = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_header=False, title="plan")
    for row in plan:
        rows.add_row(*row)
    console.print(rows)


def _print_results(results: conversion.Results) -> None:
    title = f"on held-out text; cache after {results.rows[0].costs[-1].context} tokens"
    rows = Table(*HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for row in table(results):
        rows.add_row(*row)
    console.print(rows)


def _print_ranking(made: conversion.Conversion) -> None:
    title = "attention in one layer only, before distillation; recall less KL decides"
    rows = Table(*conversion.PLACEMENT_HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for row in conversion.placement_table(made.ranking, made.kept):
        rows.add_row(*row)
    console.print(rows)


def _kept(made: conversion.Conversion, words: str) -> str:
    layers = ", ".join(map(str, made.kept))
    return layers if words in ("none", layers.replace(" ", "")) else f"{layers} ({words})"


def _write_demo(folder: Path, made: Demo) -> None:
    conversion.write_report(folder / "student", made.student, made.tokenizer, made.results)
    made.teacher.save_pretrained(folder / "teacher")
    made.tokenizer.save_pretrained(folder / "teacher")
    shutil.copy(folder / "student" / RESULTS, folder)  # marks a folder that the next run may replace


def _show_continuations(name: str, model: str) -> None:
    for prompt in PROMPTS:
        console.print(f"\n[bold]{name}[/bold]", highlight=False)
        console.print(_generate(model, prompt, max_new_tokens=60, seed=0), markup=False, highlight=False)


def _generate(model: str, prompt: str, max_new_tokens: int, seed: int) -> str:
    torch.manual_seed(seed)
    write = pipeline("text-generation", model=_found(model))
    return write(prompt, max_new_tokens=max_new_tokens)[0]["generated_text"]


def _found(model: str) -> str:
    """A folder that exists, or what may be a name on the Hub."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise ValueError(f"model must be a folder that exists or the name of a repository on the Hub, got {model}")
    return model


def _how_to_load(folder: Path) -> str:
    return f"""
Wrote {folder}. To use it:

    import hf_memory
    from transformers import pipeline
    pipeline("text-generation", model="{folder}")("The with statement", max_new_tokens=40)

or: hf-memory generate {folder} --prompt "The with statement"; hf-memory info {folder}"""


def _options(pairs: list[str] | None) -> dict:
    """name=value of a config, the value read as a number, true or false where it is one."""
    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"option must look like name=value, got {pair!r}")
        options[name] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _sentence(error: Exception) -> str:
    """The first paragraph of a message, on one line, without the errors that it went through."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text.rpartition("Error: ")[2] or type(error).__name__


if __name__ == "__main__":
    app()
