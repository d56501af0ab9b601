"""Every implementation of every op against the op's matrix, on the device it is for.

On an NVIDIA GPU: `pytest tests/fused_ops -m gpu`. On an Ascend NPU, with CANN and torch_npu:
`TORCH_DEVICE_BACKEND_AUTOLOAD=0 pytest tests/fused_ops/test_all_ops.py -m npu`.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fused_ops import npu_support, op, testkit

DEVICES = {"cpu": "cpu", "cuda": "cuda", "ascend": "npu"}


def marks(implementation: op.Implementation) -> tuple[pytest.MarkDecorator, ...]:
    if "cpu" in implementation.kinds:
        return ()
    return (pytest.mark.gpu if "cuda" in implementation.kinds else pytest.mark.npu,)


IMPLEMENTATIONS = [
    pytest.param(
        name,
        implementation,
        id=f"{name}-{implementation.name}",
        marks=marks(implementation),
    )
    for name in op.OPS
    for implementation in op.load(name).implementations
]


def kind_here(implementation: op.Implementation) -> str:
    """The kind of target this machine can test it as, or skips, saying why."""
    present = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_available,
        "ascend": lambda: npu_support.no_npu() is None,
    }
    for kind, here in present.items():
        if kind in implementation.kinds and here():
            return kind
    pytest.skip(f"not run: needs {', '.join(sorted(implementation.kinds))}")


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_implementation_passes_the_matrix(name: str, implementation: op.Implementation) -> None:
    kind = kind_here(implementation)
    if why := implementation.unavailable():
        pytest.skip(f"not run: {why}")
    function = op.resolve(implementation.entry)
    verdicts = {
        case.name: testkit.run(case, function, DEVICES[kind])
        for case in testkit.fitting(name, implementation, kind)
    }
    assert verdicts
    problems = {case: verdict.problem for case, verdict in verdicts.items() if verdict.problem}
    assert not problems


def defined_in(module: str) -> set[str]:
    """Top-level names of a module's source: kernels are found without importing their language."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    names: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("name", op.OPS)
def test_table_names_what_exists(name: str) -> None:
    found = op.load(name)
    assert callable(op.resolve(found.reference))
    dtypes = {case.request.dtype for case in testkit.cases(name)}
    assert dtypes == set(found.error_multiple)
    assert {feature for case in testkit.cases(name) for feature in case.request.features} == set(
        found.features
    )
    for case in testkit.cases(name):
        assert op.cost(case.request).bytes >= 0
    for implementation in found.implementations:
        for entry in filter(None, (implementation.entry, implementation.prepare)):
            module, _, function = entry.partition(":")
            assert function in defined_in(module)
