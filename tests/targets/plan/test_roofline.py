"""The floors' arithmetic against sums done by hand, unknown figures, and what calibration needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm5q import releases
from glm5q.config import ModelConfig, parse_config
from recipes import files
from targets import base
from targets.base import Figure
from targets.plan import calibration, weights
from targets.plan.memory import Cache, Layout, Load
from targets.plan.roofline import ATTENTION, INDEXER, Estimate, Machine

ALONE = Layout(1, 1, "split")


def release(name: str) -> ModelConfig:
    return parse_config(releases.raw_config(name), name)


def machine(recipe: str = "source-fp8", chip: str = "h200", layout: Layout = ALONE) -> Machine:
    return Machine(
        release("glm-5"), files.load(recipe), base.load(chip), layout, Cache("fp8", "fp8")
    )


def part(estimate: Estimate, name: str) -> tuple[float, float]:
    found = next(one for one in estimate.parts if one.part == name)
    return found.flop, found.bytes


def test_one_token_multiplies_the_active_parameters() -> None:
    """40.83 B are active a token, the head among them: a fact sheet's sum."""
    found = machine().decode(Load(1, 1))
    products = [p for p in found.parts if p.part not in (INDEXER, ATTENTION)]
    assert sum(p.flop for p in products) / 2 == pytest.approx(40.83e9, rel=1e-4)


def test_a_token_reads_eight_experts_and_many_tokens_read_all() -> None:
    one = part(machine().decode(Load(1, 1)), "routed experts")[1]
    assert one == pytest.approx(75 * 8 * 37_757_952, rel=1e-9)  # an FP8 expert, fact sheet
    many = part(machine().decode(Load(1, 4096)), "routed experts")[1]
    assert many == pytest.approx(75 * 256 * 37_757_952, rel=1e-6)


def test_attention_and_indexer_by_hand() -> None:
    found = machine().decode(Load(100_000, 2))
    flop, size = part(found, ATTENTION)
    assert flop == 2 * 78 * 2 * 64 * 2048 * (576 + 512)
    assert size == pytest.approx(78 * 2 * 2048 * 656, rel=0.25)  # and queries, outputs, indices
    flop, size = part(found, INDEXER)
    assert flop == 78 * 2 * 100_000 * 32 * 2 * 128
    assert size == pytest.approx(78 * 2 * 100_000 * 132, rel=0.01)


def test_prefill_scores_half_a_square() -> None:
    length = 20_000  # no whole number of chunks
    flop, _ = part(machine().prefill(Load(length, 1)), INDEXER)
    assert flop == 78 * (length * (length + 1) // 2) * 32 * 2 * 128
    products = machine().prefill(Load(length, 1))
    one = part(machine().decode(Load(1, 1)), "attention projections")[0]
    assert part(products, "attention projections")[0] == pytest.approx(length * one)


def test_time_is_the_longer_of_two_a_product() -> None:
    chip = machine().chip
    found = machine().decode(Load(1, 1))
    assert found.total_s is not None
    size = sum(one.bytes for one in found.parts)
    assert chip.bandwidth_bytes_s.value is not None
    assert found.total_s == pytest.approx(size / chip.bandwidth_bytes_s.value, rel=0.02)
    assert {one.bound for one in found.parts} == {"memory"}
    large = machine().prefill(Load(8192, 1))
    assert {one.bound for one in large.parts} >= {"compute"}
    assert large.total_s is not None
    assert large.total_s > size / chip.bandwidth_bytes_s.value


def test_a_chip_twice_as_fast_takes_half_the_time() -> None:
    slow = machine()
    double = {name: _scaled(figure) for name, figure in slow.chip.peak_ops_s.items()}
    chip = replace(
        slow.chip, peak_ops_s=double, bandwidth_bytes_s=_scaled(slow.chip.bandwidth_bytes_s)
    )
    before, after = slow.prefill(Load(9000, 1)), replace(slow, chip=chip).prefill(Load(9000, 1))
    assert before.total_s is not None
    assert after.total_s == pytest.approx(before.total_s / 2)


def _scaled(figure: Figure) -> Figure:
    assert figure.value is not None
    return replace(figure, value=2 * figure.value)


def test_sharing_never_slows_a_device() -> None:
    times = []
    for layout in (Layout(4, 4, "whole"), Layout(8, 8, "whole"), Layout(16, 16, "whole")):
        total = machine("h200", layout=layout).decode(Load(10_000, 1)).total_s
        assert total is not None
        times.append(total)
    assert times == sorted(times, reverse=True)


def test_an_unknown_figure_gives_no_number() -> None:
    """Hygon's bf16 and int8 peaks are unknown: products have no time, and so has the pass."""
    found = machine("hygon-bw1000", "hygon-bw1000").decode(Load(1000, 1))
    assert found.total_s is None
    assert found.tokens_per_s is None
    assert found.grade == "unknown"
    assert found.unknown == ["peak bf16", "peak fp8", "peak int8"]  # fp8: the cache asked for here
    assert all(one.time_s is None for one in found.parts)
    assert all(one.flop for one in found.parts)  # what is known is still said


def test_the_grade_is_the_weakest_figure_s() -> None:
    assert machine("h200").decode(Load(1000, 1)).grade == "vendor"  # int8's peak is a sheet's
    assert machine("source-fp8").decode(Load(1000, 1)).grade == "measured"
    assert machine("atlas-800t-a3", "ascend-910c").decode(Load(1000, 1)).grade == "unknown"  # fp8


def test_calibration_needs_by_hand() -> None:
    config, recipe = release("glm-5"), files.load("h200")
    source = 1_507_728_316_928
    found = calibration.needs(config, recipe, base.load("h200"), source, disk_bytes_s=4e9)
    tokens = 256 * 4096
    assert found.output_bytes == weights.weights(config, recipe).total
    assert found.disk_bytes == source + found.output_bytes
    assert found.gpu["Grams"] == 256 * (6144**2 + 2048**2) * 4
    part = 16 * (8 * 4096 * 6144 + 10 * 6144**2)  # of experts' gate and up
    assert found.gpu["a part being rounded"] == part
    # An H200 took 90.0 GB before it kept 4.2 GB of states near (reports/baselines).
    assert sum(found.gpu.values()) - found.gpu["hidden states"] == pytest.approx(90e9, rel=0.03)
    assert found.host["hidden states"] == 2 * tokens * 6144 * 4
    assert found.host["next layer"] == pytest.approx(19_754_809_856, rel=0.01)  # MTP's is larger
    assert found.cpu["layer in float32"] == pytest.approx(2 * 19_754_809_856, rel=1e-3)
    # Two forwards of 40.4 B active parameters with MTP (no head), Grams of the routed rows,
    # GPTQ's updates, and attention to 1536 tokens a query on average.
    forwards = 2 * 2 * tokens * (40.83e9 - 154_880 * 6144 + 0.55e9)
    grams = 75 * 2 * tokens * 8 * (6144**2 + 2048**2)
    updates = 75 * 256 * (2 * 2048 * 6144**2 + 6144 * 2048**2 + (6144**3 + 2048**3) / 3)
    attention = 2 * 79 * tokens * (2 * 64 * 1536 * 1088 + 2 * 32 * 128 * 2048)
    assert found.flop == pytest.approx(forwards + grams + updates + attention, rel=0.01)
    assert found.disk_s == pytest.approx((2 * source + 2 * found.output_bytes) / 4e9)
    assert found.time_s == max(found.compute_s or 0, found.disk_s)


def test_best_keeps_every_layers_input_and_a_second_stream() -> None:
    config, recipe = release("glm-5"), files.load("h200")
    fast, best = (
        calibration.needs(config, recipe.model_copy(update={"effort": e}), base.load("h200"), 0)
        for e in ("fast", "best")
    )
    states = 256 * 4096 * 6144
    assert best.host["hidden states"] == 2 * fast.host["hidden states"]
    inputs = 78 * states * 2  # bfloat16, beside a stream's two and its gradient in float32
    assert best.host["guidance, every layer's input"] == inputs + 3 * states * 4
    assert best.cpu["guidance, every layer's input"] == 78 * states * 4 + 3 * states * 4
    assert best.gpu["Grams"] == fast.gpu["Grams"]


def test_rounding_needs_no_gram_and_a_cpu_no_peak() -> None:
    config = release("glm-5")
    found = calibration.needs(config, files.load("metax-c500"), base.load("cpu"), 10**12)
    assert "Grams" not in found.gpu
    assert sum(found.gpu.values()) < 70e9
    assert found.compute_s is None
    assert found.time_s is None
