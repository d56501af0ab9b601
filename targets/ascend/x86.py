"""Executes launches on this CPU from the IR that Ascend's compiler is given: stage L3.

What runs, as x86-64 code, is what Huawei's compiler has made of the kernel when its fusion is done,
before it maps it to cube and vector cores. It shows that what the kernel means survives to there;
of the NPU it shows nothing: not its exp, its order of sums, its synchronisation.

Each tensor ends where forbidden memory begins: triton-ascend reads the rows that a mask leaves out
of a gather and drops them after, which must not leave the tensor on an NPU either.
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import mmap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from fused_ops.triton_ascend import Argument, Constant, Launch
from targets.ascend.toolchain import StageError, to_hfusion, to_library, to_linalg

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
INT32 = 2**31


class X86:
    """A Runner. Libraries are built once for each kernel, signature and constants, in `work`.

    `sources` replaces the file of a module of kernels.
    """

    def __init__(
        self, environment: Path, die: str, work: Path, sources: Mapping[str, Path] | None = None
    ) -> None:
        self.environment, self.die, self.work = environment, die, work
        self.sources = sources or {}
        self.built: dict[object, ctypes.CDLL] = {}

    def __call__(self, launch: Launch) -> None:
        source = self.sources.get(launch.module, kernel_file(launch.module))
        signature, constants = specialize(launch, source)
        key = (source, launch.kernel, tuple(signature.items()), tuple(constants.items()))
        if key not in self.built:
            self.built[key] = self._build(source, launch.kernel, signature, constants)
        _execute(self.built[key], launch, signature)

    def _build(
        self,
        source: Path,
        kernel: str,
        signature: Mapping[str, str],
        constants: Mapping[str, Constant],
    ) -> ctypes.CDLL:
        linalg = to_linalg(self.environment, source, kernel, signature, constants, self.die)
        library = self.work / f"{kernel}-{len(self.built)}.so"
        to_library(self.environment, to_hfusion(self.environment, linalg, self.die), library)
        return ctypes.CDLL(str(library))


def kernel_file(module: str) -> Path:
    """Returns the file of a module of Triton kernels, without importing it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(module)
    return Path(spec.origin)


def specialize(launch: Launch, source: Path) -> tuple[dict[str, str], dict[str, Constant]]:
    """Returns (Triton's type of each argument in the kernel's order, constants).

    As Triton's own launch does, a whole number that is 1 becomes a constant: a stride known to be
    1 is one block transfer, an unknown one a transfer an element, which overflows UB.
    """
    names = parameters(source, launch.kernel)
    given = {**launch.args, **launch.constants}
    if set(names) != set(given):
        differing = ", ".join(sorted(set(names) ^ set(given)))
        raise TypeError(f"{launch.kernel} and its launch disagree on {differing}")
    constants = dict(launch.constants)
    signature = {}
    for name in names:
        if name in constants:
            continue
        value = launch.args[name]
        if isinstance(value, int) and value == 1:
            constants[name] = 1
        else:
            signature[name] = _type(value)
    return signature, constants


def parameters(source: Path, kernel: str) -> list[str]:
    """Returns the parameters of a kernel, read and not imported."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            return [argument.arg for argument in node.args.args]
    raise AttributeError(f"{source}: no kernel {kernel}")


def _type(value: Argument) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -INT32 <= value < INT32 else "i64"


class Guarded:
    """A copy of a tensor's memory whose end is the end of a page, forbidden pages on both sides."""

    PAGE = mmap.PAGESIZE
    FILL = 0xA5  # between the first page and the tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        room = -(-max(self.bytes, 1) // self.PAGE) * self.PAGE
        self.memory = mmap.mmap(-1, room + 2 * self.PAGE)
        self.buffer = ctypes.c_char.from_buffer(self.memory)
        self.start = ctypes.addressof(self.buffer) + self.PAGE
        self.slack = room - self.bytes
        ctypes.memset(self.start, self.FILL, self.slack)
        ctypes.memmove(self.start + self.slack, tensor.data_ptr(), self.bytes)
        for page in (self.start - self.PAGE, self.start + room):
            if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), self.PAGE, 0):
                raise OSError("mprotect refused a guard page")

    def memref(self) -> list[object]:
        """Its descriptor: the pointer twice, an offset, a size and a stride."""
        pointer = ctypes.c_void_p(self.start + self.slack)
        size = ctypes.c_int64(self.tensor.numel())
        return [pointer, pointer, ctypes.c_int64(0), size, ctypes.c_int64(1)]

    def give_back(self) -> None:
        """Copies the memory to the tensor. Raises StageError if bytes before it were written."""
        if ctypes.string_at(self.start, self.slack) != bytes([self.FILL]) * self.slack:
            raise StageError("the code wrote before the start of a tensor")
        ctypes.memmove(self.tensor.data_ptr(), self.start + self.slack, self.bytes)


def _execute(library: ctypes.CDLL, launch: Launch, signature: Mapping[str, str]) -> None:
    """Calls the function for each program of the grid.

    The compiler's order: an address and two memrefs of bytes (of synchronisation, a lock and a
    workspace, unused here), the arguments, the grid, the program.
    """
    function = getattr(library, launch.kernel)
    function.restype = None
    unused = torch.zeros(64, dtype=torch.int8)
    tensors = {
        (value.data_ptr(), value.shape): value
        for value in (unused, *launch.args.values())
        if isinstance(value, Tensor)
    }
    guarded = {key: Guarded(tensor) for key, tensor in tensors.items()}
    fixed: list[object] = [ctypes.c_int64(0)]
    fixed += guarded[unused.data_ptr(), unused.shape].memref() * 2
    for name, kind in signature.items():
        value = launch.args[name]
        if isinstance(value, Tensor):
            fixed += guarded[value.data_ptr(), value.shape].memref()
        elif kind == "fp32":
            fixed.append(ctypes.c_float(value))
        else:
            fixed.append((ctypes.c_int64 if kind == "i64" else ctypes.c_int32)(int(value)))
    grid = (*launch.grid, 1, 1)[:3]
    fixed += [ctypes.c_int32(size) for size in grid]
    for program in itertools.product(*(range(size) for size in grid)):
        function(*fixed, *(ctypes.c_int32(index) for index in program))
        library.glm5q_release()
    for memory in guarded.values():
        memory.give_back()
