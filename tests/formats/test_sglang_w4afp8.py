"""SGLang's w4afp8: golden bytes, FP8 blocks, and what the format refuses."""

from __future__ import annotations

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5q import formats, quant
from glm5q.checkpoint import open_checkpoint
from glm5q.formats import sglang_w4afp8
from glm5q.formats.base import Options
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, runnable
from glm5q.types import StaticFp8
from recipes import files
from tests import outputs

CODES = torch.tensor([[-8, 7, -1, 1], [0, -2, 3, -7]], dtype=torch.int8)
PACKED = bytes([0x78, 0x1F, 0xE0, 0x93])


def test_golden_bytes() -> None:
    assert sglang_w4afp8.pack_columns(CODES).numpy().tobytes() == PACKED


@given(st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_unpacks_what_it_packs(rows: int, pairs: int) -> None:
    generator = torch.Generator().manual_seed(rows * pairs)
    codes = torch.randint(-8, 8, (rows, 2 * pairs), generator=generator, dtype=torch.int8)
    assert torch.equal(sglang_w4afp8.unpack_columns(sglang_w4afp8.pack_columns(codes)), codes)


def test_fp8_blocks_reach_448_and_round_by_half_a_step() -> None:
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    codes, scale = quant.quantize_fp8_blocks(weight)
    assert scale.shape == (2, 2)
    assert float(codes.float()[:128, :128].abs().max()) == 448.0
    error = (quant.dequantize_fp8_blocks(codes, scale) - weight).abs()
    assert bool((error <= weight.abs() / 16 + float(scale.max()) * 2**-9).all())


def test_every_expert_has_an_input_scale_and_gate_equals_up() -> None:
    source = open_any(outputs.quantized("h200-sglang"))
    layer = source.layer(1)
    stack = layer.matrices["mlp.experts.gate_up_proj"]
    assert isinstance(stack, Codes)
    assert stack.activation() == StaticFp8(outputs.INPUT_SCALE)
    assert runnable(layer).activation["self_attn.q_a_proj"] == "fp8_block"


def test_config_says_w4afp8_and_what_is_kept() -> None:
    raw = json.loads((outputs.quantized("h200-sglang") / "config.json").read_text())
    quantization = raw["quantization_config"]
    assert quantization["quant_method"] == "w4afp8"
    assert quantization["group_size"] == 128
    assert "model.layers.1.mlp.gate" in quantization["modules_to_not_convert"]
    assert "model.layers.1.self_attn.kv_b_proj" not in quantization["modules_to_not_convert"]


def test_refuses_int8_attention_and_a_kept_mtp_layer() -> None:
    config = open_checkpoint(outputs.source()).config
    recipe = files.load("h200")
    plan = [recipe.assignment(n, config) for n in range(config.num_layers)]
    said = list(formats.get("sglang-w4afp8").problems(plan, config, Options()))
    assert any("attention is int8 channel + int8" in one for one in said)
    assert any(one.startswith("layer 3 attention is source dtype") for one in said)


def test_static_activations_clamp_beyond_their_scale() -> None:
    x = torch.tensor([[0.0, 1.0, 100.0, -500.0]])
    rounded = quant.quantize_activation(x, StaticFp8(0.5))
    assert rounded.tolist() == [[0.0, 1.0, 104.0, -224.0]] or rounded.tolist() == [
        [0.0, 1.0, 96.0, -224.0]
    ]


def test_block_activations_scale_each_128_columns() -> None:
    x = torch.cat((torch.full((1, 128), 1e-3), torch.full((1, 40), 900.0)), 1)
    torch.testing.assert_close(quant.quantize_activation(x, "fp8_block"), x)
