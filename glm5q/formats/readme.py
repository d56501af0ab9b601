"""The README.md of a finished checkpoint: what it is, how to serve it, what was verified."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from glm5q.config import ModelConfig
from glm5q.formats.base import Assignments, Options, claims, for_engines
from glm5q.types import IntScheme, KeepScheme


@dataclass(frozen=True)
class Serving:
    """An engine that loads a format: the version whose loader was read, its command, caveats."""

    engine: str
    version: str
    command: str
    notes: tuple[str, ...] = ()


_VLLM = Serving(
    "vLLM",
    "0.33.0",
    "vllm serve . --tensor-parallel-size 8{mtp}",
    (
        "int4 experts with fp8 activations need an SM90 GPU; their width a GPU must divide by 256, "
        "so GLM-5 stops at TP 8 without `--enable-expert-parallel`.",
    ),
)
_SGLANG = Serving(
    "SGLang",
    "0.5.23",
    "python -m sglang.launch_server --model-path . --tp 8 --disable-shared-experts-fusion",
    ("The shared expert has another precision than the routed ones, so its fusion must be off.",),
)
_VLLM_CPU = Serving("vLLM, CPU build", "0.33.0", "vllm serve . --dtype bfloat16{mtp}")
_SGLANG_W4AFP8 = Serving(
    "SGLang",
    "0.5.23",
    "python -m sglang.launch_server --model-path . --quantization w4afp8 --tp 8",
    ("Needs SM90 or newer. Activations of the experts use static scales from calibration.",),
)
_VLLM_ASCEND = Serving(
    "vLLM-Ascend",
    "source of 2026-08-22",
    "vllm serve . --quantization ascend --tensor-parallel-size 16 --enable-expert-parallel{mtp}",
    ("Don't turn on int8 KV caches with W4A8 experts before checking accuracy.",),
)
_SGLANG_NPU = Serving(
    "SGLang on NPUs",
    "0.5.23",
    "python -m sglang.launch_server --model-path . --device npu --attention-backend ascend "
    "--quantization modelslim --tp 16",
)
_VLLM_GPU = Serving("vLLM", "0.33.0", "vllm serve . --tensor-parallel-size 8{mtp}")
_NOT_TRIED = "The vendor's own plugin for vLLM, of which no version was tried with this checkpoint."
_PLUGIN_COMMAND = "vllm serve . --tensor-parallel-size 8{mtp}"
# a recipe's engine -> how it serves, where the format alone does not say
PLUGINS = {
    "vllm-musa": Serving("vLLM-MUSA", "not tried", _PLUGIN_COMMAND, (_NOT_TRIED,)),
    "vllm-mlu": Serving("vLLM-MLU", "not tried", _PLUGIN_COMMAND, (_NOT_TRIED,)),
    "vllm-kunlun": Serving("vLLM-Kunlun", "not tried", _PLUGIN_COMMAND, (_NOT_TRIED,)),
    "vllm-metax": Serving("vLLM-MetaX", "not tried", _PLUGIN_COMMAND, (_NOT_TRIED,)),
    "vllm-gcu": Serving(
        "vLLM-GCU", "not tried", f"{_PLUGIN_COMMAND} --quantization gcu", (_NOT_TRIED,)
    ),
    "vllm-hcu": Serving("vLLM on Hygon DCU", "not tried", _PLUGIN_COMMAND, (_NOT_TRIED,)),
}
_MTP = ' --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''


def servings(
    name: str, assignments: Assignments, config: ModelConfig, options: Options, engine: str = ""
) -> tuple[Serving, ...]:
    """Returns the engines that load a format with these schemes."""
    schemes = [s for _, _, s in claims(assignments, config) if not isinstance(s, KeepScheme)]
    fp8 = any(scheme.activation == "fp8" for scheme in schemes)
    cpu = any(isinstance(s, IntScheme) and (s.bits, s.activation) == (4, "int8") for s in schemes)
    sglang = for_engines(options, assignments, config).sglang
    return engines(name, fp8, sglang, cpu, engine)


def engines(
    name: str, fp8: bool, sglang: bool = True, cpu: bool = True, engine: str = ""
) -> tuple[Serving, ...]:
    """Returns the engines that load format `name`.

    `fp8`: whether any activation is in fp8; `cpu`: whether int4 weights meet int8, which vLLM
    itself has on CPUs only. A recipe's `engine` in PLUGINS is the only one.
    """
    if engine in PLUGINS:
        return (PLUGINS[engine],)
    if name == "sglang-w4afp8":
        return (_SGLANG_W4AFP8,)
    if name == "modelslim":
        return (_VLLM_ASCEND, _SGLANG_NPU)
    if not fp8:
        return (_VLLM_CPU,) if cpu else (_VLLM_GPU,)
    return (_VLLM, _SGLANG) if sglang else (_VLLM,)


def serving_lines(servings: Sequence[Serving], mtp_layers: int) -> list[str]:
    """Returns Markdown: each engine's command, with draft tokens where there is MTP, and notes."""
    lines = []
    for serving in servings:
        command = serving.command.replace("{mtp}", _MTP if mtp_layers else "")
        lines += [f"{serving.engine} ({serving.version}):", "", "```", command, "```", ""]
        lines += [note + "\n" for note in serving.notes]
    return lines


def readme(
    name: str,
    assignments: Assignments,
    config: ModelConfig,
    options: Options,
    recipe: str,
    verification: str,
    engine: str = "",
) -> str:
    """Returns the text. `recipe` says where codes come from, `verification` what was checked."""
    lines = [
        f"# {config.variant()}, quantized by glm5q",
        "",
        f"Format `{name}`, {recipe}. {config.num_hidden_layers} layers and "
        f"{config.num_nextn_predict_layers} for multi-token prediction.",
        "",
        *_scheme_table(assignments, config),
        "",
        "## Serving",
        "",
        "From this folder. The sizes of tensor parallelism that fit are in `glm5q verify .`.",
        "",
        *serving_lines(
            servings(name, assignments, config, options, engine), config.num_nextn_predict_layers
        ),
        "Sizes for tensor and expert parallelism are those of the full model; `glm5q verify` lists",
        "what this checkpoint can be split into.",
        "",
        "## What was verified",
        "",
        f"{verification[:1].upper()}{verification[1:]}.",
        "",
        "`glm5q verify .` reads the files again and replays the engines' loading rules; with "
        "`--source` it also holds every weight against the original.",
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _scheme_table(assignments: Assignments, config: ModelConfig) -> list[str]:
    """A row a role: each scheme, and in how many layers."""
    table: dict[str, dict[str, int]] = {}
    for _, role, scheme in claims(assignments, config):
        counts = table.setdefault(role.value, {})
        counts[scheme.label()] = counts.get(scheme.label(), 0) + 1
    rows = ["| role | scheme (layers) |", "|---|---|"]
    for role_name, counts in table.items():
        cells = ", ".join(f"{label} ({count})" for label, count in counts.items())
        rows.append(f"| {role_name} | {cells} |")
    return rows
