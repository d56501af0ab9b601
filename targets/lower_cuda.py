"""`glm5q lower` for NVIDIA GPUs: the very specialisations a request would launch, compiled ahead.

An op's own launch code runs on tensors that have shapes and no memory, with a recorder in place of
each kernel. What it recorded goes through Triton's compiler for the chip, which needs no GPU; the
result lies in Triton's cache under the key that a launch on that chip looks up.
"""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fused_ops.op import Implementation, OpRequest, load, resolve
from targets.lowering import Stage


@dataclass(frozen=True)
class Chip:
    """Compute capability, multiprocessors (launches split work by them), shared bytes a block."""

    capability: int
    multiprocessors: int
    shared_bytes: int


# NVIDIA's sheets and the CUDA programming guide's table of capabilities.
CHIPS = {
    "h200": Chip(90, 132, 227 << 10),
    "h20": Chip(90, 78, 227 << 10),
    "a100": Chip(80, 108, 163 << 10),
    "rtx-4090": Chip(89, 128, 99 << 10),
}
KEPT = ("ttir", "ttgir", "ptx", "cubin")
WARP = 32
PROVES = "compiles for sm_{capability} within the chip's shared memory; nothing of its speed"


@dataclass(frozen=True)
class Launch:
    """A kernel as it was called."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder:
    """Stands for a kernel: `recorder[grid](...)` notes the call and runs nothing."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, _grid: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self._launches.append(Launch(self._kernel, args, kwargs))

        return call


def lower(chip: str, requests: tuple[OpRequest, ...], folder: Path) -> tuple[Stage, ...]:
    """Compiles the Triton implementation of every request for `chip`; artefacts go to `folder`.

    Returns one stage a compiled kernel; a request whose launch or compilation fails has its error.
    """
    stages: list[Stage] = []
    seen: set[str] = set()
    for request in requests:
        (implementation,) = (i for i in load(request.op).implementations if i.name == "triton")
        try:
            launches = launches_of(request, implementation, chip)
        except Exception as error:  # noqa: BLE001, RUF100 - an op that cannot launch is a result
            stages.append(_stage(request, chip, "launch", error=_line(error)))
            continue
        for launch in launches:
            stages += _compile(launch, request, chip, folder, seen)
    return tuple(stages)


def launches_of(request: OpRequest, implementation: Implementation, chip: str) -> list[Launch]:
    """Returns what the implementation's launch code starts for `request` on `chip`."""
    case = import_module(load(request.op).cases).timed_case(request)
    with torch.device("meta"):
        inputs = case.build()
    args, kwargs = inputs.args, dict(inputs.kwargs)
    module = import_module(implementation.entry.partition(":")[0])
    with _recorded(module, chip) as launches:
        if implementation.prepare is not None:
            x, weight, *rest = args
            prepared = resolve(implementation.prepare)(
                weight, kwargs.pop("weight_scale"), x.shape[1]
            )
            args = (x, prepared, *rest)
        getattr(module, implementation.entry.partition(":")[2])(*args, **kwargs)
    return launches


@contextmanager
def _recorded(module: Any, chip: str) -> Iterator[list[Launch]]:
    """Within: the module's kernels record, and it finds the chip's multiprocessors and dtypes."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    replaced: dict[str, Any] = {
        name: _Recorder(value, launches)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    }
    answers = {
        "processors": lambda _: CHIPS[chip].multiprocessors,
        "native_fp8": lambda _: CHIPS[chip].capability >= 89,
        "interpreted": lambda: False,
    }
    replaced |= {name: answer for name, answer in answers.items() if hasattr(module, name)}
    before = {name: getattr(module, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(module, name, value)
        yield launches
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def compile_launch(launch: Launch, chip: str) -> tuple[Any, dict[str, Any]]:
    """Returns Triton's compiled kernel and its constants, by the names of its parameters."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, target = launch.kernel, GPUTarget("cuda", CHIPS[chip].capability, WARP)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {"debug": kernel.debug or False, **launch.kwargs}
    bound, specialization, options = bind(*launch.args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = compile(source, target=target, options=options.__dict__)
    names = list(signature)
    return compiled, {names[path[0]]: value for path, value in constants.items()}


def _compile(
    launch: Launch, request: OpRequest, chip: str, folder: Path, seen: set[str]
) -> Iterator[Stage]:
    kernel = launch.kernel.__name__
    try:
        compiled, constants = compile_launch(launch, chip)
    except Exception as error:  # noqa: BLE001, RUF100 - what the compiler says is the result
        yield _stage(request, chip, kernel, error=_line(error))
        return
    if compiled.hash in seen:
        return
    seen.add(compiled.hash)
    shared, most = compiled.metadata.shared, CHIPS[chip].shared_bytes
    name = f"{request.op}-{kernel}-{compiled.hash[:12]}.{chip}"
    artefacts = []
    for kind in KEPT:
        if (content := compiled.asm.get(kind)) is None:
            continue
        data = content if isinstance(content, bytes) else str(content).encode()
        (folder / f"{name}.{kind}").write_bytes(data)
        artefacts.append(f"{name}.{kind}")
    yield Stage(
        op=request.op,
        implementation="triton",
        chip=chip,
        stage=f"{kernel} {request.dtype}",
        error=f"{shared} bytes of shared memory, {chip} has {most}" if shared > most else None,
        artefacts=tuple(artefacts),
        usage={"shared": shared, "warps": compiled.metadata.num_warps}
        | {name: value for name, value in constants.items() if isinstance(value, int)},
        proves=PROVES.format(capability=CHIPS[chip].capability),
    )


def _stage(request: OpRequest, chip: str, stage: str, error: str) -> Stage:
    return Stage(request.op, "triton", chip, f"{stage} {request.dtype}", error)


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
