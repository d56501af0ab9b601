"""The AVX-512 files on a CPU without AVX-512, their intrinsics emulated by SIMDe's headers.

It shows that the code computes what it should, not that it is fast; where libsimde-dev is not
installed it is not run, and said so.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fused_ops import build, op, testkit

ISAS = ("avx512", "avx512bf16")
SOURCE = Path(build.__file__).parent
STUB = "#define SIMDE_ENABLE_NATIVE_ALIASES\n#include <simde/x86/avx512.h>\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, compiler = tmp_path_factory.mktemp("emulated"), shutil.which("c++")
    if compiler is None:
        pytest.skip("not run: no C++ compiler")
    (folder / "immintrin.h").write_text(STUB)
    probe = [compiler, "-E", "-x", "c++", str(folder / "immintrin.h"), "-o", "/dev/null"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("not run: SIMDe's headers are not installed (apt install libsimde-dev)")
    units = []
    for isa in ISAS:
        text = (SOURCE / f"csrc/isa_{isa}.cpp").read_text()
        unit = folder / f"{isa}.cpp"
        unit.write_text(re.sub(r"#pragma GCC target.*", '#pragma GCC target("avx2,fma")', text))
        units.append(str(unit))
    include = [f"-I{folder}", f"-I{SOURCE}", f"-I{SOURCE / 'csrc'}"]
    flags = ["-O1", "-fPIC", "-shared", "-fopenmp", "-std=c++17", "-w"]
    output = folder / "emulated.so"
    subprocess.run([compiler, *flags, *include, *units, "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


PAIRS = [
    pytest.param(name, implementation, id=f"{name}-{implementation.name}")
    for name in op.OPS
    for implementation in op.load(name).implementations
    if implementation.name.removeprefix("cpp-") in ISAS
]


@pytest.mark.parametrize(("name", "implementation"), PAIRS)
def test_avx512_computes_the_right_thing(
    name: str,
    implementation: op.Implementation,
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if build.unavailable("avx2"):
        pytest.skip(f"not run: {build.unavailable('avx2')}")
    monkeypatch.setattr(build, "unavailable", lambda _: None)
    monkeypatch.setattr(build, "function", lambda op, isa: library[f"glm5q_{op}_{isa}"])
    function = op.resolve(implementation.entry)
    verdicts = {
        case.name: testkit.run(case, function).problem
        for case in testkit.fitting(name, implementation, "cpu")
    }
    assert verdicts
    assert not {case: problem for case, problem in verdicts.items() if problem}
