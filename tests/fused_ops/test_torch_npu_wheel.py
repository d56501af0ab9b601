"""The adapters against torch_npu's own files: schemas, compiled library, meta kernels.

`make test-ascend` fetches them; without them these tests are not run, and said so.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fused_ops import op, testkit
from fused_ops.expert_gemm import torch_npu as experts
from fused_ops.npu_support import ARGUMENTS
from tests.fused_ops import npu_emulator, npu_wheel
from tests.fused_ops.test_torch_npu import ADAPTERS

pytestmark = [pytest.mark.torch_npu_wheel, pytest.mark.usefixtures("npu_ops")]


@pytest.fixture
def meta_ops() -> Iterator[None]:
    library = torch.library.Library("npu", "IMPL", "Meta")
    for name, function in npu_wheel.meta_kernels(set(ARGUMENTS)).items():
        library.impl(name, function)
    yield
    library._destroy()


def test_the_committed_schemas_are_the_wheels() -> None:
    committed = json.loads(npu_emulator.SCHEMAS.read_text())
    assert committed["torch_npu"] == npu_wheel.version()
    assert committed["schemas"] == npu_wheel.schemas(set(committed["schemas"]))
    assert set(ARGUMENTS) < set(committed["schemas"])


def test_the_compiled_library_registers_them() -> None:
    compiled = npu_wheel.library()
    missing = [
        name
        for name in ARGUMENTS
        if npu_emulator.committed_schemas()[name].encode() + b"\0" not in compiled
    ]
    assert not missing


def on_meta(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: on_meta(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.usefixtures("meta_ops")
@pytest.mark.parametrize(("name", "implementation"), ADAPTERS)
def test_meta_kernels_take_the_call_and_give_the_result(
    name: str, implementation: op.Implementation
) -> None:
    """Shapes and dtypes as the reference's, through torch_npu's own shape functions."""
    function, reference = op.resolve(implementation.entry), op.resolve(op.load(name).reference)
    ran = 0
    for case in testkit.fitting(name, implementation, "ascend"):
        inputs = case.build()
        args, kwargs = inputs.args, dict(inputs.kwargs)
        expected = reference(*args, **kwargs)
        if name == "expert_gemm":  # weights are reordered once, where their values are
            weight = experts.prepare(args[1], kwargs.pop("weight_scale"), args[0].shape[1])
            args = (args[0], weight, args[2])
        result = function(*map(on_meta, args), **{k: on_meta(v) for k, v in kwargs.items()})
        pairs = (
            zip(result, expected, strict=True)
            if name == "sparse_attention"
            else [(result, expected)]
        )
        for ours, theirs in pairs:
            if ours is None:
                assert "lse" not in case.request.features
                continue
            assert ours.device.type == "meta"
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ran += 1
    assert ran


@pytest.mark.usefixtures("meta_ops")
def test_the_schema_rejects_a_wrong_name() -> None:
    query = torch.empty((4, 32, 128), dtype=torch.bfloat16, device="meta")
    key = torch.empty((9, 128, 1, 128), dtype=torch.bfloat16, device="meta")
    weights = torch.empty((4, 32), dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="sparse_cnt"):
        torch.ops.npu.npu_lightning_indexer(query, key, weights, sparse_cnt=1)


@pytest.mark.usefixtures("meta_ops")
def test_dynamic_quant_gives_codes_and_a_scale_a_row() -> None:
    x = torch.empty((5, 64), dtype=torch.bfloat16, device="meta")
    codes, scale = experts.quantize_rows(x)
    assert (codes.dtype, codes.shape) == (torch.int8, (5, 64))
    assert (scale.dtype, scale.shape) == (torch.float32, (5,))
