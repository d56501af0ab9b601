"""What this machine is, found out without importing torch: every probe is small and may fail.

`import torch` is tried in another process, for a broken plugin (torch_npu without its CANN) breaks
it. A probe that fails says so in its result and never raises.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PACKAGES = (
    "torch", "triton", "torch_npu", "transformers", "tokenizers", "safetensors", "numpy",
    "compressed-tensors", "onnxruntime", "vllm", "sglang", "vllm-ascend",
)  # fmt: skip
ISA = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
       "asimd", "i8mm", "sve")  # fmt: skip
COPY_BYTES = 128 << 20
DISK_BYTES = 32 << 20
IMPORT_S = 60  # the longest an `import torch` is waited for
CANN = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
TORCH_PROBE = (
    "import json, torch; print(json.dumps({'cuda': torch.version.cuda, "
    "'usable': torch.cuda.is_available()}))"
)


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver names it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """What `import torch` gave in another process.

    `error` is the last line of its failure; `without_plugins` whether it works once device
    plugins (torch_npu) are kept out.
    """

    cuda: str | None = None
    usable: bool = False
    error: str | None = None
    without_plugins: bool = False


@dataclass(frozen=True)
class Machine:
    """What was found. Rates in bytes a second, None where not measured; versions None: absent."""

    python: str
    processor: str
    cores: int
    isa: tuple[str, ...]
    memory_bytes: int | None
    memory_bytes_s: float | None
    disk_write_bytes_s: float | None
    disk_read_bytes_s: float | None
    compiler: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    driver_cuda: str | None
    npus: int
    cann: str | None
    versions: Mapping[str, str | None]
    triton_wanted: str | None
    torch: Torch | None
    seconds: float = field(default=0.0, compare=False)


def probe(folder: Path) -> Machine:
    """Returns what this machine is; `folder` is where the disk is tried."""
    started = time.perf_counter()
    rate = copy_rate()  # before anything else runs beside it
    found = {name: installed(name) for name in PACKAGES}
    importing = _start_import(found["torch"])
    cpu, flags = processor()
    driver, driver_cuda, gpus = nvidia()
    written, read = disk_rates(folder)
    return Machine(
        python=platform.python_version(),
        processor=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        isa=tuple(name for name in ISA if name in flags),
        memory_bytes=memory_bytes(),
        memory_bytes_s=rate,
        disk_write_bytes_s=written,
        disk_read_bytes_s=read,
        compiler=shutil.which("c++") or shutil.which("g++"),
        gpus=gpus,
        driver=driver,
        driver_cuda=driver_cuda,
        npus=len(list(Path("/dev").glob("davinci[0-9]*"))),
        cann=cann(),
        versions=found,
        triton_wanted=triton_wanted(),
        torch=_finish_import(importing),
        seconds=time.perf_counter() - started,
    )


def installed(package: str) -> str | None:
    """Returns a package's version from its metadata, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def triton_wanted() -> str | None:
    """Returns the triton that the installed torch asks for in its metadata; a CPU build: None."""
    try:
        wanted = requires("torch") or []
    except PackageNotFoundError:
        return None
    for requirement in wanted:
        if found := re.match(r"triton\s*\(?==\s*([\d.]+)", requirement):
            return found[1]
    return None


def memory_bytes() -> int | None:
    """Returns the machine's main memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def copy_rate() -> float | None:
    """Returns bytes read and written a second by the best of five copies on one thread."""
    try:
        import numpy as np
    except ImportError:
        return None
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPY_BYTES / best


def disk_rates(folder: Path) -> tuple[float | None, float | None]:
    """Returns bytes written and read a second of a file in `folder`, which is gone afterwards.

    Written through to the disk. Read once the system was asked to forget it; where it does not
    (tmpfs), that is memory's rate.
    """
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = DISK_BYTES / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(1 << 20):
                pass
            return written, DISK_BYTES / (time.perf_counter() - start)
    except OSError:
        return None, None


def processor() -> tuple[str, set[str]]:
    """Returns the processor's name and its feature flags."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), set()
    lines = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", text, re.M))
    name = lines.get("model name", platform.machine()).strip()
    return name, set((lines.get("flags") or lines.get("Features") or "").split())


def nvidia() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    """Returns the driver, the newest CUDA it runs, and its GPUs; nothing without nvidia-smi."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    listed, header = _output(*query), _output("nvidia-smi")
    if listed is None:
        return None, None, ()
    gpus, driver = [], None
    for line in listed.splitlines():
        if row := re.fullmatch(r"(.+), (\d+) MiB, ([\d.]+)", line.strip()):
            gpus.append(Gpu(row[1], int(row[2]) << 20))
            driver = row[3]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header or "")
    return driver, cuda[1] if cuda else None, tuple(gpus)


def cann() -> str | None:
    """Returns the version of Huawei's CANN toolkit where it is usually installed."""
    for folder in CANN:
        for name in ("version.cfg", "version.info", "compiler/version.info"):
            try:
                text = (Path(folder) / name).read_text(encoding="utf-8")
            except OSError:
                continue
            if found := re.search(r"\d+\.\d+[\w.]*", text):
                return found[0]
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _start_import(torch: str | None, plugins: bool = True) -> subprocess.Popen[str] | None:
    if torch is None:
        return None
    autoload = {} if plugins else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", TORCH_PROBE],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | autoload,
    )  # fmt: skip


def _finish_import(process: subprocess.Popen[str] | None, again: bool = True) -> Torch | None:
    """Waits for `import torch`; if it fails, tries once more without device plugins."""
    if process is None:
        return None
    try:
        out, err = process.communicate(timeout=IMPORT_S)
        return Torch(**json.loads(out.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Torch(error=f"not done after {IMPORT_S} s")
    except (ValueError, IndexError, TypeError):
        lines = [line.strip() for line in err.splitlines() if line.strip()]
    error = lines[-1] if lines else f"exit code {process.returncode}"
    if not again:
        return Torch(error=error)
    second = _finish_import(_start_import("torch", plugins=False), again=False)
    return Torch(error=error, without_plugins=second is not None and second.error is None)
