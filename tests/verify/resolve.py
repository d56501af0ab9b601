"""Makes data/resolved.json: what the engines' own matching functions answer for our names.

    python -m tests.verify.resolve VLLM.whl SGLANG.whl

Importing their packages wants a GPU's libraries, so the few pure functions are taken out of the
wheels' files and run alone. `make engines` fetches the wheels and runs this.
"""

from __future__ import annotations

import ast
import copy
import fnmatch
import json
import re
import sys
import typing
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from glm5q.config import parse_config
from glm5q.formats.base import Options
from glm5q.formats.ct_config import quantization_config
from glm5q.types import Role
from glm5q.verify import engines
from glm5q.verify.model import Model
from recipes import files, schema
from tests import small

RAW = small.GLM52 | {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]}
FILES = {
    "vllm": (
        "vllm/model_executor/layers/quantization/utils/config_utils.py",
        "vllm/model_executor/layers/quantization/compressed_tensors/utils.py",
    ),
    "sglang": ("sglang/srt/layers/quantization/compressed_tensors/utils.py",),
}
WANTED = {
    "find_matching_patterns",
    "is_equal_or_regex_match",
    "_is_equal_or_regex_match",
    "check_equal_or_regex_match",
    "should_ignore_layer",
    "find_matched_target",
    "_find_first_match",
    "_match_fused_layer",
}
QKV = ["q_a_proj", "kv_a_proj_with_mqa"]
FUSED = {
    "vllm": {"fused_qkv_a_proj": QKV, "gate_up_proj": ["gate_proj", "up_proj"]},
    "sglang": {"fused_qkv_a_proj_with_mqa": QKV, "gate_up_proj": ["gate_proj", "up_proj"]},
}
Config = dict[str, Any]


class ColumnParallelLinear:
    """What engines call a linear layer; the target `Linear` matches it as a part of its name."""


def functions(engine: str, wheel: str) -> dict[str, Any]:
    """Returns the engine's matching functions by name."""
    scope: dict[str, Any] = {
        "re": re, "MappingProxyType": MappingProxyType, "Module": object, "Iterable": Iterable,
        "Mapping": Mapping, "List": typing.List, "Optional": typing.Optional,  # noqa: UP006
        "fnmatch": fnmatch.fnmatch,
    }  # fmt: skip
    for file in FILES[engine]:
        with zipfile.ZipFile(wheel) as packed:
            tree = ast.parse(packed.read(file).decode("utf-8"))
        body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in WANTED]
        exec(compile(ast.Module(body, []), file, "exec"), scope)
    return scope


def configs() -> Iterator[tuple[str, Config]]:
    """Yields (label, quantization_config): ours, and ones broken as users break them."""
    config, h200 = parse_config(RAW), files.load("h200")
    kept = schema.Override(role=Role.SHARED_EXPERT, layers=(2,), plan=schema.Keep(method="keep"))
    cases = (
        ("h200", h200, Options()),
        ("h200 mtp quantized", h200.model_copy(update={"mtp": "quantize"}), Options()),
        ("h200 vllm only", h200, Options(sglang=False)),
        ("cpu", files.load("cpu"), Options(packed=False)),
        ("shared expert kept", h200.model_copy(update={"overrides": (kept,)}), Options()),
    )
    for label, recipe, options in cases:
        plan = [recipe.assignment(n, config) for n in range(config.num_layers)]
        found = quantization_config(plan, config, options)
        yield label, found
        if label != "h200":
            continue
        for ignored in ("re:.*q_a_proj$", "self_attn.o_proj", "re:.*gate_up_proj$"):
            broken = copy.deepcopy(found)
            broken["ignore"].append(ignored)
            yield f"h200 ignoring {ignored}", broken
        unfused = copy.deepcopy(found)
        aliases = re.compile(r"\|fused_qkv_a_proj(_with_mqa)?|\|gate_up")
        for group in unfused["config_groups"].values():
            group["targets"] = [aliases.sub("", target) for target in group["targets"]]
        yield "h200 without fused names", unfused


def module_names(engine: str) -> list[str]:
    """Returns the engine's and the checkpoint's names of every linear, one expert of each layer."""
    model, found = Model(RAW), {"lm_head"}
    for layer in model.layers:
        for linear in model.linears(layer):
            if not linear.expert:
                found |= {linear.name, *engines.names_in(engine, model, layer, linear.name)}
    return sorted(found)


def answer(scope: dict[str, Any], engine: str, config: Config, name: str) -> str | None:
    """Returns the group an engine takes, None for unquantized, `refused` if it raises."""
    groups, fused = config["config_groups"], FUSED[engine]
    targets = [target for group in groups.values() for target in group["targets"]]
    try:
        if scope["should_ignore_layer"](name, ignore=config["ignore"], fused_mapping=fused):
            return None
        target = scope["find_matched_target"](name, ColumnParallelLinear(), targets, fused)
    except ValueError:
        return "refused"
    return target and next(key for key, group in groups.items() if target in group["targets"])


def main(vllm: str, sglang: str) -> None:
    scopes = {"vllm": functions("vllm", vllm), "sglang": functions("sglang", sglang)}
    cases = [
        {"label": label, "config": config}
        | {e: {n: answer(s, e, config, n) for n in module_names(e)} for e, s in scopes.items()}
        for label, config in configs()
    ]
    versions = {e: Path(w).name.split("-")[1] for e, w in (("vllm", vllm), ("sglang", sglang))}
    made = versions | {"cases": cases}
    path = Path(__file__).parent / "data" / "resolved.json"
    path.write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
