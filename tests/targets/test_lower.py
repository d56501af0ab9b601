"""`glm5q lower`: the table answers for every implementation, and what it writes is what it says."""

import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from fused_ops import build
from fused_ops.op import OpRequest, UnsupportedOp, load
from glm5q.errors import UserError
from glm5q.pipeline.lower import Lowered, expert_dtype, lower, requests
from recipes import schema
from targets import lower_cpu, shapes
from targets.lowering import Stage

triton = pytest.mark.skipif(find_spec("triton") is None, reason="not run: triton is not installed")


def small() -> OpRequest:
    return OpRequest("select_topk", "f32", {"rows": 64, "keys": 4096, "topk": 256})


def test_cpu_library_is_compiled_and_written_with_its_hash(tmp_path: Path) -> None:
    if build.unavailable("portable"):
        pytest.skip(f"not run: {build.unavailable('portable')}")
    found = lower("cpu", output=tmp_path / "out")
    assert found.ok
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (file,) = manifest["files"]
    content = (tmp_path / "out" / file["file"]).read_bytes()
    assert content[:4] == b"\x7fELF"
    assert file["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["versions"]["c++"] == build.compiler_version()
    assert len(manifest["ops"]) == len(shapes.GLM5_CPU)
    assert b"glm5q_sparse_attention_avx2" in content


def test_every_other_implementation_is_answered_for() -> None:
    for row in lower("cpu").rows:
        names = [i.name for i in load(row.request.op).implementations]
        assert sorted([row.chosen, *(name for name, _ in row.refused)]) == sorted(names)
        assert all(why for _, why in row.refused)


def test_no_compiler_is_a_failed_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_outcome", lambda: "no C++ compiler found (install g++)")
    (stage,) = lower_cpu.lower(tmp_path)
    assert stage.error == "no C++ compiler found (install g++)"
    assert not Lowered("cpu", (), (stage,), None).ok


@triton
def test_cuda_code_is_compiled_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (small(),))
    found = lower("a100", output=tmp_path / "out")
    (stage,) = found.stages
    assert (stage.op, stage.implementation, stage.error) == ("select_topk", "triton", None)
    by_kind = {Path(name).suffix: tmp_path / "out" / name for name in stage.artefacts}
    assert set(by_kind) == {".ttir", ".ttgir", ".ptx", ".cubin"}
    assert re.search(r"^\.target sm_80", by_kind[".ptx"].read_text(), re.M)
    assert by_kind[".cubin"].read_bytes()[:4] == b"\x7fELF"
    files = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert {tmp_path / "out" / file["file"] for file in files} == set(by_kind.values())
    assert files[0]["constants"]["SEGMENT"] > 0


@triton
def test_a_kernel_beyond_the_chips_shared_memory_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from targets import lower_cuda

    tight = lower_cuda.Chip(80, 108, 100)
    monkeypatch.setitem(lower_cuda.CHIPS, "a100", tight)
    (stage,) = lower_cuda.lower("a100", (small(),), tmp_path)
    assert stage.error is not None
    assert "shared memory, a100 has 100" in stage.error


@triton
def test_launches_are_put_back() -> None:
    from fused_ops.lightning_indexer import triton_launch
    from targets import lower_cuda

    before = dict(vars(triton_launch))
    (implementation,) = (i for i in load("select_topk").implementations if i.name == "triton")
    launches = lower_cuda.launches_of(small(), implementation, "h200")
    assert [launch.kernel for launch in launches] == [triton_launch.select]
    assert {name: vars(triton_launch)[name] for name in before} == before


def test_a_recipes_number_formats_are_lowered() -> None:
    assert expert_dtype(schema.load("h200")) == ("int4+fp8", 128)
    asked = requests("cuda", schema.load("h200"))
    experts = [request for request in asked if request.op == "expert_gemm"]
    assert {(r.dtype, r.shape["group"]) for r in experts} == {("int4+fp8", 128)}
    assert len(experts) == 3


def test_nothing_runs_on_a_declared_chip_in_one_line() -> None:
    with pytest.raises(UnsupportedOp, match="nothing runs it on declared") as found:
        lower("metax-c500")
    assert "\n" not in str(found.value)


def test_what_a_user_gets_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="not empty"):
        lower("cpu", output=tmp_path)
    with pytest.raises(UserError, match="--setup"):
        lower("cpu", setup=True)
    with pytest.raises(UserError, match="no such target"):
        lower("h300")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_missing_ascend_compiler_is_one_line_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--setup|use Linux"):
        lower("ascend-910c", environment=tmp_path)


def test_failed_stages_are_shown() -> None:
    stage = Stage("select_topk", "triton", "h200", "select f32", "ptxas: out of registers")
    lines = Lowered("h200", (), (stage,), None).lines()
    assert lines == [
        "h200: select_topk triton, select f32: FAILED: ptxas: out of registers",
        "0 of 1 stages passed",
    ]


def test_what_a_pass_shows_is_said_once() -> None:
    stages = tuple(
        Stage("select_topk", "triton", chip, "L2", None, usage={"UB": 194592}, proves="it fits")
        for chip in ("910B1", "910B4")
    )
    lines = Lowered("ascend-910b", (), stages, None).lines()
    assert lines[0] == "910B1: select_topk triton, L2: ok UB 194,592"
    assert lines[2:] == ["2 of 2 stages passed", "A pass shows: it fits"]
