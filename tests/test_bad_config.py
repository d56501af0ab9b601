"""config.json with a key missing, of another type, or contradicting another: named, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5q.config import parse_config
from glm5q.errors import CheckpointError
from tests import small
from tests.commands import refused

REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim",
    "index_topk", "max_position_embeddings", "num_hidden_layers", "rms_norm_eps",
    "routed_scaling_factor", "first_k_dense_replace",
)  # fmt: skip
NEVER = ("64", [64], {"value": 64}, None, True, -1, float("nan"), float("inf"))


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as refused_with:
        parse_config(raw)
    line = str(refused_with.value)
    assert "\n" not in line
    assert line.startswith("config.json: ")
    return line


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(key: str) -> None:
    raw = {k: v for k, v in small.GLM5.items() if k != key}
    assert f"{key} is missing" in refusal(raw)


@pytest.mark.parametrize("value", NEVER, ids=repr)
@pytest.mark.parametrize("key", REQUIRED)
def test_wrong_type(key: str, value: object) -> None:
    assert key in refusal(small.GLM5 | {key: value})


@pytest.mark.parametrize(
    "key", [key for key in REQUIRED if key not in ("n_shared_experts", "first_k_dense_replace")]
)
def test_zero(key: str) -> None:
    assert f"{key} is 0" in refusal(small.GLM5 | {key: 0})


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "deepseek_v32"}, "'deepseek_v32'"),
    "flash": ({"model_type": "glm5_next"}, "another architecture"),
    "no model type": ({"model_type": None}, "model_type"),
    "model type a list": ({"model_type": ["glm_moe_dsa"]}, "model_type"),
    "more experts a token than experts": ({"num_experts_per_tok": 9}, "n_routed_experts 8"),
    "odd rotary": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
    "rotary wider than the indexer": ({"qk_rope_head_dim": 48}, "index_head_dim 32"),
    "groups": ({"n_group": 8}, "n_group is 8"),
    "softmax router": ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "halves": ({"rope_interleave": False}, "rope_interleave is False"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
    "yarn, new style": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn'"),
    "no theta": ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
    "theta a text": ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'"),
    "theta zero": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    "rope a list": ({"rope_parameters": [1e6]}, "rope_parameters"),
    "norm_topk_prob a text": ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false'"),
    "tie a number": ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0"),
    "kinds a text": ({"mlp_layer_types": "dense"}, "mlp_layer_types"),
    "kinds a number": ({"mlp_layer_types": 3}, "mlp_layer_types"),
    "kinds nested": ({"mlp_layer_types": [["dense"]] * 3}, "mlp_layer_types"),
    "kinds unknown": ({"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types"),
    "kinds too few": ({"mlp_layer_types": ["dense"]}, "1 entries for 3 layers"),
    "indexers too few": ({"indexer_types": []}, "0 entries for 3 layers"),
    "first indexer shared": ({"indexer_types": ["shared", "full", "full"]}, "first layer shares"),
    "first shared by the rule": (
        {"index_topk_freq": 4, "index_skip_topk_offset": 0}, "first layer shares"
    ),
    "frequency zero": ({"index_topk_freq": 0}, "index_topk_freq is 0"),
    "moe frequency zero": ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
    "two mtp layers": ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
    "layers without end": ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
    "experts without end": ({"n_routed_experts": 10**12}, "n_routed_experts"),
    "a number beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    "a long wrong value": ({"hidden_size": ["x"] * 1000}, "hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_contradictions(case: str) -> None:
    change, says = CASES[case]
    line = refusal(small.GLM5 | change)
    assert says in line
    assert len(line) < 300


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '"glm_moe_dsa"', "\xff\xfe", "{" * 100_000, "[" * 100_000,
     '{"model_type": "glm_moe_dsa", "model_type": "glm_moe_dsa"}', '{"a": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_unreadable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    refused("inspect", tmp_path, says=("config.json",))


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused("inspect", tmp_path, says=("config.json",))


def test_no_config(tmp_path: Path) -> None:
    refused("inspect", tmp_path, says=("config.json", "missing"))


@pytest.mark.parametrize(
    "section",
    [
        "fp8",
        ["fp8"],
        8,
        {"quant_method": "awq"},
        {"quant_method": "fp8", "weight_block_size": [1, 128]},
    ],
)
def test_quantization_section(tmp_path: Path, section: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small.GLM5 | {"quantization_config": section}))
    refused("inspect", tmp_path, says=("config.json", "quantization_config"))
