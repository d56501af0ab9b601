"""Every chip in the table loads, says where its figures come from, and refuses what it lacks."""

import subprocess
import sys

import pytest

from glm5q.errors import UserError
from targets import base


@pytest.mark.parametrize("name", base.TARGETS)
def test_every_target_loads_under_its_own_name(name: str) -> None:
    chip = base.load(name)
    assert chip.name == name
    assert {"bf16", "int8", "int4", "fp8"} <= set(chip.weights)
    for figure in (chip.memory_bytes, chip.bandwidth_bytes_s, *chip.peak_ops_s.values()):
        assert figure.source
        assert (figure.value is None) == (figure.grade == "unknown")


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
