"""torch_npu's wheel as files: its schemas, its compiled library, its Python meta kernels.

The wheel is unpacked in build/ascend by `make test-ascend`, never installed: beside torch, without
CANN, it breaks `import torch`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[2] / "build" / "ascend" / "torch_npu"
YAML = ("npu_native_functions_by_codegen.yaml", "npu_native_functions.yaml")


def absent() -> str | None:
    """Returns why there are no files to look at, or None."""
    if ROOT.is_dir():
        return None
    return "torch_npu's wheel is not unpacked in build/ascend (make test-ascend)"


def version() -> str:
    found = re.search(r"__version__ = '([^']*)'", (ROOT / "version.py").read_text())
    assert found is not None
    return found[1]


def schemas(names: set[str]) -> dict[str, str]:
    """Returns op -> schema as the wheel's op tables state it."""
    found = {}
    for file in YAML:
        text = (ROOT / "csrc" / "aten" / file).read_text()
        for schema in re.findall(r"func: (\w+\(.*)", text):
            name = schema.split("(")[0]
            if name in names:
                found[name] = schema.strip()
    return found


def library() -> bytes:
    """Returns the compiled library, which holds the schemas it registers as strings."""
    return (ROOT / "lib" / "libtorch_npu.so").read_bytes()


def meta_kernels(names: set[str]) -> dict[str, Callable[..., Any]]:
    """Returns op -> the wheel's function that computes shapes and dtypes only.

    Their file imports torch_npu, so the functions are taken from it without it; the three names of
    torch_npu they use are stood in for.
    """
    source = (ROOT / "op_plugin" / "meta" / "_meta_registrations.py").read_text()
    body: list[ast.stmt] = []
    registered: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                last = decorator.args[-1] if isinstance(decorator, ast.Call) else None
                if isinstance(last, ast.Constant) and last.value in names:
                    registered[last.value] = node.name
            node.decorator_list = []
            body.append(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("TORCH_"):
            body.append(node)
    space: dict[str, Any] = {
        "torch": torch,
        "torch_npu": SimpleNamespace(**dict.fromkeys(_dtype_names(source), -1)),
        "ErrCode": SimpleNamespace(VALUE=0, PARAM=0, NOT_SUPPORT=0, TYPE=0),
        "ops_error": lambda _: "",
        "get_cann_version": lambda: "",
    }
    exec(compile(ast.Module(body, []), "torch_npu meta kernels", "exec"), space)
    return {op: space[function] for op, function in registered.items()}


def _dtype_names(source: str) -> set[str]:
    return set(re.findall(r"torch_npu\.(\w+)", source))
