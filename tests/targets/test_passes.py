"""Whole passes: what they are made of adds up to the model, and how a bench assembles them."""

from pathlib import Path

import pytest
import torch
import yaml

from fused_ops.op import OpRequest, cost
from glm5q.errors import UserError
from glm5q.pipeline.bench import BenchOptions, bench_options
from glm5q.pipeline.bench import run as bench
from glm5q.pipeline.report import render
from glm5q.pipeline.subject import subject_of
from recipes import files
from reports import record as records
from targets import passes, shapes

CONFIG = subject_of("glm-5").config


def flop(parts: tuple[passes.Part, ...]) -> int:
    total = 0
    for part in parts:
        for work, calls in part.works:
            if isinstance(work, OpRequest):
                total += cost(work).flop * calls
            else:
                total += 2 * work.rows * work.columns * work.features * calls
    return total


def only(parts: tuple[passes.Part, ...], *names: str) -> tuple[passes.Part, ...]:
    return tuple(part for part in parts if part.name.startswith(names))


def test_a_decode_step_multiplies_glm5s_active_weights() -> None:
    """Its authors say 40 billion parameters are active a token, the embedding among them."""
    parts = passes.decode(CONFIG, "cpu", 1, 8192)
    weights = flop(only(parts, "linears", "expert_gemm")) / 2
    assert weights + CONFIG.vocab_size * CONFIG.hidden_size == pytest.approx(40e9, rel=0.05)


def test_a_chunk_is_as_much_work_whatever_the_pieces() -> None:
    """A CPU's chunk is timed in pieces, a GPU's whole; the indexer's pieces see the last keys."""
    names = ("linears", "expert_gemm", "sparse_attention")
    cpu, cuda = (passes.prefill(CONFIG, kind, 4096, 8192) for kind in ("cpu", "cuda"))
    assert flop(only(cpu, *names)) == flop(only(cuda, *names))
    whole, pieces = (flop(only(parts, "lightning_indexer")) for parts in (cuda, cpu))
    assert whole < pieces < 1.5 * whole


def test_a_batch_reaches_more_experts_and_never_more_than_there_are() -> None:
    calls = []
    for batch in (1, 16, 4096):
        (part,) = only(passes.decode(CONFIG, "cpu", batch, 8192), "expert_gemm")
        calls.append(part.works[0][1] // 75)
    assert calls[0] == 8
    assert 8 < calls[1] < 128
    assert calls[2] == 256


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> records.RunRecord:
    """The embedded checkpoint's passes: every work is small."""
    from glm5q import tiny

    output = tmp_path_factory.mktemp("bench")
    before = torch.get_num_threads()
    options = BenchOptions(
        "cpu", str(tiny.path()), batches=(1, 4), contexts=(256,), rounds=2, threads=1, warm=True,
        output=output,
    )  # fmt: skip
    found = bench(options, lambda *_: None)
    assert torch.get_num_threads() == before
    assert records.read_record(output) == found
    assert "decode step, assembled" in (output / "report.html").read_text()
    return found


def test_passes_are_sums_of_their_parts(run: records.RunRecord) -> None:
    assert [(one.stage, one.batch) for one in run.assembled] == [
        ("decode", 1), ("decode", 4), ("prefill", 1)
    ]  # fmt: skip
    for one in run.assembled:
        assert one.total_s == pytest.approx(sum(part.time_s for part in one.parts))
        assert one.tokens_per_s == pytest.approx(one.tokens / one.total_s)
    assert any("never run" in note for note in run.notes)
    assert any("load average" in note for note in run.notes)
    sweep = run.sweeps[0]
    best = max(sweep.points, key=lambda point: point.tokens_per_s)
    assert (sweep.how, sweep.peak_batch) == ("computed", best.batch)


def test_rows_are_judged_and_their_floors_are_measured(run: records.RunRecord) -> None:
    ours = [row for row in run.latency if row.op != "linear"]
    assert {row.op for row in ours} == {"lightning_indexer", "sparse_attention", "expert_gemm"}
    assert all(row.problem is None and row.how == "measured" for row in run.latency)
    timed = [row for row in ours if row.cpu_s is not None]
    assert timed
    assert all(row.floor_s and row.bound for row in timed)
    assert all(row.p99_s is None for row in run.latency)  # two calls have no 99th percentile
    assert run.slowest is not None
    assert not run.latency[run.slowest].implementation.startswith(("torch-", "onnxruntime"))


def test_a_wrong_result_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_ops.lightning_indexer import cpu as indexer
    from fused_ops.lightning_indexer.reference import select_topk

    request = OpRequest("select_topk", "f32", {"rows": 9, "keys": 300, "topk": 64})
    monkeypatch.setitem(shapes.DEFAULTS, "cpu", (request,))
    for isa in ("avx512", "avx2", "portable"):
        monkeypatch.setattr(
            indexer, f"select_topk_{isa}", lambda scores, topk: select_topk(scores, topk).flip(1)
        )
    options = BenchOptions("cpu", ops=("select_topk",), rounds=1, warm=True)
    found = bench(options, lambda *_: None)
    ours = [row for row in found.latency if row.implementation.startswith("cpp-")]
    if not ours:
        pytest.skip("not run: no compiled implementation here")
    assert "another order" in str(ours[0].problem)
    assert any(note.startswith("WRONG: select_topk") for note in found.notes)
    assert found.assembled == []


def test_a_recipe_decides_the_experts_that_are_timed(tmp_path: Path) -> None:
    from glm5q import tiny

    options = BenchOptions(
        "cpu", str(tiny.path()), batches=(1,), contexts=(256,), rounds=1, threads=1, warm=True,
        output=tmp_path / "out", recipe=str(tmp_path / "own.yaml"),
    )  # fmt: skip
    raw = yaml.safe_load(files.text("cpu"))
    raw["weights"]["routed_expert"] |= {"bits": 8, "group_size": None}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    found = bench(options, lambda *_: None)
    experts = [row for row in found.latency if row.op == "expert_gemm" and row.cpu_s is not None]
    assert {(row.dtype, row.shape["group"]) for row in experts} == {("int8+int8", 0)}
    assert found.recipe is not None
    assert found.recipe.verification == "edited from cpu; not verified"
    assert any("experts int8 per channel with int8 activations" in note for note in found.notes)
    assert "edited from cpu" in (tmp_path / "out" / "report.html").read_text()
    wide = passes.decode(CONFIG, "cuda", 4, 8192, ("int8+int8", 0))
    works = [work for part in wide for work, _ in part.works if isinstance(work, OpRequest)]
    assert {(w.dtype, w.shape["group"]) for w in works if w.op == "expert_gemm"} == {
        ("int8+int8", 0)
    }


def test_a_page_shows_another_records_times(run: records.RunRecord, tmp_path: Path) -> None:
    bare = run.model_copy(update={"latency": [], "sweeps": [], "assembled": [], "notes": ["own"]})
    (tmp_path / "run").mkdir()
    records.write_record(bare, tmp_path / "run" / "report.json")
    records.write_record(run, tmp_path / "bench.json")
    shown, page = render(tmp_path / "run", None, tmp_path / "bench.json")
    assert shown.latency == run.latency
    assert shown.slowest == run.slowest
    assert shown.notes[0] == "own"
    assert any("glm5q" in note and run.created in note for note in shown.notes)
    assert run.latency[run.slowest or 0].op in page.read_text()
    assert records.read_record(tmp_path / "run").latency == []  # the record keeps its own
    with pytest.raises(UserError, match="no op times"):
        render(tmp_path / "bench.json", None, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"sweep": "batch=1,x"}, "'x' is no size"),
        ({"context": "0"}, "'0' is no size"),
        ({"sweep": "batch=-4"}, "'-4' is no size"),
        ({"context": "99999k"}, "is no size"),
    ],
)
def test_sizes_that_are_none_are_refused(words: dict[str, str], message: str) -> None:
    given = {"sweep": None, "context": None, "ops": None, **words}
    with pytest.raises(UserError, match=message):
        bench_options(target="cpu", **given)


def test_sizes_are_read() -> None:
    found = bench_options(target="cpu", sweep="batch=1,4,16", context="8k,200k", ops=None)
    assert (found.batches, found.contexts) == ((1, 4, 16), (8192, 204800))


def test_a_target_that_this_machine_is_not_is_refused() -> None:
    for target in ("metax-c500", "ascend-910c"):
        with pytest.raises(UserError, match="nothing of ours is timed on it"):
            bench(BenchOptions(target), lambda *_: None)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            bench(BenchOptions("h200"), lambda *_: None)
    with pytest.raises(UserError, match="no such op"):
        bench(BenchOptions("cpu", ops=("softmax",)), lambda *_: None)
