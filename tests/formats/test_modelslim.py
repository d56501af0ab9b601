"""msModelSlim's bytes: golden ones, and its own packers where its wheel is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from glm5q.formats import modelslim
from glm5q.layer import Codes
from glm5q.types import IntScheme
from tests import outputs

PACKERS = "core/quant_service/modelslim_v1/save/utils/pack.py"
INT4 = IntScheme(4, None, "float32", "int8")
# Rows 0 and 1: low nibble -8 = 0x8 with high 7 = 0x7, ...
CODES = torch.tensor(
    [[-8, -1, 0, 7], [7, 1, -2, -7], [3, 3, 3, 3], [-4, 5, 6, -6]], dtype=torch.int8
)
PACKED = bytes([0x78, 0x1F, 0xE0, 0x97, 0xC3, 0x53, 0x63, 0xA3])


def packers() -> ModuleType:
    """msModelSlim's pack.py, loaded by file: its package wants an NPU."""
    spec = importlib.util.find_spec("msmodelslim")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("not run: the msmodelslim wheel is not installed (pip install --no-deps)")
    path = Path(next(iter(spec.submodule_search_locations))) / PACKERS
    loader = importlib.util.spec_from_file_location("msmodelslim_pack", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def random_codes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)


def test_golden_bytes() -> None:
    packed = modelslim.pack_rows(CODES)
    assert packed.dtype == torch.int8
    assert packed.shape == (2, 4)
    assert packed.numpy().tobytes() == PACKED


@given(st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_unpacks_what_it_packs(pairs: int, columns: int) -> None:
    codes = random_codes(2 * pairs, columns)
    assert torch.equal(modelslim.unpack_rows(modelslim.pack_rows(codes)), codes)


def test_scale_bias_is_eight_times_the_sum_of_a_slice() -> None:
    scale = torch.tensor([[0.5], [1.0], [2.0], [0.25]])
    whole = modelslim.scale_bias(CODES, scale, 1)
    assert whole.tolist() == [[-8.0], [-8.0], [192.0], [2.0]]
    halves = modelslim.scale_bias(CODES, scale, 2)
    assert halves.tolist() == [[-36.0, 28.0], [64.0, -72.0], [96.0, 96.0], [2.0, 0.0]]


def test_down_projection_has_sixteen_slices() -> None:
    matrix = Codes(random_codes(4, 32), torch.full((4, 1), 0.1), INT4)
    assert modelslim.encode("a.down_proj", matrix)["a.down_proj.scale_bias"].shape == (4, 16)
    assert modelslim.encode("a.up_proj", matrix)["a.up_proj.scale_bias"].shape == (4, 1)


def test_msmodelslim_packs_the_same_bytes() -> None:
    oracle = packers()
    codes = random_codes(64, 96)
    assert torch.equal(oracle.w4a8_pack_int4(codes.clone()), modelslim.pack_rows(codes))


@pytest.mark.parametrize("name", ["x.gate_proj", "x.up_proj", "x.down_proj"])
def test_msmodelslim_has_the_same_scale_bias(name: str) -> None:
    oracle = packers()
    codes = random_codes(64, 96)
    scale = torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    theirs = oracle.process_scale(name, codes.float() * scale, 16)
    mine = modelslim.encode(name, Codes(codes, scale, INT4))[name + ".scale_bias"]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_description_names_every_tensor() -> None:
    folder = outputs.quantized("atlas-800t-a3")
    description = json.loads((folder / modelslim.DESCRIPTION).read_text())
    stored = {n for file in folder.glob("*.safetensors") for n in load_file(file)}
    settings = {"version", "model_quant_type", "group_size", "metadata", "optional"}
    assert set(description) == stored | settings
    assert description["model.layers.3.shared_head.head.weight"] == "FLOAT"  # copied for MTP
    assert description["model.layers.1.mlp.experts.0.up_proj.scale_bias"] == "W4A8_DYNAMIC"
    assert description["model.layers.1.self_attn.q_a_proj.weight"] == "W8A8_DYNAMIC"
    assert description["model.layers.1.mlp.gate.e_score_correction_bias"] == "FLOAT"
    assert "model.layers.2.self_attn.indexer.wq_b.weight" not in description  # shared indexer
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
