"""`glm5q bench-calibrate`: the loop's own stages, timed against floors that come from shapes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from glm5q import releases
from glm5q.cli import main
from glm5q.config import parse_config
from glm5q.pipeline import layer_floor
from recipes import files

SMALL = ("bench-calibrate", "--shape", "embedded", "--tokens", "512", "--sequence-length", "64")
STAGES = ["statistics", "round", "held-out choice", "write", "move on"]
TOKENS = 1 << 20


def test_a_small_layer_in_json() -> None:
    ended = CliRunner().invoke(main, [*SMALL, "--json", "--disk-rate", "1e6"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert [stage["stage"] for stage in found["stages"]] == STAGES
    assert all(stage["time_s"] > 0 and stage["floor_s"] > 0 for stage in found["stages"])
    assert found["layer_s"] == pytest.approx(sum(stage["time_s"] for stage in found["stages"]))
    assert found["tokens"] == 512
    assert found["disk_s"] == pytest.approx((found["read_bytes"] + found["written_bytes"]) / 1e6)
    assert found["total_s"] == pytest.approx(
        found["layers"] * max(found["layer_s"], found["disk_s"])
    )
    assert found["device_bytes"] is None
    assert found["host_bytes"] > 1e8


def test_best_has_three_stages_more() -> None:
    """Run at a small size with all there is: the source's stream, its gradients, a second down."""
    ended = CliRunner().invoke(main, [*SMALL, "--effort", "best", "--experts", "4", "--json"])
    assert ended.exit_code == 0, ended.output
    stages = [stage["stage"] for stage in json.loads(ended.stdout)["stages"]]
    assert sorted(stages) == sorted([*STAGES, "guidance", "correction", "inner"])


def test_a_small_layer_for_people() -> None:
    ended = CliRunner().invoke(main, [*SMALL, "--experts", "8"])
    assert ended.exit_code == 0, ended.output
    assert "one MoE layer of 8 experts, 512 tokens" in ended.output
    for stage in STAGES:
        assert stage in ended.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "glm-9"), "--shape glm-9: no such shape"),
        (("--shape", "embedded", "--experts", "1"), "--experts 1: a token has 4"),
        (("--shape", "embedded", "--tokens", "100"), "under two windows of 2048"),
        (("--shape", "embedded", "--recipe", "source-fp8"), "nothing can be calibrated with it"),
    ],
)
def test_what_cannot_be_timed_is_said_in_a_line(arguments: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(main, ["bench-calibrate", *arguments])
    assert ended.exit_code == 1
    assert said in ended.output


def floors(**ceilings: float) -> dict[str, float]:
    endless = {"bfloat16_flop_s": 1e30, "float32_flop_s": 1e30, "bytes_s": 1e30} | ceilings
    config = parse_config(releases.raw_config("glm-5"))
    work = layer_floor.Work(config, 3, TOKENS, TOKENS // 10, 2048, files.load("h200"))
    return layer_floor.floors(work, layer_floor.Ceilings(**endless))


def test_floors_are_the_shapes_work() -> None:
    """Each figure once by hand, from GLM-5's published sizes."""
    experts = 2 * 8 * 3 * 6144 * 2048
    shared = experts / 8
    attention = 2 * (6144 * 2048 + 2048 * 16384 + 6144 * 576 + 512 * 64 * 448 + 16384 * 6144)
    indexer = 2 * (2048 * 4096 + 6144 * 128 + 6144 * 32)
    router = 2 * 6144 * 256
    scores = 2 * 64 * 1024 * (256 + 256)
    a_token = experts + shared + attention + indexer + router + scores
    assert floors(bfloat16_flop_s=1.0)["move on"] == pytest.approx(TOKENS * a_token)
    seen = TOKENS - TOKENS // 10
    gram = seen * 8 * (6144**2 + 2048**2)
    no_down = a_token - experts / 3  # a third of the experts' product, which nobody reads there
    assert floors(bfloat16_flop_s=1.0)["statistics"] == pytest.approx(seen * no_down + gram)
    factors = 256 * (6144**3 + 2048**3) / 3
    assert floors(float32_flop_s=1.0)["round"] == pytest.approx(factors)
    feedback = 256 * (4096 * 6144**2 + 6144 * 2048**2)
    sweeps = 4 * 2 * feedback  # two sweeps in each of two rounds, a multiply-add is two
    assert floors(bfloat16_flop_s=1.0)["round"] == pytest.approx(feedback + sweeps)
    assert floors(bfloat16_flop_s=1.0)["guidance"] == pytest.approx(
        TOKENS * (2 * a_token + no_down)
    )
    streams = TOKENS * (a_token + 3 * 6144**2)  # a Gram's half, and one that has no half
    assert floors(bfloat16_flop_s=1.0)["correction"] == pytest.approx(streams)
    # Gate and up run twice, the source's and the codes; of held-out tokens, down_proj three times.
    inner = TOKENS * (no_down + experts * 2 / 3) + TOKENS // 10 * experts
    inner += 3 * seen * 8 * 2048**2
    assert floors(bfloat16_flop_s=1.0)["inner"] == pytest.approx(inner)
