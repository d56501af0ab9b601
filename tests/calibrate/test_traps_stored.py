"""What breaks in storing: the router's bias in bfloat16, codes of -8, a scale of another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from glm5q import formats, names, pipeline, quant
from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from glm5q.formats import compressed_tensors, modelslim, sglang_w4afp8
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, Layer, runnable
from glm5q.types import IntScheme
from recipes import files
from recipes.schema import Gptq, Rtn
from tests import outputs, small
from tests.runs import RAW, small_run

BIAS = "mlp.gate.e_score_correction_bias"


def biases(count: int) -> Tensor:
    """As GLM-5's are: near 7, closer than bfloat16 tells apart."""
    return 6.817 + 0.246 * torch.rand(count, generator=torch.Generator().manual_seed(0))


def test_bfloat16_would_reroute() -> None:
    """That the values below bite: 256 of them collapse to a few, and choices change."""
    bias = biases(256)
    narrow = bias.to(torch.bfloat16).float()
    assert len(narrow.unique()) <= 9
    scores = torch.rand(200, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    exact, other = ((scores + b).topk(8).indices.sort(-1).values for b in (bias, narrow))
    assert float((exact != other).any(-1).float().mean()) > 0.9


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with such biases in every routed layer, MTP too, and what calibrating it wrote."""
    folder = tmp_path_factory.mktemp("bias")
    asked = small_run(folder)
    tensors = small.random_tensors(parse_config(RAW))
    for index, name in enumerate(name for name in tensors if name.endswith(BIAS)):
        tensors[name] = biases(4) + index / 64
    small.write_checkpoint(asked.source, RAW, tensors)
    return asked.source, pipeline.calibrate(asked)[0].checkpoint


def stored_biases(folder: Path) -> dict[str, Tensor]:
    tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    return {name: tensor for name, tensor in tensors.items() if name.endswith(BIAS)}


def test_calibrating_leaves_the_routers_bias(calibrated: tuple[Path, Path]) -> None:
    source, written = calibrated
    before, after = stored_biases(source), stored_biases(written)
    assert len(before) >= 3
    assert before.keys() == after.keys()
    for name, bias in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], bias), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readers_leave_the_routers_bias(calibrated: tuple[Path, Path], dtype: torch.dtype) -> None:
    """The source's reader and the output's, whatever the matrices are run in."""
    exact = stored_biases(calibrated[0])
    for checkpoint in (open_checkpoint(calibrated[0]), open_any(calibrated[1])):
        for number in range(checkpoint.config.num_layers):
            name = names.layer_prefix(number) + BIAS
            if name in exact:
                vector = runnable(checkpoint.layer(number), dtype).vectors[BIAS]
                assert vector.dtype == torch.float32
                assert torch.equal(vector, exact[name])


def test_onnx_leaves_the_routers_bias(calibrated: tuple[Path, Path], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="not run: the onnx extra is not installed")
    pipeline.export(calibrated[1], "onnx", tmp_path / "onnx")
    model = onnx.load(str(tmp_path / "onnx" / "model.onnx"))
    exact = stored_biases(calibrated[0])
    found = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    held = [name for name in exact if name in found]
    assert held
    for name in held:
        np.testing.assert_array_equal(found[name], exact[name].numpy(), strict=True)


@pytest.mark.parametrize("recipe", outputs.RECIPES)
def test_every_format_leaves_the_routers_bias(recipe: str) -> None:
    """Each format's writer, given a bias near 7."""
    plan, checkpoint = files.load(recipe), open_any(outputs.quantized(recipe))
    layer = checkpoint.layer(1)
    vectors = layer.vectors | {BIAS: biases(len(layer.vectors[BIAS]))}
    layer = Layer(1, vectors, layer.matrices)
    form, config = formats.get(plan.format), checkpoint.config
    tensors = form.layer_tensors(layer, config, plan.options())
    stored = tensors[names.layer_prefix(1) + BIAS]
    assert stored.dtype == torch.float32
    assert torch.equal(stored, vectors[BIAS])


# Codes of -8: each format's kernel reads nibbles its own way, written here apart from ours.


def _signed(nibble: NDArray[Any]) -> NDArray[np.int8]:
    """Two's complement: 8 .. 15 are -8 .. -1."""
    return np.where(nibble >= 8, nibble.astype(np.int16) - 16, nibble).astype(np.int8)


def _marlin(tensors: dict[str, Tensor]) -> NDArray[np.int8]:
    """vLLM's uint4b8: eight a word, low first, 8 taken off."""
    words = tensors["m.weight_packed"].numpy().view(np.uint32)
    nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    return (nibbles.reshape(len(words), -1).astype(np.int16) - 8).astype(np.int8)


def _bytes(tensors: dict[str, Tensor]) -> NDArray[np.int8]:
    """vLLM's CPU backend: one signed byte a code."""
    return tensors["m.weight"].numpy()


def _w4afp8(tensors: dict[str, Tensor]) -> NDArray[np.int8]:
    """SGLang's CUTLASS kernel: signed nibbles, two columns a byte, its table has -8 .. 7."""
    packed = tensors["m.gate_proj.weight"].numpy().view(np.uint8)
    return np.stack((_signed(packed & 15), _signed(packed >> 4)), -1).reshape(len(packed), -1)


def _ascend(tensors: dict[str, Tensor]) -> NDArray[np.int8]:
    """msModelSlim's: signed nibbles, two rows a byte."""
    packed = tensors["m.weight"].numpy().view(np.uint8)
    return np.stack((_signed(packed & 15), _signed(packed >> 4)), 1).reshape(-1, packed.shape[1])


def _encoded(format_name: str, matrix: Codes) -> dict[str, Tensor]:
    if format_name == "modelslim":
        return modelslim.encode("m", matrix)
    if format_name == "sglang-w4afp8":
        return sglang_w4afp8.encode("m.gate_proj", matrix)
    whole = compressed_tensors.encode(matrix, packed=format_name == "int32")
    return {f"m.{key}": tensor for key, tensor in whole.items()}


KERNELS = {"int32": _marlin, "int8": _bytes, "sglang-w4afp8": _w4afp8, "modelslim": _ascend}


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_reads_minus_eight(kernel: str) -> None:
    """Every code that rounding may give comes back, and none beyond four bits is ever given."""
    group = None if kernel == "modelslim" else 128
    activation: Any = {"modelslim": "int8", "sglang-w4afp8": "fp8_static"}.get(kernel, "fp8")
    scheme = IntScheme(4, group, "bfloat16", activation)
    weight = torch.linspace(-1, 1, 128).repeat(2, 1)
    weight[1] *= -0.5
    scale = quant.round_scale(quant.absmax_scale(weight, scheme) * 0.7, scheme)  # clips both ends
    codes = quant.quantize(weight, scale, scheme)
    assert (int(codes.min()), int(codes.max())) == (-8, 7)
    found = KERNELS[kernel](_encoded(kernel, Codes(codes, scale, scheme, 1.0)))
    np.testing.assert_array_equal(found, codes.numpy())


def test_eight_bits_stop_at_minus_127() -> None:
    """Two products of -128 x -128 overflow the 16 bits in which int8 kernels add them in pairs."""
    scheme = IntScheme(8, None, "bfloat16", "int8")
    weight = torch.linspace(-1, 1, 512).view(2, 256)
    codes = quant.quantize(weight, torch.full((2, 1), 0.5 / 127), scheme)
    assert (int(codes.min()), int(codes.max())) == (-127, 127)


@pytest.mark.parametrize("name", [n for n in files.shipped() if n != "source-fp8"])
def test_codes_meet_the_scale_that_the_files_hold(name: str) -> None:
    """A recipe's scale dtype is what its format stores: a scale comes back as it was rounded to."""
    recipe = files.load(name)
    for plan in recipe.weights.values():
        if not isinstance(plan, Gptq | Rtn):
            continue
        scheme = plan.scheme()
        weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
        scale = quant.round_scale(quant.absmax_scale(weight, scheme), scheme)
        matrix = Codes(quant.quantize(weight, scale, scheme), scale, scheme, 1.0)
        form, path = formats.get(recipe.format), "mlp.experts.0.gate_proj"
        if recipe.format == "compressed-tensors":
            tensors = compressed_tensors.encode(matrix, recipe.packing == "int32")
        else:
            tensors = form.encode(path, matrix)  # type: ignore[attr-defined]
        stored = next(t for k, t in tensors.items() if "weight_scale" in k)
        assert stored.dtype == quant.SCALE_DTYPES[scheme.scale_dtype]
        assert torch.equal(stored.float(), scale)


def test_static_input_scales_of_nothing_are_one() -> None:
    """All-zero activations divide by no zero, on any grid."""
    zeros = torch.zeros(3, 128)
    for grid in ("int8", "fp8", "fp8_block", None):
        assert torch.equal(quant.quantize_activation(zeros, grid), zeros)  # type: ignore[arg-type]
