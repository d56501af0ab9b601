"""Random small GLM-5 checkpoints on disk, in every shape a release has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from glm5q import names
from glm5q.config import ModelConfig, parse_config

GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": [0],
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
GLM52 = GLM5 | {
    "num_hidden_layers": 5,
    "indexer_types": ["full", "full", "shared", "shared", "full"],
}
NO_MTP = GLM5 | {"num_nextn_predict_layers": 0}


def random_tensors(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Returns every required tensor of the config, of a size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in names.expected_tensors(config).items():
        if spec.optional:
            continue
        values = torch.randn(spec.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = values * 0.2
        elif len(spec.shape) == 2:
            tensors[name] = (values * 0.08).to(dtype)
        elif name.endswith(".bias"):
            tensors[name] = (values * 0.1).to(dtype)
        else:
            tensors[name] = (1 + 0.2 * values).to(dtype)
    return tensors


def write_checkpoint(
    root: Path,
    raw: dict[str, Any] = GLM5,
    tensors: dict[str, torch.Tensor] | None = None,
    shards: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes config, tokenizer and `shards` safetensors files (1: a single file without index)."""
    root.mkdir(parents=True, exist_ok=True)
    config = parse_config(raw)
    tensors = random_tensors(config, seed, dtype) if tensors is None else tensors
    (root / "config.json").write_text(json.dumps(raw))
    write_tokenizer(root, raw["vocab_size"])
    if shards == 1:
        save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
        return root
    ordered = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = ordered[shard::shards]
        save_file({name: tensors[name] for name in mine}, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def write_tokenizer(root: Path, vocab_size: int) -> None:
    """A tokenizer of single characters, enough to make ids from text."""
    vocabulary = {chr(33 + index): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (root / "chat_template.jinja").write_text(template)
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))


def write_text(path: Path, characters: int = 20000, seed: int = 0) -> Path:
    """Random printable text with some structure, one JSONL document each 500 characters."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(33, 120, (characters,), generator=generator).tolist()
    text = "".join(chr(code) for code in codes)
    lines = [json.dumps({"text": text[i : i + 500]}) for i in range(0, characters, 500)]
    path.write_text("\n".join(lines) + "\n")
    return path
