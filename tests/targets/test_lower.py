"""`glm5q lower`: the table answers for every implementation, and what it writes is what it says."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from fused_ops import build
from fused_ops.op import OpRequest, UnsupportedOp, load
from glm5q.errors import UserError
from glm5q.pipeline.lower import Lowered, expert_dtype, lower, requests
from recipes import files
from recipes.tiles import TILES
from targets import base, lower_cpu, shapes
from targets.lowering import Stage
from tests.commands import refused

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
    listed = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert {tmp_path / "out" / file["file"] for file in listed} == set(by_kind.values())
    assert listed[0]["constants"]["SEGMENT"] > 0


def attention() -> OpRequest:
    shape = {"tokens": 64, "keys": 4096, "heads": 64, "dim": 576, "value_dim": 512}
    return OpRequest("sparse_attention", "bf16", {**shape, "selected": 2048}, frozenset({"decode"}))


@triton
def test_hopper_gets_the_kernel_with_warps_of_two_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (attention(),))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # empty: it is compiled
    found = lower("h200", output=tmp_path / "out")
    assert found.ok
    assert [row.chosen for row in found.rows] == ["gluon"]
    assert {stage.implementation for stage in found.stages} == {"gluon"}
    # 64 programs leave half of an H200's processors idle, so that parts are joined.
    stage, _ = found.stages
    assert [one.stage for one in found.stages] == ["attend bf16", "join bf16"]
    by_kind = {Path(name).suffix: tmp_path / "out" / name for name in stage.artefacts}
    assert by_kind[".cubin"].read_bytes()[:4] == b"\x7fELF"
    ptx = by_kind[".ptx"].read_text()
    assert re.search(r"^\.target sm_90", ptx, re.M)
    assert "setmaxnreg.dec" in ptx
    assert "wgmma.mma_async" in ptx


@triton
@pytest.mark.parametrize("chip", ["a100", "rtx-4090"])
def test_other_chips_get_the_portable_kernel(
    chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (attention(),))
    found = lower(chip, output=tmp_path / "out")
    (row,) = found.rows
    assert row.chosen == "triton"
    assert dict(row.refused)["gluon"] == f"is for h20, h200, not {chip}"
    assert {(s.implementation, s.error) for s in found.stages} == {("triton", None)}


@triton
def test_gluon_is_held_to_shared_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from targets import lower_cuda

    tight = lower_cuda.Chip(90, 132, 99 << 10)
    monkeypatch.setitem(lower_cuda.CHIPS, "h200", tight)
    stages = lower_cuda.lower("h200", ((attention(), "gluon"),), tmp_path)
    assert "h200 has 101376" in str(stages[0].error)


class _Elsewhere:
    """Triton's view of a machine with an H200, as far as a launch asks before it compiles."""

    def get_current_device(self) -> int:
        return 990  # of nobody: kernels keep what they compiled by this number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def h200_here() -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Elsewhere())
    yield
    driver._active = before


@triton
@pytest.mark.usefixtures("h200_here")
@pytest.mark.parametrize(("request_", "name"), [(small(), "triton"), (attention(), "gluon")])
def test_a_launch_looks_up_what_was_compiled(request_: OpRequest, name: str) -> None:
    """Triton's own launch, up to where it would start the kernel, comes to the same key."""
    from targets import lower_cuda

    (implementation,) = (i for i in load(request_.op).implementations if i.name == name)
    launches = lower_cuda.launches_of(request_, implementation, "h200")
    assert launches
    for launch in launches:
        ahead, _ = lower_cuda.compile_launch(launch, "h200")
        asked = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.kwargs)
        assert asked.hash == ahead.hash


NVIDIA = [name for name in files.shipped() if "sparse_attention" in files.load(name).tiles]
NVIDIA = [name for name in NVIDIA if base.load(files.load(name).target).kind == "cuda"]


def seen(launches: list[Any]) -> list[Any]:
    """Launches with each tensor as its dtype and shape, to compare."""

    def plain(x: Any) -> Any:
        return (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x

    return [
        (one.kernel, one.grid, [plain(arg) for arg in one.args], one.kwargs) for one in launches
    ]


def of_cuda() -> Iterator[tuple[OpRequest, Any]]:
    """GLM-5's requests with every implementation that a recipe's tiles reach."""
    channel = {"experts": 16, "in": 6144, "out": 4096, "rows": 512, "group": 0}
    others = (replace(attention(), dtype="fp8"), OpRequest("expert_gemm", "int8+int8", channel))
    for request in (*shapes.GLM5_CUDA, *others):
        if request.shape.get("tokens") != 4096 or request.op != "sparse_attention":
            for implementation in load(request.op).implementations:
                if implementation.tuned and request.dtype in implementation.dtypes:
                    yield request, implementation


def test_every_nvidia_chip_has_a_recipe_with_tiles() -> None:
    chips = {name for name in base.TARGETS if base.load(name).kind == "cuda"}
    assert {files.load(name).target for name in NVIDIA} == chips
    assert {name for name in TILES if base.load(name).kind == "cuda"} == chips
    kinds = {base.load(name).kind for name in TILES}
    assert kinds == {"cuda", "ascend"}
    (gluon,) = (i for i in load("sparse_attention").implementations if i.name == "gluon")
    assert gluon.targets == {
        name for name, tables in TILES.items() if "sparse_attention-gluon" in tables
    }


@triton
@pytest.mark.parametrize("name", NVIDIA)
def test_the_shipped_tiles_are_what_is_launched_without_a_recipe(name: str) -> None:
    from targets import lower_cuda

    recipe = files.load(name)
    for request, implementation in of_cuda():
        if implementation.targets is None or recipe.target in implementation.targets:
            without, with_it = (
                seen(lower_cuda.launches_of(request, implementation, recipe.target, tiles))
                for tiles in (None, recipe.tiles)
            )
            assert without == with_it
            assert set(implementation.tuned.values()) <= set(recipe.tiles)


@triton
@pytest.mark.parametrize("table", TILES["h200"])
def test_every_tile_reaches_a_launch(table: str) -> None:
    from targets import lower_cuda

    tiles = files.load("h200").tiles
    for name, size in tiles[table].items():
        other = tiles | {table: tiles[table] | {name: size // 2}}
        changed = [
            seen(lower_cuda.launches_of(request, implementation, "h200", tiles))
            != seen(lower_cuda.launches_of(request, implementation, "h200", other))
            for request, implementation in of_cuda()
            if implementation.tuned["tiles"] == table
        ]
        assert any(changed), f"{table}.{name} changes nothing"


def own(folder: Path, **changes: dict[str, int]) -> Path:
    """h200 with other tiles, as a file."""
    raw = yaml.safe_load(files.text("h200"))
    for table, sizes in changes.items():
        raw["tiles"][table] |= sizes
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump(raw | {"name": "own"}))
    return file


@triton
def test_a_recipes_tiles_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (small(),))
    file = str(own(tmp_path, select_topk={"SEGMENT": 512}))
    found = {
        target: lower(target, recipe) for target, recipe in (("h200", file), ("a100", file))
    } | {"shipped": lower("h200", "h200")}
    sizes = {name: one.stages[0].usage["SEGMENT"] for name, one in found.items()}
    assert sizes == {"h200": 512, "a100": 1024, "shipped": 1024}
    assert found["h200"].lines()[-2] == f"1 of 1 stages passed; tiles: {file}'s"
    assert found["h200"].as_json()["tiles"] == f"{file}'s"
    assert found["a100"].tiles == f"the launches' own, as {file}'s are for h200"


@triton
def test_an_op_that_only_an_engine_runs_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """int4 weights with bfloat16 activations, recipe a100's, are Marlin's: no kernel of ours."""
    gemm = next(one for one in shapes.GLM5_CUDA if one.op == "expert_gemm")
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (small(), gemm))
    found = lower("a100", "a100")
    assert [row.chosen for row in found.rows] == ["triton", None]
    assert len(found.stages) == 1
    assert any("nothing of ours" in line for line in found.lines())


@triton
def test_what_the_assembler_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton prints the whole PTX of it; standard output is for the answer."""
    index = next(one for one in shapes.GLM5_CUDA if one.op == "lightning_indexer")
    monkeypatch.setitem(shapes.DEFAULTS, "cuda", (index,))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = lower("h200", str(own(tmp_path, lightning_indexer={"REGISTERS": 24})))
    assert not found.ok
    assert "egister" in str(found.stages[0].error)
    assert capsys.readouterr().out == ""


def test_a_bad_tile_is_one_line_with_recipe_and_key(tmp_path: Path) -> None:
    file = own(tmp_path, lightning_indexer={"REGISTERS": 100})
    says = (str(file), "tiles.lightning_indexer.REGISTERS: 100", "a multiple of 8")
    refused("lower", "--target", "h200", "--recipe", file, says=says)
    refused("bench", "--recipe", file, says=says)


@triton
def test_a_kernel_beyond_the_chips_shared_memory_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from targets import lower_cuda

    tight = lower_cuda.Chip(80, 108, 100)
    monkeypatch.setitem(lower_cuda.CHIPS, "a100", tight)
    (stage,) = lower_cuda.lower("a100", ((small(), "triton"),), tmp_path)
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
    assert expert_dtype(files.load("h200")) == ("int4+fp8", 128)
    asked = requests("cuda", files.load("h200"))
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


@triton
def test_a_decode_launches_a_block_a_sequence() -> None:
    """As many again found no query and scanned the last sequence's keys for nobody."""
    from targets import lower_cuda

    (one,) = (i for i in load("lightning_indexer").implementations if i.name == "triton")
    shape = {"tokens": 1, "keys": 65536, "heads": 32, "dim": 128, "topk": 2048, "sequences": 64}
    request = OpRequest("lightning_indexer", "bf16", shape, frozenset({"decode", "ragged"}))
    launch = lower_cuda.launches_of(request, one, "h200")[0]
    works = launch.args[launch.kernel.arg_names.index("works")]
    assert works == 64 * launch.kwargs["PARTS"]
    assert launch.kwargs["PARTS"] == 132 * 3 // 64


@triton
def test_strides_that_gluon_cannot_copy_go_to_the_portable_kernel() -> None:
    from fused_ops.sparse_attention.gluon_launch import _aligned

    rows = torch.empty((4, 640), dtype=torch.bfloat16)
    assert _aligned(rows[:, :576])
    assert not _aligned(torch.empty((4, 584), dtype=torch.bfloat16)[:, :576])  # 16 bytes divide it
