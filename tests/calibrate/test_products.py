"""A quantized stack multiplies as its dequantized matrices do, in parts or on FP8 cores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calibrate import products, run
from calibrate.methods import _picked
from calibrate.products import Stack, kept_as_bytes
from calibrate.rows import round_activation
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q.formats import compressed_tensors
from glm5q.layer import Codes
from glm5q.quant import dequantize
from glm5q.types import ActivationGrid, IntScheme

EXPERTS, OUT, IN, TOKENS = 8, 512, 1024, 700
BOUNDS = (0, 5, 5, 1000, 1200, 2100, 2300, 2499, 2500)


def drawn(activation: ActivationGrid, device: str = "cpu", seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (EXPERTS, OUT, IN), generator=generator, dtype=torch.int8)
    scale = 0.001 + 0.02 * torch.rand((EXPERTS, OUT, IN // 128), generator=generator)
    scheme = IntScheme(4, 128, "bfloat16", activation)
    return Codes(codes.to(device), scale.bfloat16().float().to(device), scheme)


def asked(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, IN), generator=generator).to(dtype)
    tokens = torch.randint(0, TOKENS, (BOUNDS[-1],), generator=generator)
    return x.to(device), torch.tensor(BOUNDS, device=device), tokens.to(device)


@pytest.mark.parametrize("activation", ["fp8", "int8", None])
def test_parts_are_the_whole(activation: ActivationGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PART", 3)
    codes, (x, offsets, tokens) = drawn(activation), asked(torch.float32)
    rows = round_activation(x, activation)[tokens]
    whole = expert_gemm(rows, dequantize(codes.codes, codes.scale), offsets)
    assert torch.equal(Stack.of(codes).product(x, offsets, tokens), whole)
    assert torch.equal(Stack.of(codes).product(x[tokens], offsets), whole)
    assert kept_as_bytes("mlp.experts.down_proj", codes) is None  # no such cores here


@pytest.mark.gpu
def test_fp8_cores_give_what_floats_do() -> None:
    codes, (x, offsets, tokens) = drawn("fp8", "cuda"), asked(torch.bfloat16, "cuda")
    stack = kept_as_bytes("mlp.experts.down_proj", codes)
    if stack is None:
        pytest.skip("not run: no FP8 kernel for this GPU")
    exact = expert_gemm(
        round_activation(x.float(), "fp8")[tokens], dequantize(codes.codes, codes.scale), offsets
    )
    found = stack.product(x, offsets, tokens)
    assert error(found, exact) < 0.003  # bfloat16 of the result: 0.0017
    assert error(Stack(codes).product(x, offsets, tokens), exact) < 0.005
    moved = Codes(codes.codes, codes.scale.roll(1, 2), codes.scheme)  # the neighbour group's scale
    planted = kept_as_bytes("mlp.experts.down_proj", moved)
    assert planted is not None
    assert error(planted.product(x, offsets, tokens), exact) > 0.1


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.gpu
def test_what_is_written_leaves_a_gpu_whole() -> None:
    """Views of one stack travel as one copy, and are the same views of it afterwards."""
    codes = drawn("fp8", "cuda")
    packed = compressed_tensors.encode(codes, packed=True)
    on_cpu = Codes(codes.codes.cpu(), codes.scale.cpu(), codes.scheme)
    apart = {f"{key}.{n}": part for key, whole in packed.items() for n, part in enumerate(whole)}
    apart |= {"part": codes.scale[3, 2:5], "kept": torch.ones(3)}
    arrived = run._in_host_memory(apart)()
    exact = compressed_tensors.encode(on_cpu, packed=True)
    for key, whole in exact.items():
        for number, part in enumerate(whole):
            assert torch.equal(arrived[f"{key}.{number}"], part)
    assert torch.equal(arrived["part"], on_cpu.scale[3, 2:5])
    assert all(tensor.device.type == "cpu" for tensor in arrived.values())


def test_each_entry_is_the_chosen_stacks() -> None:
    stacks = [torch.full((5, 2, 3), float(number)) for number in range(3)]
    best = torch.tensor([2, 0, 2, 1, 2])
    assert _picked(stacks, best)[:, 0, 0].tolist() == [2, 0, 2, 1, 2]
    assert [int(stack.max()) for stack in stacks] == [0, 1, 2]  # as they were
    assert _picked(stacks, torch.ones(5, dtype=torch.int64)) is stacks[1]
