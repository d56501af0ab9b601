"""Compiles the C++ of the CPU implementations on first use and says why where it cannot.

One shared library holds every instruction set; which of them this CPU runs is asked at run time.
The result is kept in the user's cache under a hash of the sources, flags and compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512bf16": 3}
CFLAGS = ["-O3", "-fopenmp", "-std=c++17"]
HEADERS = (
    "csrc/all_ops.h",
    "csrc/args.h",
    "csrc/vec.h",
    "expert_gemm/dot.h",
    "expert_gemm/gemm.h",
    "lightning_indexer/indexer.h",
    "sparse_attention/attention.h",
    "sparse_attention/cells_bf16.h",
    "sparse_attention/cells_float.h",
    "sparse_attention/room.h",
)
UNITS = tuple(f"csrc/isa_{isa}.cpp" for isa in ISAS)


class CannotBuild(Exception):  # noqa: N818 - caught here, never shown as an error
    """There is no library; `str()` says why in one line."""


def unavailable(isa: str) -> str | None:
    """Returns why implementations of `isa` cannot run here, or None. Compiles on the first call."""
    try:
        runs = _library().glm5q_runs(ISAS[isa])
    except CannotBuild as problem:
        return str(problem)
    return None if runs else f"this CPU lacks {isa}"


def function(name: str, isa: str) -> Any:
    """Returns the C function `glm5q_<name>_<isa>`: a pointer in, 0 out if all went well.

    Raises RuntimeError where `unavailable` would have said why.
    """
    if problem := unavailable(isa):
        raise RuntimeError(f"{name}: cpp-{isa} cannot run here: {problem}")
    return getattr(_library(), f"glm5q_{name}_{isa}")


def library_file() -> Path:
    """Returns the compiled library, compiling it if need be. Raises CannotBuild."""
    return Path(_library()._name)


def compiler_version() -> str | None:
    """Returns the C++ compiler's first line about itself; None where there is none."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return told.stdout.splitlines()[0]


def cache_folder() -> Path:
    """Returns where compiled libraries are kept: glm5q in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "glm5q"


@cache
def _outcome() -> ctypes.CDLL | str:
    """The library, or why there is none; asked once a process, failure included."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "no C++ compiler found (install g++)"
    try:
        target = cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
        if not target.exists():
            _compile(target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = next((line for line in lines if "error" in line.lower()), lines[0])
        return f"compiling failed: {cause.strip()}"


def _library() -> ctypes.CDLL:
    found = _outcome()
    if isinstance(found, str):
        raise CannotBuild(found)
    return found


def _fingerprint(compiler: str) -> str:
    """Hash of everything the library's bytes follow from."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + " ".join(CFLAGS).encode())
    for name in (*UNITS, *HEADERS):
        digest.update(files("fused_ops").joinpath(name).read_bytes())
    return digest.hexdigest()[:16]


def _compile(target: Path) -> None:
    """Builds in a folder of its own and renames, so that neither a kill nor a race leaves half."""
    from torch.utils import cpp_extension

    target.parent.mkdir(parents=True, exist_ok=True)
    source = Path(str(files("fused_ops")))
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        cpp_extension.load(
            name="glm5q_cpu",
            sources=[str(source / unit) for unit in UNITS],
            extra_cflags=CFLAGS,
            extra_ldflags=["-fopenmp"],
            extra_include_paths=[str(source)],
            build_directory=folder,
            is_python_module=False,
        )
        (Path(folder) / "glm5q_cpu.so").replace(target)
