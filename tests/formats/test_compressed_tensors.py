"""compressed-tensors: its own unpacker, transformers' loader, and GLM-5's full list of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from glm5q import names, quant
from glm5q.config import parse_config
from glm5q.formats.base import Options
from glm5q.formats.ct_config import check_claims, quantization_config
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, runnable
from glm5q.verify import ct_rules
from recipes import files, schema
from tests import outputs, small

# What vLLM 0.33, SGLang 0.5.23 and transformers 5.24 resolved these names to, run by hand on a
# config of the same groups; None is unquantized.
INT4, INT8 = (4, 128, "fp8"), (8, None, "int8")
RESOLVED: dict[str, tuple[int, int | None, str] | None] = {
    "lm_head": None,
    "model.layers.0.self_attn.q_a_proj": INT8,
    "model.layers.0.self_attn.q_b_proj": INT8,
    "model.layers.0.self_attn.kv_b_proj": None,
    "model.layers.0.self_attn.o_proj": INT8,
    "model.layers.0.self_attn.indexer.wq_b": INT8,
    "model.layers.0.self_attn.indexer.wk": None,
    "model.layers.0.self_attn.indexer.weights_proj": None,
    "model.layers.0.mlp.gate_up_proj": INT8,
    "model.layers.0.mlp.down_proj": INT8,
    "model.layers.40.mlp.gate": None,
    "model.layers.40.mlp.experts.0.gate_proj": INT4,
    "model.layers.40.mlp.experts.255.down_proj": INT4,
    "model.layers.40.mlp.shared_experts.gate_up_proj": INT8,
    "model.layers.40.mlp.shared_experts.down_proj": INT8,
    "model.layers.78.self_attn.o_proj": None,
    "model.layers.78.eh_proj": None,
}
VLLM = {
    "model.layers.0.self_attn.fused_qkv_a_proj": INT8,
    "model.layers.78.mtp_block.self_attn.fused_qkv_a_proj": None,
    "model.layers.78.mtp_block.mlp.experts.0.gate_proj": None,
}
SGLANG = {
    "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa": INT8,
    "model.decoder.self_attn.fused_qkv_a_proj_with_mqa": None,
    "model.decoder.mlp.experts.0.gate_proj": None,
    "model.eh_proj": None,
}
FULL_SIZE: dict[str, Any] = small.GLM5 | {
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
}


def claims(found: ct_rules.Claim | None) -> tuple[int, int | None, str | None] | None:
    return found and (found.bits, found.group, found.activation)


def config_of(raw: dict[str, Any], recipe: str = "h200") -> dict[str, Any]:
    config, loaded = parse_config(raw), files.load(recipe)
    plan = [loaded.assignment(n, config) for n in range(config.num_layers)]
    found = quantization_config(plan, config, Options())
    check_claims(found, plan, config)
    return found


def test_engines_resolve_glm5_s_names() -> None:
    config = config_of(FULL_SIZE)
    for name, wanted in (RESOLVED | VLLM).items():
        assert claims(ct_rules.vllm(config, name)) == wanted, name
    for name, wanted in (RESOLVED | SGLANG).items():
        assert claims(ct_rules.sglang(config, name)) == wanted, name
    assert ct_rules.sglang_expert_problems(config) == []
    assert [claims(one) for one in ct_rules.transformers_groups(config)] == [INT4, INT8]


def test_mtp_layer_quantized_too_has_both_engines_names() -> None:
    config, loaded = parse_config(FULL_SIZE), files.load("h200")
    whole = loaded.model_copy(update={"mtp": "quantize"})
    plan = [whole.assignment(n, config) for n in range(config.num_layers)]
    found = quantization_config(plan, config, Options())
    check_claims(found, plan, config)
    for name in ("layers.78.mtp_block.self_attn.o_proj", "layers.78.self_attn.o_proj"):
        assert claims(ct_rules.vllm(found, "model." + name)) == INT8
    assert claims(ct_rules.sglang(found, "model.decoder.self_attn.o_proj")) == INT8
    assert claims(ct_rules.sglang(found, "model.decoder.mlp.experts.3.up_proj")) == INT4
    assert ct_rules.sglang(found, "model.decoder.self_attn.kv_b_proj") is None
    assert ct_rules.sglang(found, "model.eh_proj") is None


def test_a_layer_of_another_scheme_is_named_by_number() -> None:
    config, loaded = parse_config(FULL_SIZE), files.load("h200")
    kept = schema.Keep(method="keep")
    override = schema.Override(role=names.Role.SHARED_EXPERT, layers=(5, 7), plan=kept)
    changed = loaded.model_copy(update={"overrides": (override,)})
    plan = [changed.assignment(n, config) for n in range(config.num_layers)]
    found = quantization_config(plan, config, Options())
    check_claims(found, plan, config)
    shared = "model.layers.{}.mlp.shared_experts.gate_up_proj"
    assert ct_rules.vllm(found, shared.format(5)) is None
    assert claims(ct_rules.vllm(found, shared.format(6))) == INT8


def test_its_own_unpacker_gives_our_codes() -> None:
    folder = outputs.quantized("h200")
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    name = "model.layers.1.mlp.experts.2.down_proj"
    shape = torch.Size(tensors[name + ".weight_shape"].tolist())
    theirs = unpack_from_int32(tensors[name + ".weight_packed"], 4, shape)
    stack = open_any(folder).layer(1).matrices["mlp.experts.down_proj"]
    assert isinstance(stack, Codes)
    assert torch.equal(theirs, stack.codes[2])


@pytest.mark.parametrize("shape", ["glm5", "glm52", "no_mtp", "wide"])
def test_transformers_loads_every_weight_bit_equal(shape: str) -> None:
    folder = outputs.quantized("h200", shape)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    parameters = dict(model.named_parameters())
    quantized = open_any(folder)
    compared = 0
    for number in range(quantized.config.num_hidden_layers):
        for path, matrix in quantized.layer(number).matrices.items():
            name = names.layer_prefix(number) + path
            loaded = parameters[name if name in parameters else name + ".weight"]
            if isinstance(matrix, Codes):
                wanted = quant.dequantize(matrix.codes, matrix.scale, torch.bfloat16)
                compared += 1
            else:
                wanted = matrix
            assert torch.equal(loaded.to(wanted.dtype), wanted), name
    assert compared > 10


def test_transformers_logits_equal_the_stream(tmp_path: Path) -> None:
    from calibrate.states import advance, embed

    folder = outputs.copy(outputs.quantized("h200", "glm52"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    ).float()
    quantized = open_any(folder, latent_norm_eps=1e-6)
    config = quantized.config
    tokens = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(0))
    states = embed(quantized, tokens)
    for number in range(config.num_hidden_layers):
        weights = runnable(
            quantized.layer(number), stored_dtype=torch.bfloat16, quantize_activations=False
        )
        states = advance(config, number, weights, states)
    norm = quantized.top_tensor(names.FINAL_NORM).float()
    normed = torch.nn.functional.rms_norm(states.hidden, norm.shape, norm, config.rms_norm_eps)
    mine = normed @ quantized.top_tensor(names.LM_HEAD).float().t()
    with torch.no_grad():
        theirs = model(tokens).logits
    assert float((theirs - mine).abs().max()) < 1e-5 * float(theirs.abs().max())


def test_config_json_keeps_the_rest() -> None:
    raw = json.loads((outputs.quantized("h200") / "config.json").read_text())
    source = json.loads((outputs.source() / "config.json").read_text())
    assert {key: raw[key] for key in source} == source
    assert raw["quantization_config"]["format"] == "pack-quantized"
