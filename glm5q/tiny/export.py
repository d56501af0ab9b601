"""The training model to and from the official tensor names, in safetensors shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5q.tiny.model import Moe, Shape, TinyGlm

LIMIT = 15_500_000


def config(s: Shape) -> dict[str, object]:
    """config.json with the keys of GLM-5's."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": [0],
        "ep_size": 1,
        "first_k_dense_replace": s.dense_layers,
        "head_dim": s.rope,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "index_head_dim": s.index_dim,
        "index_n_heads": s.index_heads,
        "index_topk": s.index_topk,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_rank,
        "max_position_embeddings": s.positions,
        "mlp_layer_types": ["dense"] * s.dense_layers + ["sparse"] * (s.layers - s.dense_layers),
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "q_lora_rank": s.q_rank,
        "qk_head_dim": s.nope + s.rope,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope,
        "rms_norm_eps": s.eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": s.theta, "rope_type": "default"},
        "routed_scaling_factor": s.scaling,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": s.value,
        "vocab_size": s.vocab,
    }


def tensors(model: TinyGlm) -> dict[str, Tensor]:
    """Views of all parameters under their official names (experts one by one)."""
    out: dict[str, Tensor] = {}
    state: dict[str, Tensor] = dict(model.named_parameters())
    state.update({n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")})
    for name, value in state.items():
        name = name.replace("mtp.", f"layers.{model.s.layers}.", 1)
        name = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("mlp.gate_up"):
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[name.replace("gate_up", f"experts.{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up", f"experts.{e}.up_proj.weight")] = up
        elif name.endswith("mlp.down"):
            for e, down in enumerate(value):
                out[name.replace("mlp.down", f"mlp.experts.{e}.down_proj.weight")] = down
        else:
            out[name] = value
    return out


def save(model: TinyGlm, folder: Path) -> None:
    """Three shards and their index, bfloat16 (the correction bias float32)."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, value in tensors(model).items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        value = value.detach().to(kind).cpu().contiguous()
        if used + value.nbytes > LIMIT:
            shards.append({})
            used = 0
        used += value.nbytes
        shards[-1][name] = value
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for shard in shards for t in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


@torch.no_grad()
def load(model: TinyGlm, folder: Path) -> None:
    """Fill a model from shards; every tensor must be there."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        stored.update(load_file(file))
    for name, view in tensors(model).items():
        view.copy_(stored.pop(name))
    if stored:
        raise ValueError(f"unexpected tensors: {sorted(stored)[:3]}")


@torch.no_grad()
def round_weights(model: TinyGlm) -> None:
    """Round every parameter to bfloat16 in place."""
    for p in model.parameters():
        p.copy_(p.bfloat16().float())


def moe_layers(model: TinyGlm) -> list[Moe]:
    """MoE blocks in order, the MTP layer's last."""
    return [layer.mlp for layer in [*model.layers, model.mtp] if isinstance(layer.mlp, Moe)]
