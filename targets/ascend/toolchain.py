"""The three stages, each a subprocess on a file: Triton to linalg, linalg to HIVM, linalg to x86.

`hivmc`, the closed compiler that would make NPU object code, is only in Huawei's CANN. Here a stub
stands in its place: it keeps the module it is handed and produces no object code.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from fused_ops.triton_ascend import Constant
from targets.ascend import environment

# As triton-ascend 3.2.0 calls it for A2 and A3.
COMPILE = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
STUB = """#!/bin/sh
# STUB of hivmc: keeps the final HIVM module it is handed and produces NO object code.
if [ "$1" = "--version" ]; then echo "hivmc stub, produces no object code"; exit 0; fi
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2"; shift;; -*) ;; *) in="${in:-$1}";; esac
  shift
done
cp "$in" final.mlir && : > "$out.o"
"""
# To loops and LLVM, bufferized across functions' bodies; NPU dialects first.
TO_LLVM = (
    "--inline",
    "--symbol-dce",
    "--execution-engine-convert-hfusion-to-upstream",
    "--execution-engine-convert-hivm-to-upstream",
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--arith-expand",
    "--convert-arith-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
# The chip's library has prefix sums; this is one as a loop.
CUMSUM = """
  func.func private @prefix_sum_{count}(%x: tensor<{count}xi32>) -> tensor<{count}xi32> {{
    %first = arith.constant 0 : index
    %one = arith.constant 1 : index
    %end = arith.constant {count} : index
    %zero = arith.constant 0 : i32
    %sums, %last = scf.for %i = %first to %end step %one
        iter_args(%so_far = %x, %sum = %zero) -> (tensor<{count}xi32>, i32) {{
      %value = tensor.extract %so_far[%i] : tensor<{count}xi32>
      %next = arith.addi %sum, %value : i32
      %stored = tensor.insert %next into %so_far[%i] : tensor<{count}xi32>
      scf.yield %stored, %next : tensor<{count}xi32>, i32
    }}
    return %sums : tensor<{count}xi32>
  }}
"""
SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}  # address spaces of HIVM by the chip's own names


class StageError(Exception):
    """A compiler refused; `str()` is its own line."""


@dataclass(frozen=True)
class Linalg:
    """Stage L1's result. `cube`: the kernel needs the cube unit beside the vector cores."""

    text: str
    kernel: str
    cube: bool


@dataclass(frozen=True)
class Hivm:
    """Stage L2's result: the final module, planned for one die.

    `usage` is the highest byte used of each on-chip memory, `sizes` the bytes of each and the core
    counts that the module was planned for. `functions` are the device functions, `notes` what the
    compiler gave up to fit.
    """

    text: str
    usage: Mapping[str, int]
    sizes: Mapping[str, int]
    functions: tuple[str, ...]
    notes: tuple[str, ...]


def to_linalg(
    folder: Path,
    source: Path,
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Constant],
    die: str,
) -> Linalg:
    """Stage L1: `kernel` of the file `source` by triton-ascend. Raises StageError."""
    request = {
        "source": str(source),
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "chip": die,
    }
    with as_file(files("targets.ascend") / "frontend.py") as script:
        command = [str(environment.python(folder)), "-I", str(script)]
        found = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"the L1 script failed: {found.stderr.strip()}")
    answer = json.loads(found.stdout)
    if "error" in answer:
        raise StageError(_reason(answer["error"]))
    if reread := [name for i, name in enumerate(signature) if i + 2 in rewritten(answer["linalg"])]:
        raise StageError(
            f"{kernel} reads {', '.join(reread)} where it should only write: a store under a mask "
            "that is no rectangle reads the tile and writes it back, over what others write there"
        )
    return Linalg(answer["linalg"], kernel, answer["mix"] == "mix")


def to_hivm(folder: Path, linalg: Linalg, die: str) -> Hivm:
    """Stage L2: fused, split over cube and vector cores, memory planned. Raises StageError."""
    text, log = _compile(folder, linalg, die, *COMPILE)
    notes = re.findall(r"\[NOTE\] (.*)", log)
    return Hivm(text, usage(text), sizes(text), functions(text), tuple(dict.fromkeys(notes)))


def to_hfusion(folder: Path, linalg: Linalg, die: str) -> str:
    """Returns the function as the compiler has fused it, before its mapping to the two cores.

    Raises StageError.
    """
    options = [option for option in COMPILE if "hivm-compile" not in option]
    _, log = _compile(
        folder, linalg, die,
        *options, "--enable-hivm-compile=false", "--mlir-print-ir-after=hfusion-decompose",
    )  # fmt: skip
    dumps = re.split(r"(?m)^// -----// IR Dump After .*$", log)
    if len(dumps) < 2:
        raise StageError("the compiler printed nothing after fusing")
    return dumps[-1].strip()


def to_library(folder: Path, hfusion: str, library: Path) -> None:
    """Stage L3's build: what `to_hfusion` gave, as a shared library for this machine.

    Raises StageError.
    """
    text = upstream(hfusion)
    with (
        tempfile.TemporaryDirectory() as scratch,
        as_file(files("targets.ascend") / "runtime.c") as runtime,
    ):
        work = Path(scratch)
        (work / "kernel.mlir").write_text(text)
        _run(work, environment.tool(folder, "bishengir-opt"), "kernel.mlir", *TO_LLVM,
             "-o", "llvm.mlir")  # fmt: skip
        plain = re.sub(r"hacc\.\w+ = #hacc\.\w+<[^>]*>,? ?", "", (work / "llvm.mlir").read_text())
        (work / "llvm.mlir").write_text(plain)
        _run(work, environment.LLVM / "mlir-translate", "--mlir-to-llvmir",
             "--allow-unregistered-dialect", "llvm.mlir", "-o", "kernel.ll")  # fmt: skip
        # Buffers of a program are never freed in the IR: they come from the runtime's own list.
        code = (work / "kernel.ll").read_text().replace("@malloc(", "@glm5q_buffer(")
        (work / "kernel.ll").write_text(code)
        _run(work, environment.LLVM / "llc", "-O3", "-filetype=obj", "-relocation-model=pic",
             "kernel.ll", "-o", "kernel.o")  # fmt: skip
        _run(work, Path("cc"), "-shared", "-fPIC", "-O2", "kernel.o", str(runtime), "-lm",
             "-o", str(library.resolve()))  # fmt: skip


def rewritten(linalg: str) -> set[int]:
    """Returns the numbers of the kernel's arguments that it both reads and writes."""
    owner: dict[str, int] = {}
    read, written = set(), set()
    for line in linalg.splitlines():
        if view := re.match(r" *(%\w+) = memref\.(?:reinterpret_cast|subview|cast) (%\w+)\b", line):
            base = re.fullmatch(r"%arg(\d+)", view[2])
            owner[view[1]] = int(base[1]) if base else owner.get(view[2], -1)
        elif fresh := re.match(r" *(%\w+) = memref\.alloc", line):
            owner[fresh[1]] = -1
        elif copy := re.match(r" *memref\.copy (%\w+), (%\w+) ", line):
            read.add(owner.get(copy[1], -1))
            written.add(owner.get(copy[2], -1))
        elif load := re.search(r"memref\.load (%\w+)\[", line):
            read.add(owner.get(load[1], -1))
        elif store := re.search(r"(?:in writable |memref\.store %\w+, )(%\w+)", line):
            written.add(owner.get(store[1], -1))
    return (read & written) - {-1}


def usage(module: str) -> dict[str, int]:
    """Returns the highest byte the module uses of UB, L1 and L0C.

    Raises ValueError for a planned buffer that is not understood, so that none goes uncounted.
    """
    highest = dict.fromkeys(SPACES.values(), 0)
    for line in module.splitlines():
        if "hivm.hir.pointer_cast(" not in line or "address_space<gm>" in line:
            continue
        found = re.search(
            r"pointer_cast\(((?:%c\d+_i64(?:_\d+)?(?:, )?)+)\)[^:]*: "
            r"memref<((?:\d+x)*)([a-z]+)(\d+), .*address_space<(ub|cbuf|cc)>",
            line,
        )
        if found is None:
            raise ValueError(f"not a planned buffer: {line.strip()}")
        addresses, shape, _, bits, space = found.groups()
        elements = math.prod(int(size) for size in shape.split("x") if size)
        start = max(int(address) for address in re.findall(r"%c(\d+)_", addresses))
        name = SPACES[space]
        highest[name] = max(highest[name], start + math.ceil(elements * int(bits) / 8))
    return highest


def sizes(module: str) -> dict[str, int]:
    """Returns the chip the module was planned for: bytes of UB, L1, L0C; cube and vector cores."""
    entries = {
        name: int(value) for name, value in re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', module)
    }
    bits = {"UB": "UB_SIZE", "L1": "L1_SIZE", "L0C": "L0C_SIZE"}
    found = {name: entries[entry] // 8 for name, entry in bits.items()}
    found["cube"], found["vector"] = entries["CUBE_CORE_COUNT"], entries["VECTOR_CORE_COUNT"]
    return found


def functions(module: str) -> tuple[str, ...]:
    """Returns the module's device functions that have a body, in order."""
    lines = re.findall(r"(?m)^ *func\.func @(\w+)\(.*\{$", module)
    return tuple(name for name in lines if not name.endswith("_function"))


def upstream(hfusion: str) -> str:
    """Returns a module that ascendnpu-ir 1.2.0 turns into LLVM's own operations, and rightly.

    Its way to x86 has nothing for a prefix sum, and makes a copy of a `vnot`. Raises StageError for
    one of these that is not understood.
    """
    lines = hfusion.splitlines(keepends=True)
    aliases = "".join(line for line in lines if line.startswith("#"))
    body = "".join(line for line in lines if not line.startswith("#"))
    body = re.sub(
        r"hfusion\.cumsum (%\w+) : tensor<(\d+)xi32> cum_dims = \[0\] reverse = false -> ",
        r"func.call @prefix_sum_\2(\1) : (tensor<\2xi32>) -> ",
        body,
    )
    body = re.sub(
        r"%(\w+) = hfusion\.elemwise_unary {fun = #hfusion\.unary_fn<vnot>} ins\((%\w+) : "
        r"(tensor<[\dx]+i\d+>)\) outs.*",
        r"%ones_\1 = arith.constant dense<-1> : \3\n    %\1 = arith.xori \2, %ones_\1 : \3",
        body,
    )
    if left := re.search(r"hfusion\.cumsum.*|<vnot>.*", body):
        raise StageError(f"not understood: {left[0]}")
    counts = sorted(set(re.findall(r"@prefix_sum_(\d+)", body)))
    sums = "".join(CUMSUM.format(count=count) for count in counts)
    return f"{aliases}module {{\n{sums}{body}\n}}\n"


def _compile(folder: Path, linalg: Linalg, die: str, *options: str) -> tuple[str, str]:
    """Runs bishengir-compile up to the stub: (the module it would hand over, what it printed)."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "kernel.mlir").write_text(linalg.text)
        stub = work / "hivmc"
        stub.write_text(STUB)
        stub.chmod(0o700)
        compiler = environment.tool(folder, "bishengir-compile")
        found = subprocess.run(
            [str(compiler), "kernel.mlir", f"--target={die}", *options, "-o", "kernel"],
            cwd=work,
            env=os.environ | {"PATH": f"{work}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        final = work / "final.mlir"
        if found.returncode or not final.exists():
            raise StageError(_reason(found.stderr))
        return final.read_text(), found.stderr


def _run(work: Path, program: Path, *arguments: str) -> None:
    command = [str(program), *arguments]
    found = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if found.returncode:
        raise StageError(f"{program.name}: {_reason(found.stderr)}")


def _reason(text: str) -> str:
    """The lines that say why: an overflow if there is one, else the first error, else the ends."""
    lines = [re.sub(r"^.*?error: ", "", line).strip() for line in text.splitlines() if line.strip()]
    overflows = [line for line in lines if "overflow, requires" in line]
    if overflows or not lines:
        return (overflows or ["no reason given"])[0]
    errors = [line for line in text.splitlines() if "error: " in line]
    if errors:
        return re.sub(r"^.*?error: ", "", errors[0]).strip()
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))
