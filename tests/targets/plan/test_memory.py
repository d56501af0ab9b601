"""Caches to the byte, loads at their very limits, and legal layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm5q import releases
from glm5q.config import ModelConfig, parse_config
from recipes import files, schema
from targets import base
from targets.plan import layouts, memory, weights
from targets.plan.memory import Cache, Layout, Load, Plan


def release(name: str) -> ModelConfig:
    return parse_config(releases.raw_config(name), name)


# model, KV, index, MTP -> bytes a token, all layers, of a fact sheet's sums
BYTES = {
    ("glm-5", "bf16", "fp8", False): 100_152,
    ("glm-5", "bf16", "fp8", True): 101_436,
    ("glm-5", "fp8", "fp8", False): 61_464,
    ("glm-5", "fp8", "fp8", True): 62_252,
    ("glm-5", "bf16", "bf16", False): 109_824,
    ("glm-5", "bf16", "bf16", True): 111_232,
    ("glm-5.2", "bf16", "fp8", False): 92_628,
    ("glm-5.2", "bf16", "fp8", True): 93_912,
    ("glm-5.2", "fp8", "fp8", False): 53_940,
    ("glm-5.2", "int8", "fp8", True): 54_728,
    ("glm-5.2", "bf16", "bf16", False): 95_232,
    ("glm-5.2", "bf16", "bf16", True): 96_640,
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_a_token(case: tuple[str, memory.KvLayout, memory.IndexLayout, bool]) -> None:
    name, kv, index, mtp = case
    config, cache = release(name), Cache(kv, index)
    found = memory.kv_bytes_per_token(config, cache, mtp)
    assert found + memory.index_bytes_per_token(config, cache, mtp) == BYTES[case]


def test_rows_of_one_layer() -> None:
    config = release("glm-5")
    assert [memory.kv_row_bytes(config, kv) for kv in memory.KV_LAYOUTS] == [1152, 656, 656]
    assert memory.index_row_bytes(config, "fp8") == 132
    assert memory.index_row_bytes(config, "int8") == 130  # fp16 scale, as vllm-ascend's C8


def test_each_chip_keeps_index_keys_as_its_engines_do() -> None:
    rows = {
        ("h200", "bf16"): "fp8", ("a100", "bf16"): "bf16", ("ascend-910c", "bf16"): "bf16",
        ("ascend-910c", "int8"): "int8", ("metax-c500", "bf16"): "bf16",
    }  # fmt: skip
    for (chip, kv), index in rows.items():
        assert memory.index_layout(base.load(chip), kv) == index  # type: ignore[arg-type]


def plan_on(layout: Layout, capacity: int | None = 141_000_000_000) -> Plan:
    config, recipe = release("glm-5"), files.load("h200")
    mine = weights.weights(config, recipe, layouts.share(layout))
    return Plan(config, mine, Cache("fp8", "fp8"), layout, capacity)


def test_the_largest_loads_fit_and_one_more_does_not() -> None:
    for layout in (Layout(4, 4, "whole"), Layout(8, 8, "split"), Layout(8, 2, "whole")):
        plan = plan_on(layout)
        found = plan.device(Load(50_000, 2))
        assert found.max_context
        assert found.max_concurrency
        assert plan.fits(Load(found.max_context, 2))
        assert plan.fits(Load(50_000, found.max_concurrency))
        assert not plan.fits(Load(50_000, found.max_concurrency + 1))
        if found.max_context < plan.config.max_position_embeddings:
            assert not plan.fits(Load(found.max_context + 1, 2))


def test_nothing_fits_where_the_weights_do_not() -> None:
    found = plan_on(Layout(2, 2, "split")).device(Load(1000, 1))
    assert found.fits is False
    assert (found.max_context, found.max_concurrency) == (0, 0)


def test_unknown_memory_says_nothing() -> None:
    found = plan_on(Layout(8, 8, "split"), None).device(Load(1000, 1))
    assert (found.fits, found.max_context, found.max_concurrency) == (None, None, None)
    assert found.parts["reserve"] == 0


def test_caches_are_whole_in_a_group_and_dealt_over_groups() -> None:
    """One latent head cannot be split: tensor parallelism repeats it, data parallelism does not."""
    alone, grouped = plan_on(Layout(8, 8, "whole")), plan_on(Layout(8, 2, "whole"))
    load = Load(100_000, 8)
    assert alone.parts(load)["kv_cache"] == 4 * grouped.parts(load)["kv_cache"]
    assert alone.parts(load)["kv_cache"] == 8 * 100_000 * 79 * 656
    assert grouped.parts(load)["attention"] > alone.parts(load)["attention"]


def test_prefill_scores_are_sliced_and_decode_s_are_not() -> None:
    layout = Layout(8, 8, "split")
    assert memory.scores(Load(200_000, 1), layout) == memory.SCORE_BYTES
    assert memory.scores(Load(1000, 1), layout) == 1000 * 1000 * 4
    assert memory.scores(Load(200_000, 1024), layout) == 1024 * 200_000 * 4


@pytest.mark.parametrize("load", [Load(1, 1), Load(1, 3_000_000), Load(16, 1_500_000)])
def test_the_verdict_and_the_most_requests_agree(load: Load) -> None:
    """However many short requests a large memory holds."""
    plan = plan_on(Layout(64, 1, "whole"))
    found = plan.device(load)
    assert found.max_concurrency is not None
    assert found.fits is (found.max_concurrency >= load.concurrency)
    assert plan.fits(Load(load.context, found.max_concurrency))
    assert not plan.fits(Load(load.context, found.max_concurrency + 1))


def test_work_space_by_hand() -> None:
    """A chunk of 8192: residuals 2 x 8192 x 6144 x 2 B; logits 2 sequences x 154880 / 4 x 4 B.

    Attention of 32 of 128 heads: 8192 x 32 x (2 x 512 + 64 + 256) x 2 B is more than the experts'
    16384 rows x (2 x 6144 + 3 x 2048) x 2 B; with GLM-5's own 64 heads it is less.
    """
    glm5 = release("glm-5")
    load, layout = Load(200_000, 3), Layout(8, 4, "whole")
    beside = 201_326_592 + 309_760
    wide = replace(glm5, num_attention_heads=128)
    assert memory.activations(wide, load, layout) == beside + 704_643_072
    assert memory.activations(glm5, load, layout) == beside + 603_979_776
    # Each expert split: 65536 rows x (2 x 6144 + 3 x 512) x 2 B; all three sequences' logits.
    split = memory.activations(glm5, load, Layout(4, 4, "split"))
    assert split == 201_326_592 + 3 * 154_880 + 1_811_939_328
    # 1000 tokens are no whole chunk.
    short = memory.activations(wide, Load(1000, 1), layout)
    assert short == 2 * 1000 * 6144 * 2 + 154_880 + 1000 * 32 * 1344 * 2


def why(name: str, layout: Layout, model: str = "glm-5", **changes: object) -> str | None:
    recipe = files.load(name).model_copy(update=changes)
    return layouts.refusal(release(model), recipe, layout)


def test_legal_layouts() -> None:
    assert why("h200", Layout(8, 8, "split")) is None
    assert "128" in (why("h200", Layout(16, 16, "split")) or "")  # 2048 / 16 is not 256 wide
    assert why("h200", Layout(16, 16, "whole")) is None
    assert why("atlas-800t-a3", Layout(16, 16, "split")) is None
    assert "16 slices" in (why("atlas-800t-a3", Layout(32, 32, "split")) or "")
    assert "heads" in (why("h200", Layout(6, 6, "whole")) or "")
    assert "experts do not divide" in (why("h200", Layout(12, 4, "whole")) or "")
    assert "FP8 block" in (why("source-fp8", Layout(64, 64, "split")) or "")


def test_a_group_of_256_is_cut_at_sixteen_devices() -> None:
    """down_proj has 2048 columns: 8 groups of 256, which 16 devices cut."""
    recipe = files.load("cpu")
    experts = recipe.weights[schema.Role.ROUTED_EXPERT].model_copy(update={"group_size": 256})
    wide = recipe.weights | {schema.Role.ROUTED_EXPERT: experts}
    assert why("cpu", Layout(8, 8, "split"), weights=wide) is None
    cut = why("cpu", Layout(16, 16, "split"), weights=wide)
    assert cut == "mlp.experts.down_proj: 128 columns a device cut a group of 256"
    assert why("cpu", Layout(16, 16, "whole"), weights=wide) is None


def test_every_layout_covers_its_devices_once() -> None:
    for devices in (1, 4, 6, 16):
        found = list(layouts.candidates(devices))
        assert len(set(found)) == len(found)
        assert len({one.label() for one in found}) == len(found)
        assert all(one.tensor * one.data == devices for one in found)
    assert [one.label() for one in layouts.candidates(4)] == [
        "TP4", "TP4 EP4", "DP2 TP2 EP4", "DP4 EP4"
    ]  # fmt: skip
