"""Weights to the byte: published releases from their config alone, and our own outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5q import names, releases
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig, parse_config
from glm5q.pipeline.footprint import written
from glm5q.pipeline.subject import elements_of
from glm5q.types import Role
from glm5q.writer import Shard
from recipes import files
from recipes.schema import Gptq, Keep, Recipe
from targets.plan import weights
from targets.plan.weights import Share
from tests import outputs

GB = 1e9
W8A8 = (Role.ATTENTION, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.INDEXER_QUERY, Role.INDEXER_KEY)


def release(name: str) -> ModelConfig:
    return parse_config(releases.raw_config(name), name)


def kept() -> Recipe:
    """Everything as the BF16 release has it."""
    plans = dict.fromkeys(Role, Keep(method="keep"))
    return files.load("source-fp8").model_copy(update={"weights": plans})


def w4a8(group: int | None, scale: str, mtp: str = "quantize") -> Recipe:
    """The fact sheet's: packed int4 experts, float32 scales for the int8 rest, wk too."""
    recipe = files.load("h200")
    experts = recipe.weights[Role.ROUTED_EXPERT]
    dense = recipe.weights[Role.ATTENTION].model_copy(update={"scale_dtype": "float32"})
    assert isinstance(experts, Gptq)
    changed = experts.model_copy(update={"group_size": group, "scale_dtype": scale})
    plans = recipe.weights | dict.fromkeys(W8A8, dense) | {Role.ROUTED_EXPERT: changed}
    return recipe.model_copy(update={"weights": plans, "mtp": mtp})


# Audited headers of zai-org/GLM-5.2-FP8 (755,617,140,416); the others are the same shapes' sums.
FP8 = {"glm-5": 756_162_687_872, "glm-5.1": 756_162_687_872, "glm-5.2": 755_617_140_416}
BF16 = {"glm-5": 1_507_728_316_928, "glm-5.1": 1_507_728_316_928, "glm-5.2": 1_506_659_919_872}


@pytest.mark.parametrize("name", releases.NAMES)
def test_releases_to_the_byte(name: str) -> None:
    config = release(name)
    assert weights.weights(config, files.load("source-fp8")).total == FP8[name]
    assert weights.weights(config, kept()).total == BF16[name]


def test_layers_of_the_releases_to_the_byte() -> None:
    config, recipe = release("glm-5.2"), files.load("source-fp8")
    by_kind = {0: 401_208_448, 3: 9_872_030_144, 6: 9_881_601_152, 78: 10_032_632_960}
    for layer, size in by_kind.items():
        vectors = sum(
            length * weights.released(path)
            for path, _, length in names.layer_vectors(config, layer)
        )
        matrices = sum(
            matrix.count * weights.matrix_bytes(matrix, recipe)
            for matrix in weights.matrices(config, recipe, layer)
        )
        assert vectors + matrices == size, layer


# group, scale dtype -> GB of GLM-5 without MTP, with it, and of GLM-5.2 without, with
TOTALS = {
    (128, "bfloat16"): (396.04, 401.41, 395.50, 400.86),
    (128, "float32"): (407.37, 412.88, 406.82, 412.34),
    (256, "bfloat16"): (390.38, 395.67, 389.83, 395.12),
    (256, "float32"): (396.04, 401.41, 395.50, 400.86),
    (None, "float32"): (385.51, 390.73, 384.96, 390.18),
}


@pytest.mark.parametrize(("group", "scale"), TOTALS)
def test_totals_of_w4a8(group: int | None, scale: str) -> None:
    expected = iter(TOTALS[group, scale])
    for name in ("glm-5", "glm-5.2"):
        found = weights.weights(release(name), w4a8(group, scale))
        assert (found.total - found.mtp) / GB == pytest.approx(next(expected), rel=0.005)
        assert found.total / GB == pytest.approx(next(expected), rel=0.005)


def test_experts_are_most_of_it() -> None:
    found = weights.weights(release("glm-5"), w4a8(128, "bfloat16"))
    experts = found.by_role[Role.ROUTED_EXPERT]
    assert 0.93 < experts / (found.total - found.mtp) < 0.96
    assert (found.total - found.mtp - experts) / GB == pytest.approx(22.3, rel=0.005)


def shards_of(folder: Path) -> list[Shard]:
    """The shards' tensors as their headers give them, by a reader of safetensors' own."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as raw:
            header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
        header.pop("__metadata__", None)
        sizes = {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items()}
        found.append(Shard(file.name, "", sizes, {}))
    return found


WRITTEN = ("h200", "cpu", "atlas-800t-a3", "h200-sglang", "a100", "metax-c500", "enflame-s60")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("shape", ["wide", "glm52"])
def test_planned_is_what_the_formats_write(name: str, shape: str) -> None:
    folder = outputs.quantized(name, shape)
    source = open_checkpoint(outputs.source(shape))
    recipe = files.load(name)
    planned = weights.weights(source.config, recipe, elements=elements_of(source))
    actual = written(source.config, shards_of(folder))
    assert planned.by_role == actual.by_role
    assert planned.mtp == actual.mtp
    assert planned.total == sum(sum(shard.tensors.values()) for shard in shards_of(folder))


def test_a_wrong_layout_shows() -> None:
    """The comparison above is not blind: int4 packed is half of int4 a byte."""
    source = open_checkpoint(outputs.source())
    wrong = files.load("h200").model_copy(update={"packing": "int8"})
    planned = weights.weights(source.config, wrong, elements=elements_of(source))
    actual = written(source.config, shards_of(outputs.quantized("h200")))
    assert planned.by_role != actual.by_role


@pytest.mark.parametrize("name", ["h200", "atlas-800t-a3", "h200-sglang"])
def test_shares_add_up(name: str) -> None:
    """All devices of expert parallelism hold each expert once; what is replicated, that often."""
    config, recipe = release("glm-5"), files.load(name)
    whole = weights.weights(config, recipe)
    part = weights.weights(config, recipe, Share(1, 16))
    assert part.by_role[Role.ROUTED_EXPERT] * 16 == whole.by_role[Role.ROUTED_EXPERT]
    for role in (Role.ATTENTION, Role.ROUTER, Role.SHARED_EXPERT):
        assert part.by_role[role] == whole.by_role[role]
    eighth = weights.weights(config, recipe, Share(8, None))
    assert eighth.by_role[Role.LM_HEAD] * 8 == whole.by_role[Role.LM_HEAD]
    experts = eighth.by_role[Role.ROUTED_EXPERT] * 8
    assert whole.by_role[Role.ROUTED_EXPERT] <= experts < 1.02 * whole.by_role[Role.ROUTED_EXPERT]


def test_attention_s_share_by_hand() -> None:
    """q_b by rows, o by columns with every row's scale; the latents' projections are repeated."""
    part = weights.weights(release("glm-5"), files.load("h200"), Share(8, None))
    q_a, kv_a = 2048 * 6144 + 2 * 2048, 576 * 6144 + 2 * 576
    q_b, o = 2048 * 2048 + 2 * 2048, 6144 * 2048 + 2 * 6144
    assert part.by_role[Role.ATTENTION] == 78 * (q_a + kv_a + q_b + o)
    assert part.by_role[Role.KV_B] == 78 * 28_672 // 8 * 512 * 2
