"""Which engines run a student, and with which commands, for its model card."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

from hf_memory.export import NotExportable, find_target
from hf_memory.integrations.vllm import placement
from hf_memory.modeling.configuration import MemoryConfig

COMMANDS = {
    "transformers": "transformers serve served",
    "vLLM": "vllm serve served",
    "SGLang": "python -m sglang.launch_server --model-path served",
    "llama.cpp": "llama-server -m served.gguf",
    "MLX": "mlx_lm.server --model served --trust-remote-code",
}


def ways_to_serve(config: PreTrainedConfig) -> Iterator[str]:
    """Sentences that say how a model with this config is served, and by what it is not."""
    if not isinstance(config, MemoryConfig):
        yield f"Engines that have the architecture `{config.model_type}` serve it."
        return
    try:
        target = find_target(config)
        found = target.engines(config)
        gguf = " --gguf served.gguf" if found.get("llama.cpp") == "" else ""
        commands = ", ".join(f"`{command}`" for name, command in COMMANDS.items() if found.get(name) == "")
        yield (
            f"`hf-memory export FOLDER --output served{gguf}` writes it as `{target.model_type}` with the same logits; "
            f"then one of these serves it: {commands}."
        )
    except NotExportable:
        yield "It cannot be exported: no architecture of the engines represents it exactly."
    try:
        placement.check(config)
        yield (
            "vLLM runs it without an export, by `vllm serve FOLDER`, if hf_memory is installed in vLLM's environment: "
            "`pip install --no-deps .` in a clone of its repository."
        )
    except ValueError:
        yield "vLLM does not run it without an export."
    yield "`transformers serve FOLDER --trust-remote-code` serves it, where hf_memory is installed."
