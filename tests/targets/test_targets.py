"""Every chip in the table loads, says where its figures come from, and refuses what it lacks."""

import subprocess
import sys
from typing import get_args

import pytest

from glm5q.errors import UserError
from targets import base
from targets.plan.roofline import GRADES


@pytest.mark.parametrize("name", base.TARGETS)
def test_every_target_loads_under_its_own_name(name: str) -> None:
    chip = base.load(name)
    assert chip.name == name
    assert {"bf16", "int8", "int4", "fp8"} <= set(chip.weights)
    for figure in (chip.memory_bytes, chip.bandwidth_bytes_s, *chip.peak_ops_s.values()):
        assert figure.source
        assert (figure.value is None) == (figure.grade == "unknown")


# What of ours was done on each chip: raised only by a run there.
VERIFICATION = {"h200": "run", "cpu": "run", "ascend-910b": "lowered", "ascend-910c": "lowered"}


@pytest.mark.parametrize("name", base.TARGETS)
def test_a_chip_claims_no_more_than_was_done_on_it(name: str) -> None:
    chip = base.load(name)
    assert chip.verification == VERIFICATION.get(name, "declared")
    figures = (chip.memory_bytes, chip.bandwidth_bytes_s, *chip.peak_ops_s.values())
    if name not in ("h200", "cpu"):
        assert "measured" not in {figure.grade for figure in figures}


@pytest.mark.parametrize("name", base.TARGETS)
def test_what_nobody_is_known_to_have_said_is_hearsay(name: str) -> None:
    chip = base.load(name)
    for figure in (chip.memory_bytes, chip.bandwidth_bytes_s, *chip.peak_ops_s.values()):
        said = ("commonly", "unconfirmed", "no primary source")
        vague = figure.value is not None and any(word in figure.source for word in said)
        assert (figure.grade == "hearsay") is vague, figure


def test_hearsay_is_weaker_than_press() -> None:
    grades = {base.load(name).memory_bytes.grade for name in ("cambricon-mlu590", "enflame-s60")}
    assert grades == {"hearsay"}
    assert base.load("ascend-910c").bandwidth_bytes_s.grade == "hearsay"
    assert set(GRADES) == set(get_args(base.Grade))
    assert GRADES.index("press") < GRADES.index("hearsay") < GRADES.index("unknown")


def test_every_chip_of_a_module_is_in_the_table() -> None:
    from targets import cpu, cuda, declared
    from targets.ascend import chips as ascend

    chips = {**cpu.CHIPS, **cuda.CHIPS, **ascend.CHIPS, **declared.CHIPS}
    assert set(chips) == set(base.TARGETS)


def test_a_chip_without_a_dtype_refuses_it() -> None:
    (problem,) = base.check_recipe_dtypes("ascend-910c", {"int4", "int8", "fp8"})
    assert "Ascend 910C" in problem
    assert "no fp8" in problem
    assert base.check_recipe_dtypes("a100", {"fp8"})
    assert base.check_recipe_dtypes("h200", {"int4", "int8", "fp8", "bf16"}) == []
    assert base.check_recipe_dtypes("cpu", {"int4", "int8"}) == []


def test_an_unconfirmed_dtype_is_allowed_and_said() -> None:
    assert base.check_recipe_dtypes("mthreads-s5000", {"int4"}) == []
    (line,) = base.unverified_recipe_dtypes("mthreads-s5000", {"int4", "int8"})
    assert "int4" in line


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"h300: no such target; use one of cpu, h200"):
        base.load("h300")


def test_reading_the_table_imports_nothing_heavy() -> None:
    code = (
        "import sys; from targets import base; base.check_recipe_dtypes('h200', {'fp8'});"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
