"""Compiling on first use: once, into the user's cache, and with a reason where it fails."""

import shutil
from pathlib import Path

import pytest

from fused_ops import build


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and no outcome remembered before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_outcome", build._outcome.__wrapped__)
    return tmp_path / "glm5q"


def test_no_compiler_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert build.unavailable("portable") == "no C++ compiler found (install g++)"
    assert not fresh.exists()
    with pytest.raises(RuntimeError, match="cpp-portable cannot run here: no C"):
        build.function("expert_gemm", "portable")


def test_source_that_does_not_compile_is_a_reason_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("c++") is None:
        pytest.skip("not run: no C++ compiler")
    monkeypatch.setattr(build, "CFLAGS", ["-std=c++17", "-include", "no_such_header.h"])
    why = build.unavailable("portable")
    assert why is not None
    assert why.startswith("compiling failed:")
    assert "no_such_header.h" in why
    assert list(fresh.iterdir()) == []


def test_every_header_counts_in_the_fingerprint() -> None:
    root = Path(build.__file__).parent
    headers = {str(path.relative_to(root)) for path in root.rglob("*.h")}
    assert headers == set(build.HEADERS)
    assert {str(path.relative_to(root)) for path in root.rglob("*.cpp")} == set(build.UNITS)
