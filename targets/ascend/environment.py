"""Huawei's open compilers in an environment of their own: one folder, two virtual environments.

triton-ascend is a whole `triton` under that name, so it never enters the main environment; it and
ascendnpu-ir are called as subprocesses. Debian's LLVM 19, the version they are built on, turns
their IR into x86-64 for the numeric stage alone.

`python -m targets.ascend.environment FOLDER` makes them and exits 1 if something is still missing.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from glm5q.errors import UserError

# triton-ascend needs pybind11 and does not say so.
FRONTEND = ("triton-ascend==3.2.0", "pybind11==3.0.1", "numpy>=2.1")
COMPILER = ("ascendnpu-ir==1.2.0",)
LLVM = Path("/usr/lib/llvm-19/bin")
LLVM_TOOLS = ("mlir-translate", "llc")


def python(folder: Path) -> Path:
    """Returns the Python that has triton-ascend."""
    return folder.absolute() / "frontend" / "bin" / "python"


def tool(folder: Path, name: str) -> Path:
    """Returns a program of ascendnpu-ir: bishengir-compile or bishengir-opt."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return (
        folder.absolute()
        / "compiler"
        / "lib"
        / version
        / "site-packages"
        / "ascendnpuir"
        / "bin"
        / name
    )


def setup(folder: Path) -> None:
    """Makes both environments under `folder` where they are not there yet: 820 MB, half a minute.

    Raises UserError where this machine cannot have them or the packages cannot be installed.
    """
    if why := _unfit():
        raise UserError(f"{folder}: {why}", "use Linux on x86-64 with Python 3.11")
    for name, packages in (("frontend", FRONTEND), ("compiler", COMPILER)):
        _install(folder / name, packages)


def missing(folder: Path) -> list[str]:
    """Returns what stages L1 to L3 lack, one line each with the fix; empty if nothing is."""
    return [*missing_compilers(folder), *missing_numeric()]


def missing_compilers(folder: Path) -> list[str]:
    """Returns what stages L1 and L2 lack."""
    if why := _unfit():
        return [f"{why}; use Linux on x86-64 with Python 3.11"]
    fix = "glm5q lower --target ascend-910c --setup, or make test-ascend"
    return [
        f"{name} is not installed under {folder}; run {fix}"
        for name, path in (
            (FRONTEND[0], folder / "frontend" / ".installed"),
            (COMPILER[0], folder / "compiler" / ".installed"),
        )
        if not path.exists()
    ]


def missing_numeric() -> list[str]:
    """Returns what stage L3 lacks besides the compilers."""
    lacking = [name for name in LLVM_TOOLS if not (LLVM / name).exists()]
    found = [
        f"{' and '.join(lacking)} of LLVM 19 not found in {LLVM}; "
        "run apt-get install mlir-19-tools llvm-19"
    ][: len(lacking)]
    if shutil.which("cc") is None:
        found.append("no C compiler found; run apt-get install gcc")
    return found


def _unfit() -> str | None:
    """Why this machine cannot have them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"this is {sys.platform} on {platform.machine()}"
    if sys.version_info[:2] != (3, 11):
        return "triton-ascend 3.2.0 is for another Python than this one"
    return None


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    """Makes one environment; the mark `.installed` names what is in it and comes last."""
    mark, wanted = folder / ".installed", "\n".join(packages)
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages],
    ):
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            lines = [line for line in found.stderr.splitlines() if "ERROR" in line.upper()]
            reason = (lines or found.stderr.splitlines() or ["no reason given"])[-1]
            raise UserError(f"{packages[0]} cannot be installed: {reason}", "check the network")
    mark.write_text(wanted)


def main() -> int:
    folder = Path(sys.argv[1])
    setup(folder)
    lacking = missing(folder)
    for line in lacking:
        print(line, file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
