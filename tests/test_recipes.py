"""Recipes are strict: every shipped one validates, every misspelt or missing key is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5q.config import parse_config
from glm5q.errors import RecipeError
from glm5q.types import Role
from recipes import checks, files
from tests import small
from tests.commands import refused, run

SHIPPED = files.shipped()
Keys = tuple[str | int, ...]


@cache
def _as_json(name: str) -> str:
    return json.dumps(yaml.safe_load(files.text(name)))  # YAML's aliases would be edited together


def shipped_raw(name: str = "h200") -> dict[str, Any]:
    raw = json.loads(_as_json(name))
    assert isinstance(raw, dict)
    return raw


def refusal(raw: object, where: str = "mine.yaml") -> str:
    with pytest.raises(RecipeError) as found:
        files.parse(raw, where) if isinstance(raw, str) else files.validated(raw, where)
    line = str(found.value)
    assert line.startswith(f"{where}:")
    assert "\n" not in line
    assert ";" in line, f"no fix is offered: {line}"
    return line


def tables(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Every table in a recipe."""
    if isinstance(value, dict):
        yield path
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield from tables(inside, (*path, key))


def at(raw: Any, path: Keys) -> Any:
    for key in path:
        raw = raw[key]
    return raw


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes(name: str) -> None:
    recipe = files.load(name)
    assert recipe.name == name
    assert set(recipe.weights) == set(Role)
    assert run("recipes", "validate", name).exit_code == 0
    assert run("recipes", "show", name).stdout == files.text(name)
    assert name in run("recipes", "list").stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_recipes_round_trip(name: str) -> None:
    recipe = files.load(name)
    again = files.parse(yaml.safe_dump(recipe.model_dump(mode="json")), name)
    assert again == recipe
    assert again.content_hash() == recipe.content_hash()


def test_hash_covers_every_value() -> None:
    """Changing any number, text or choice to another valid one changes the hash."""
    seen = {files.load("h200").content_hash()}
    changes: list[tuple[Keys, Any]] = [
        (("calibration", "seed"), 1), (("calibration", "windows"), 3), (("mtp",), "quantize"),
        (("weights", "routed_expert", "damping"), 0.06), (("packing",), "int8"),
        (("weights", "routed_expert", "clip", "steps"), 31), (("target",), "h20"),
        (("weights", "kv_b"), {"method": "keep", "dtype": "float16"}),
        (("overrides",), [{"role": "kv_b", "layers": [1], "plan": {"method": "keep"}}]),
        (("tiles", "lightning_indexer", "WARPS"), 8),
    ]  # fmt: skip
    for path, value in changes:
        changed = shipped_raw()
        at(changed, path[:-1])[path[-1]] = value
        seen.add(files.validated(changed, "mine").content_hash())
    assert len(seen) == len(changes) + 1


@pytest.mark.parametrize("name", SHIPPED)
def test_every_misspelt_key_is_refused(name: str) -> None:
    """Each key of each table: misspelt, missing, in other case, and one more beside it."""
    for path in tables(shipped_raw(name)):
        for key in at(shipped_raw(name), path):
            for wrong in (f"{key}s", key[:-1], key.upper(), f" {key}", key.replace("_", "-")):
                raw = shipped_raw(name)
                table = at(raw, path)
                if wrong in table or not wrong:
                    continue
                table[wrong] = table[key]
                line = refusal(raw)
                assert wrong.strip() in line or "unknown" in line
                del table[key]
                refusal(raw)


OPTIONAL = {
    ("dtype",), ("overflow",), ("overrides",), ("effort",), ("mtp_embeddings",), ("tiles",),
    ("ridge",), ("signed",), ("top_up",), ("correction",), ("inner",),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_decided_by_leaving_it_out(name: str) -> None:
    for path in tables(shipped_raw(name)):
        for key in at(shipped_raw(name), path):
            raw = shipped_raw(name)
            del at(raw, path)[key]
            if (key,) in OPTIONAL:
                continue
            assert key in refusal(raw)


VALUES: dict[str, tuple[Keys, Any, str]] = {
    "version": (("version",), 2, "version"),
    "version a text": (("version",), "1", "version"),
    "no name": (("name",), "", "name"),
    "name a path": (("name",), "../../elsewhere", "name"),
    "name absolute": (("name",), "/tmp/x", "name"),
    "format": (("format",), "gguf", "format"),
    "weights a list": (("weights",), ["routed_expert"], "weights"),
    "weights null": (("weights",), None, "weights"),
    "unknown role": (("weights", "router_bias"), {"method": "keep"}, "unknown role"),
    "unknown method": (("weights", "attention", "method"), "awq", "awq"),
    "three bits": (("weights", "routed_expert", "bits"), 3, "bits"),
    "bits a text": (("weights", "routed_expert", "bits"), "4", "bits"),
    "group zero": (("weights", "routed_expert", "group_size"), 0, "group_size"),
    "group negative": (("weights", "routed_expert", "group_size"), -128, "group_size"),
    "group a text": (("weights", "routed_expert", "group_size"), "128", "group_size"),
    "group true": (("weights", "routed_expert", "group_size"), True, "group_size"),
    "activation": (("weights", "routed_expert", "activation"), "int4", "activation"),
    "scale": (("weights", "routed_expert", "scale_dtype"), "float16", "scale_dtype"),
    "damping zero": (("weights", "routed_expert", "damping"), 0, "damping"),
    "damping text": (("weights", "routed_expert", "damping"), "1e-2", "YAML takes 1e-2 for text"),
    "damping nan": (("weights", "routed_expert", "damping"), float("nan"), "damping"),
    "pooling endless": (("weights", "routed_expert", "pooling"), float("inf"), "pooling"),
    "order a number": (("weights", "routed_expert", "act_order"), 1, "act_order"),
    "clip above one": (("weights", "routed_expert", "clip", "lowest"), 1.5, "lowest"),
    "no clip steps": (("weights", "routed_expert", "clip", "steps"), 0, "steps"),
    "damping for rtn": (("weights", "attention", "damping"), 0.1, "unknown key"),
    "bits for keep": (("weights", "kv_b", "bits"), 8, "unknown key"),
    "windows": (("calibration", "windows"), 1, "windows"),
    "windows a text": (("calibration", "windows"), "64", "windows"),
    "length": (("calibration", "sequence_length"), 8, "sequence_length"),
    "held out": (("calibration", "held_out"), 0.5, "held_out"),
    "held out none": (("calibration", "held_out"), 0, "held_out"),
    "seed": (("calibration", "seed"), 0.5, "seed"),
    "mtp": (("mtp",), True, "mtp"),
    "group for eight bits": (("weights", "attention", "group_size"), 128, "group_size"),
    "four bits elsewhere": (("weights", "attention", "bits"), 4, "routed_expert"),
    "float16 embedding": (("weights", "embedding", "dtype"), "float16", "source"),
    "keep float8": (("weights", "kv_b", "dtype"), "float8", "dtype"),
    "overrides a table": (("overrides",), {"role": "kv_b"}, "overrides"),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_wrong_value(case: str) -> None:
    path, value, says = VALUES[case]
    raw = shipped_raw()
    at(raw, path[:-1])[path[-1]] = value
    assert says in refusal(raw)


W8 = {
    "method": "rtn", "bits": 8, "group_size": None, "scale_dtype": "bfloat16",
    "activation": "int8", "clip": {"steps": 1, "lowest": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("role", sorted(checks.KEEP_ONLY))
def test_roles_that_must_be_kept(role: Role) -> None:
    raw = shipped_raw()
    raw["weights"][role.value] = W8
    line = refusal(raw)
    assert f"weights.{role.value}" in line
    assert checks.KEEP_ONLY[role] in line


@pytest.mark.parametrize("role", list(Role))
def test_undecided_role_is_named(role: Role) -> None:
    raw = shipped_raw()
    del raw["weights"][role.value]
    assert f"role {role.value} is undecided" in refusal(raw)


def override(role: str, layers: list[Any], plan: object = None) -> dict[str, Any]:
    return {"role": role, "layers": layers, "plan": plan or {"method": "keep", "dtype": "float16"}}


OVERRIDES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown role": ([override("heads", [0])], "unknown role"),
    "no layers": ([override("attention", [])], "layers"),
    "layer a text": ([override("attention", ["0-3"])], "layers"),
    "layer negative": ([override("attention", [-1])], "layers"),
    "router": ([override("router", [1])], "router cannot differ"),
    "layer twice": ([override("attention", [1, 1])], "layer 1"),
    "decided twice": ([override("attention", [0, 1]), override("attention", [1])], "overrides.0"),
    "keep-only role": ([override("kv_b", [0], W8)], "must be kept"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_wrong_override(case: str) -> None:
    overrides, says = OVERRIDES[case]
    assert says in refusal(shipped_raw() | {"overrides": overrides})


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": ({"overrides": [override("attention", [4])]}, "layers 0 to 3"),
    "mtp kept": ({"overrides": [override("attention", [3])]}, "mtp: quantize"),
    "dense has no experts": ({"overrides": [override("routed_expert", [0])]}, "no routed_expert"),
    "moe has no dense": (
        {"overrides": [override("attention", [0]), override("dense_mlp", [2])]}, "no dense_mlp"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_override_that_would_change_nothing(case: str) -> None:
    change, says = UNFIT[case]
    recipe = files.validated(shipped_raw() | change, "mine")
    with pytest.raises(RecipeError, match=says):
        checks.check_fits(recipe, parse_config(small.GLM5))


@pytest.mark.parametrize("group", [96, 256, 1000])
def test_group_that_does_not_divide(group: int) -> None:
    raw = shipped_raw()
    raw["weights"]["routed_expert"]["group_size"] = group
    recipe = files.validated(raw, "mine")
    with pytest.raises(
        RecipeError, match=rf"routed_expert.group_size {group} does not divide .* 128"
    ):
        checks.check_fits(recipe, parse_config(small.GLM5))


TEXTS: dict[str, tuple[str, str]] = {
    "empty": ("", "not a recipe"),
    "a word": ("h200", "not a recipe"),
    "a list": ("- version: 1", "not a recipe"),
    "not yaml": ("version: 1\nname: [\n", "line 3 not YAML"),
    "tab": ("version:\n\t1", "line 2 not YAML"),
    "key twice": ("version: 1\nname: a\nname: b\n", "'name' twice"),
    "deep key twice": ("version: 1\ncalibration: {seed: 1, seed: 2}\n", "line 2 not YAML"),
    "date as key": ("2026-01-01: x", "mine.yaml"),
    "list as key": ("? [a, b]\n: c", "not YAML"),
    "holds itself": ("version: &a [*a]", "mine.yaml"),
    "python object": ("version: !!python/object/apply:os.getcwd []", "not YAML"),
    "control character": ("version: \x07", "not YAML"),
    "two documents": ("version: 1\n---\nversion: 1\n", "not YAML"),
    "nested without end": ("[" * 500, "mine.yaml"),
    "merge key": ("version: 1\n<<: {name: a}", "not YAML"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_is_no_recipe(case: str) -> None:
    text, says = TEXTS[case]
    assert says in refusal(text)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    refused("recipes", "validate", tmp_path / "absent.yaml", says=("absent.yaml", "no such recipe"))
    refused("recipes", "validate", tmp_path, says=("no such recipe",))
    refused("recipes", "show", "h300", says=("h300", "h200"))
    refused("recipes", "validate", "x" * 5000, says=("cannot be read",))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    refused("recipes", "validate", binary, says=("binary.yaml", "cannot be read"))


def test_formats_that_the_chip_does_not_multiply(tmp_path: Path) -> None:
    raw = shipped_raw() | {"target": "ascend-910c"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    refused("recipes", "validate", tmp_path / "own.yaml", says=("tiles", "h200"))
    del raw["tiles"]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    refused("recipes", "validate", tmp_path / "own.yaml", says=("fp8",))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw | {"target": "h2000"}))
    refused("recipes", "validate", tmp_path / "own.yaml", says=("h2000",))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dense": {"N": 64}}, "tiles.dense: no such op"),
        ({"select_topk": {"N": 2048, "K": 64}}, "tiles.select_topk.K: unknown"),
        ({"select_topk": {"N": 1000}}, "tiles.select_topk.N: 1000; give a power of two"),
        ({"select_topk": {"N": 0}}, "tiles.select_topk.N"),
    ],
)
def test_tiles_name_an_op_and_its_constants(change: dict[str, Any], says: str) -> None:
    raw = shipped_raw("atlas-800t-a3")
    raw["tiles"] |= change
    assert says in refusal(raw)


@pytest.mark.parametrize(
    ("table", "name", "size", "says"),
    [
        ("sparse_attention", "N", 48, "48; give a power of two from 16"),
        ("sparse_attention", "H", 8, "8; give a power of two from 16"),
        ("sparse_attention", "STAGES", 9, "9; give a number from 1 up to 8"),
        ("lightning_indexer", "REGISTERS", 100, "100; give a number, a multiple of 8, from 24 up"),
        ("lightning_indexer", "SEGMENT", 32, "32; give K or more"),
        ("lightning_indexer", "WARPS", 6, "6; give a power of two from 1 up to 16"),
        ("select_topk", "SEGMENT", 16384, "16384; give a power of two from 32 up to 8192"),
        ("expert_gemm", "WIDTH", 32, "32; give a power of two from 64"),
        ("sparse_attention-gluon", "REGISTERS", 84, "84; give a number, a multiple of 8"),
        ("sparse_attention-gluon", "PRODUCERS", 0, "sparse_attention-gluon.PRODUCERS"),
    ],
)
def test_a_gpus_tiles_are_what_its_kernels_can_have(
    table: str, name: str, size: int, says: str
) -> None:
    raw = shipped_raw("h200")
    raw["tiles"][table][name] = size
    assert f"tiles.{table}.{name}" in refusal(raw)
    assert says in refusal(raw)


def test_tiles_are_of_the_recipes_chip() -> None:
    raw = shipped_raw("h200")
    for target, says in (
        ("a100", "tiles: they are for h200 and h20, not a100; leave out tiles"),
        ("cpu", "tiles: no kernel for cpu reads them"),
        ("ascend-910c", "tiles: they are for h200 and h20, not ascend-910c"),
    ):
        raw["target"] = target
        assert says in refusal(raw)
    raw["target"] = "h20"
    assert files.validated(raw, "mine").tiles == files.load("h200").tiles
