"""Grids, rounding and packing: golden words, round trips, half a step at most."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5q import quant
from glm5q.types import IntScheme

INT4 = IntScheme(4, 128, "bfloat16", "fp8")
INT8 = IntScheme(8, None, "bfloat16", "int8")


def random_weight(seed: int, rows: int = 16, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_golden_word() -> None:
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)
    assert int(quant.pack_int4(codes)[0, 0]) & 0xFFFFFFFF == 0xF6543210
    assert torch.equal(quant._pack_words(codes), quant.pack_int4(codes))  # a GPU's way


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_pack_round_trip_and_outside_packer(seed: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    packed = quant.pack_int4(codes)
    assert torch.equal(quant.unpack_int4(packed, columns), codes)
    # The outside packer pads the last word with the code 0; ours must agree wherever codes are.
    outside = unpack_from_int32(packed, 4, codes.shape)
    assert torch.equal(outside, codes)
    if columns % 8 == 0:
        assert torch.equal(packed, pack_to_int32(codes, 4))


@given(st.integers(0, 2**31), st.sampled_from([INT4, INT8]))
@settings(max_examples=30, deadline=None)
def test_at_most_half_a_step_inside_the_range(seed: int, scheme: IntScheme) -> None:
    weight = random_weight(seed)
    scale = quant.round_scale(quant.absmax_scale(weight, scheme) * 1.2, scheme)
    codes = quant.quantize(weight, scale, scheme)
    error = (quant.dequantize(codes, scale) - weight).abs()
    step = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    assert bool((error <= step * 0.5 * (1 + 1e-6)).all())


def test_codes_stay_in_range_and_reach_both_ends() -> None:
    weight = random_weight(0)
    codes = quant.quantize(weight, quant.round_scale(quant.absmax_scale(weight, INT4), INT4), INT4)
    assert (int(codes.min()), int(codes.max())) == (-8, 7)
    codes = quant.quantize(weight * 5, torch.ones(16, 1), INT8)
    assert int(quant.quantize(weight * 1e6, torch.ones(16, 1), INT8).min()) == -127
    assert codes.dtype is torch.int8


@pytest.mark.parametrize("values", [0.0, 1e-45])
def test_zero_group_gets_a_usable_scale(values: float) -> None:
    weight = torch.full((2, 128), values)
    scale = quant.round_scale(quant.absmax_scale(weight, INT4), INT4)
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert int(quant.quantize(weight, scale, INT4).abs().max()) == 0


def test_stored_scale_is_exactly_representable() -> None:
    scale = quant.round_scale(quant.absmax_scale(random_weight(1), INT4), INT4)
    assert torch.equal(scale.bfloat16().float(), scale)


def test_dequantize_rounds_once() -> None:
    codes = torch.randint(-8, 8, (4, 256), dtype=torch.int8)
    scale = torch.rand(4, 2).bfloat16().float()
    exact = codes.double() * scale.double().repeat_interleave(128, 1)
    assert torch.equal(quant.dequantize(codes, scale).double(), exact)
    assert torch.equal(quant.dequantize(codes, scale, torch.bfloat16), exact.to(torch.bfloat16))


def test_fp8_blocks_with_ragged_edges() -> None:
    weight = torch.randn(576 // 4, 200).to(quant.FP8)
    scale = torch.rand(2, 2) + 0.5
    values = quant.dequantize_fp8_blocks(weight, scale)
    assert values[143, 199] == weight[143, 199].float() * scale[1, 1]
    assert values[127, 127] == weight[127, 127].float() * scale[0, 0]


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_activation_grid(dtype: str, bound: float) -> None:
    x = torch.randn(64, 96)
    x[3] = 0
    rounded = quant.quantize_activation(x, dtype)  # type: ignore[arg-type]
    limit = x.abs().amax(-1, keepdim=True) * bound
    assert bool(((rounded - x).abs() <= limit * (1 + 1e-5)).all())
    assert float(rounded[3].abs().max()) == 0
    assert torch.equal(quant.quantize_activation(x, None), x)
