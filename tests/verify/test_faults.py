"""Planted faults: each breaks one thing, and the check that is for it must name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import outputs
from tests.verify.breaking import edit_json, edit_shard, edit_tensor, index_of, put, swap
from tests.verify.test_verify import failures

EXPERT = "model.layers.1.mlp.experts.1."
SHARED = "model.layers.1.mlp.shared_experts."
ATTENTION = "model.layers.1.self_attn."
MTP = "model.layers.3."
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
DESCRIPTION = "quant_model_description.json"
CT, CPU, ASCEND, SGLANG = "h200", "cpu", "atlas-800t-a3", "h200-sglang"

AGAINST_SOURCE = ("weights", "kept", "record", "tokenizer", "config")

Break = Callable[[Path], None]
FAULTS: dict[str, tuple[str, Break, str, str]] = {}  # name -> (recipe, break, check, text)


def fault(recipe: str, check: str, text: str) -> Callable[[Break], Break]:
    """Registers a fault under its function's name."""

    def register(function: Break) -> Break:
        FAULTS[function.__name__] = (recipe, function, check, text)
        return function

    return register


@fault(CT, "scales", EXPERT + "up_proj: scale 0")
def scale_of_zero(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "up_proj.weight_scale", put(0, 3, 1))


@fault(CT, "scales", "scale nan at [0, 0]")
def scale_not_a_number(folder: Path) -> None:
    edit_tensor(folder, ATTENTION + "o_proj.weight_scale", put(float("nan"), 0, 0))


@fault(ASCEND, "scales", "scale -1")
def negative_scale(folder: Path) -> None:
    edit_tensor(folder, ATTENTION + "o_proj.weight_scale", put(-1, 5, 0))


@fault(CT, "tensors", EXPERT + "down_proj.weight is missing")
def expert_dropped(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(EXPERT + "down_proj.")]:
            del tensors[name]

    edit_shard(folder, EXPERT + "down_proj.weight_packed", drop)


@fault(CT, "tensors", EXPERT + "down_proj.weight_scale is missing")
def scale_dropped(folder: Path) -> None:
    name = EXPERT + "down_proj.weight_scale"
    edit_shard(folder, name, lambda tensors: tensors.__delitem__(name))


@fault(CT, "tensors", "model.layers.9.mystery.weight is not expected")
def tensor_too_many(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.mystery.weight"] = torch.zeros(2, 2)

    edit_shard(folder, BIAS, add)


@fault(CT, "weights", EXPERT + "gate_proj")
def experts_swapped(folder: Path) -> None:
    for part in ("weight_packed", "weight_scale"):
        swap(folder, f"{EXPERT}gate_proj.{part}", f"model.layers.1.mlp.experts.2.gate_proj.{part}")


@fault(CT, "weights", EXPERT + "gate_proj")
def gate_and_up_swapped(folder: Path) -> None:
    for part in ("weight_packed", "weight_scale"):
        swap(folder, f"{EXPERT}gate_proj.{part}", f"{EXPERT}up_proj.{part}")


@fault(CT, "weights", EXPERT + "gate_proj")
def nibbles_swapped(folder: Path) -> None:
    def exchange(words: torch.Tensor) -> torch.Tensor:
        low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
        return (low << 4) | high

    edit_tensor(folder, EXPERT + "gate_proj.weight_packed", exchange)


@fault(ASCEND, "weights", EXPERT + "down_proj")
def rows_of_a_pair_swapped(folder: Path) -> None:
    """scale_bias follows, so that only the source can tell."""

    def exchange(packed: torch.Tensor) -> torch.Tensor:
        raw = packed.view(torch.uint8)
        return ((raw >> 4) | (raw << 4)).view(torch.int8)

    def pairs(bias: torch.Tensor) -> torch.Tensor:
        return bias.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)

    edit_tensor(folder, EXPERT + "down_proj.weight", exchange)
    for name in ("weight_scale", "scale_bias"):
        edit_tensor(folder, f"{EXPERT}down_proj.{name}", pairs)


@fault(CT, "engine vLLM", "model.layers.3.mtp_block.self_attn.fused_qkv_a_proj: claimed int")
def mtp_alias_not_ignored(folder: Path) -> None:
    def forget(raw: dict) -> None:  # type: ignore[type-arg]
        ignore = raw["quantization_config"]["ignore"]
        ignore[:] = [one for one in ignore if r"layers\.3\." not in one]

    edit_json(folder / "config.json", forget)


@fault(CT, "engine SGLang", "model.decoder.self_attn.q_b_proj: claimed int4")
def draft_model_not_ignored(folder: Path) -> None:
    def forget(raw: dict) -> None:  # type: ignore[type-arg]
        ignore = raw["quantization_config"]["ignore"]
        ignore[:] = [one for one in ignore if "decoder" not in one]

    edit_json(folder / "config.json", forget)


@fault(CT, "engine SGLang", "fused_qkv_a_proj_with_mqa: claimed int4")
def fused_alias_not_targeted(folder: Path) -> None:
    def forget(raw: dict) -> None:  # type: ignore[type-arg]
        for group in raw["quantization_config"]["config_groups"].values():
            group["targets"] = [
                target.replace("|fused_qkv_a_proj|fused_qkv_a_proj_with_mqa", "")
                for target in group["targets"]
            ]

    edit_json(folder / "config.json", forget)


@fault(CT, "engine SGLang", "global format is mixed")
def global_format_int_quantized(folder: Path) -> None:
    def change(raw: dict) -> None:  # type: ignore[type-arg]
        raw["quantization_config"]["format"] = "mixed"

    edit_json(folder / "config.json", change)


@fault(CT, "engine transformers", "taken for")
def dense_target_with_the_word_experts(folder: Path) -> None:
    def change(raw: dict) -> None:  # type: ignore[type-arg]
        for group in raw["quantization_config"]["config_groups"].values():
            group["targets"] = [t.replace("exper[t]s", "experts") for t in group["targets"]]

    edit_json(folder / "config.json", change)


@fault(CT, "engine vLLM", "must be pack-quantized")
def experts_claimed_int_quantized(folder: Path) -> None:
    """What compressed-tensors' own inference of a format gives W4AFP8."""

    def change(raw: dict) -> None:  # type: ignore[type-arg]
        raw["quantization_config"]["config_groups"]["group_0"]["format"] = "int-quantized"

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        from glm5q.quant import unpack_int4

        for name in [n for n in tensors if n.endswith(".weight_packed")]:
            stem = name.removesuffix("_packed")
            columns = int(tensors.pop(stem + "_shape")[1])
            tensors[stem] = unpack_int4(tensors.pop(name), columns)

    edit_json(folder / "config.json", change)
    for layer in range(1, 3):
        edit_shard(folder, f"model.layers.{layer}.mlp.gate.weight", plain)


@fault(ASCEND, "engine vLLM-Ascend", "group_size 256")
def groups_of_256_for_ascend(folder: Path) -> None:
    edit_json(folder / DESCRIPTION, lambda raw: raw.update(group_size=256))


@fault(ASCEND, "engine vLLM-Ascend", "description does not name model.embed_tokens.weight")
def description_without_embedding(folder: Path) -> None:
    edit_json(folder / DESCRIPTION, lambda raw: raw.__delitem__("model.embed_tokens.weight"))


@fault(ASCEND, "engine vLLM-Ascend", "mlp.shared_experts.gate_up_proj: its parts are")
def description_with_differing_parts(folder: Path) -> None:
    edit_json(folder / DESCRIPTION, lambda raw: raw.update({SHARED + "up_proj.weight": "FLOAT"}))


@fault(ASCEND, "engine vLLM-Ascend", "quantization_config")
def quantization_config_left(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(quantization_config={"a": 1}))


@fault(ASCEND, "codes", EXPERT + "down_proj: scale_bias")
def wrong_scale_bias(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "down_proj.scale_bias", lambda bias: bias / 8)


@fault(ASCEND, "codes", "weight_offset is not zero")
def offset_not_zero(folder: Path) -> None:
    edit_tensor(folder, ATTENTION + "o_proj.weight_offset", put(1, 0, 0))


@fault(CT, "index", "model.layers.3.eh_proj.weight")
def mtp_missing_from_index(folder: Path) -> None:
    def forget(raw: dict) -> None:  # type: ignore[type-arg]
        for name in [n for n in raw["weight_map"] if n.startswith(MTP)]:
            del raw["weight_map"][name]

    edit_json(index_of(folder), forget)


@fault(CT, "mtp", MTP + "input_layernorm.weight is missing")
def mtp_layer_dropped(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(MTP)]:
            del tensors[name]
        tensors["left.over"] = torch.zeros(1)

    edit_shard(folder, MTP + "eh_proj.weight", drop)


@fault(CT, "layout", BIAS + " is BF16, must be F32")
def bias_cast_to_bfloat16(folder: Path) -> None:
    edit_tensor(folder, BIAS, lambda bias: bias.bfloat16())


@fault(CT, "index", "it is in model-0000")
def stale_index(folder: Path) -> None:
    def change(raw: dict) -> None:  # type: ignore[type-arg]
        raw["weight_map"][BIAS] = raw["weight_map"]["model.embed_tokens.weight"]

    edit_json(index_of(folder), change)


@fault(CT, "index", "total_size 12")
def wrong_total_size(folder: Path) -> None:
    edit_json(index_of(folder), lambda raw: raw["metadata"].update(total_size=12))


@fault(CT, "index", "model-00003-of-00006.safetensors, which is missing")
def shard_missing(folder: Path) -> None:
    (folder / "model-00003-of-00006.safetensors").unlink()


@fault(CT, "shards", "model-00003-of-00006.safetensors: ")
def shard_shortened(folder: Path) -> None:
    path = folder / "model-00003-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@fault(CPU, "codes", "codes from -8 to 9, int4")
def code_out_of_range(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "up_proj.weight", put(9, 0, 0))


@fault(CT, "codes", "codes from -128")
def int8_code_of_minus_128(folder: Path) -> None:
    edit_tensor(folder, ATTENTION + "o_proj.weight", put(-128, 0, 0))


@fault(CT, "codes", "uses 4 of 16 codes")
def few_codes_used(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "up_proj.weight_packed", lambda words: words & 0x33333333)


@fault(CT, "codes", "weight_shape [1, 2]")
def wrong_weight_shape(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "up_proj.weight_shape", lambda _: torch.tensor([1, 2]))


@fault(CT, "siblings", "kv_a_proj_with_mqa float")
def half_of_a_fused_pair_kept(folder: Path) -> None:
    name = ATTENTION + "kv_a_proj_with_mqa.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name + "_scale"]
        tensors[name] = tensors[name].bfloat16()

    edit_shard(folder, name, change)


@fault(CT, "engine vLLM", "indexer.wk: int8 channel, vllm builds it unquantized")
def indexer_key_quantized(folder: Path) -> None:
    name = ATTENTION + "indexer.wk.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name + "_scale"] = torch.ones(tensors[name].shape[0], 1).bfloat16()
        tensors[name] = tensors[name].to(torch.int8)

    edit_shard(folder, name, change)


@fault(CT, "kept", "model.layers.1.mlp.gate.weight: kept, but not the source's")
def kept_weight_changed(folder: Path) -> None:
    edit_tensor(folder, "model.layers.1.mlp.gate.weight", put(0.5, 0, 0))


@fault(CT, "record", "weight error")
def codes_not_the_recorded_ones(folder: Path) -> None:
    """Half a matrix one step off: within its grid's bound, not within the claim."""

    def change(codes: torch.Tensor) -> torch.Tensor:
        half = codes.shape[0] // 2
        codes[:half] += (codes[:half] < 127).to(torch.int8)
        return codes

    edit_tensor(folder, ATTENTION + "o_proj.weight", change)


@fault(CT, "tokenizer", "chat_template.jinja is missing")
def template_missing(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@fault(CT, "tokenizer", "tokenizer.json differs")
def tokenizer_changed(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))


@fault(CT, "config", "index_topk")
def config_changed(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(index_topk=8))


@fault(SGLANG, "tensors", "experts.1.w2.input_scale is missing")
def input_scale_missing(folder: Path) -> None:
    name = EXPERT + "w2.input_scale"
    edit_shard(folder, name, lambda tensors: tensors.__delitem__(name))


@fault(SGLANG, "scales", "input scales of w1")
def input_scales_differ(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "w3.input_scale", lambda scale: scale * 2)


@fault(SGLANG, "scales", "w2.input_scale is inf")
def input_scale_infinite(folder: Path) -> None:
    edit_tensor(folder, EXPERT + "w2.input_scale", lambda scale: scale / 0)


@fault(SGLANG, "engine SGLang w4afp8", "o_proj: SGLang wants fp8, it is float")
def linear_left_in_bfloat16(folder: Path) -> None:
    name = ATTENTION + "o_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name + "_scale_inv"]
        tensors[name] = tensors[name].to(torch.bfloat16)

    edit_shard(folder, name, change)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str, tmp_path: Path) -> None:
    recipe, plant, check, text = FAULTS[name]
    folder = outputs.copy(outputs.quantized(recipe), tmp_path)
    plant(folder)
    source = outputs.source() if check in AGAINST_SOURCE else None
    found = failures(folder, source)
    assert check in found, found
    assert text in found[check], found[check]


def test_more_than_twenty_faults() -> None:
    assert len(FAULTS) >= 20
