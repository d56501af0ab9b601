"""`glm5q lower` for NVIDIA GPUs: the very specialisations a request would launch, compiled ahead.

An op's own launch code runs on tensors that have shapes and no memory, with a recorder in place of
each kernel. What it recorded goes through Triton's compiler for the chip, which needs no GPU; the
result lies in Triton's cache under the key that a launch on that chip looks up.
"""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fused_ops.op import Implementation, OpRequest, Tiles, load, resolve
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
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder:
    """Stands for a kernel: `recorder[grid](...)` notes the call and runs nothing."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self._launches.append(Launch(self._kernel, grid, args, kwargs))

        return call


def lower(
    chip: str,
    chosen: tuple[tuple[OpRequest, str], ...],
    folder: Path,
    tiles: Mapping[str, Tiles] | None = None,
) -> tuple[Stage, ...]:
    """Compiles each request's implementation, by name, for `chip`; artefacts go to `folder`.

    `tiles` are a recipe's; tables it does not have are the launches' own. Returns one stage a
    compiled kernel; a request whose launch or compilation fails has its error.

    Where Gluon is chosen, the portable kernel that its launch falls back to is not compiled: it
    falls back for strides or addresses that 16 bytes do not divide, Triton specializes on just
    that, and so no such launch would look up what these requests' aligned tensors give.
    """
    stages: list[Stage] = []
    seen: set[str] = set()
    for request, name in chosen:
        (implementation,) = (i for i in load(request.op).implementations if i.name == name)
        try:
            launches = launches_of(request, implementation, chip, tiles)
        except Exception as error:  # noqa: BLE001, RUF100 - an op that cannot launch is a result
            stages.append(_stage(request, name, chip, "launch", error=_line(error)))
            continue
        for launch in launches:
            stages += _compile(launch, request, name, chip, folder, seen)
    return tuple(stages)


def launches_of(
    request: OpRequest,
    implementation: Implementation,
    chip: str,
    tiles: Mapping[str, Tiles] | None = None,
) -> list[Launch]:
    """Returns what the implementation's launch code starts for `request` on `chip`."""
    case = import_module(load(request.op).cases).timed_case(request)
    with torch.device("meta"):
        inputs = case.build()
    tuning = implementation.tuning(tiles or {})
    args, kwargs = inputs.args, inputs.kwargs | tuning
    module = import_module(implementation.entry.partition(":")[0])
    with _recorded(module, chip) as launches:
        if implementation.prepare is not None:
            x, weight, *rest = args
            prepared = resolve(implementation.prepare)(
                weight, kwargs.pop("weight_scale"), x.shape[1], **tuning
            )
            args = (x, prepared, *rest)
        getattr(module, implementation.entry.partition(":")[2])(*args, **kwargs)
    return launches


@contextmanager
def _recorded(module: ModuleType, chip: str) -> Iterator[list[Launch]]:
    """Within: kernels of the launch module and of one it imports record, and both see `chip`."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    answers = {
        "processors": lambda _: CHIPS[chip].multiprocessors,
        "capability": lambda _: CHIPS[chip].capability // 10,
        "native_fp8": lambda _: CHIPS[chip].capability >= 89,
        "interpreted": lambda: False,
    }
    inner = [value for value in vars(module).values() if isinstance(value, ModuleType)]
    before = [
        (place, name, value)
        for place in (module, *(one for one in inner if one.__name__.endswith("_launch")))
        for name, value in vars(place).items()
        if isinstance(value, JITFunction) or name in answers
    ]
    try:
        for place, name, value in before:
            setattr(place, name, answers.get(name) or _Recorder(value, launches))
        yield launches
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def compile_launch(launch: Launch, chip: str) -> tuple[Any, dict[str, Any]]:
    """Returns Triton's compiled kernel and its constants, by the names of its parameters."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
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
    source = _source_class(kernel)(kernel, signature, constants, attributes)
    with redirect_stdout(io.StringIO()):  # Triton prints all PTX that ptxas refuses
        compiled = compile(source, target=target, options=options.__dict__)
    names = list(signature)
    return compiled, {names[path[0]]: value for path, value in constants.items()}


def _source_class(kernel: Any) -> Any:
    """What a launch of `kernel` would make of it before the compiler's first stage."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _compile(
    launch: Launch, request: OpRequest, implementation: str, chip: str, folder: Path, seen: set[str]
) -> Iterator[Stage]:
    kernel = launch.kernel.__name__
    try:
        compiled, constants = compile_launch(launch, chip)
    except Exception as error:  # noqa: BLE001, RUF100 - what the compiler says is the result
        yield _stage(request, implementation, chip, kernel, error=_line(error))
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
        implementation=implementation,
        chip=chip,
        stage=f"{kernel} {request.dtype}",
        error=f"{shared} bytes of shared memory, {chip} has {most}" if shared > most else None,
        artefacts=tuple(artefacts),
        usage={"shared": shared, "warps": compiled.metadata.num_warps}
        | {name: value for name, value in constants.items() if isinstance(value, int)},
        proves=PROVES.format(capability=CHIPS[chip].capability),
    )


def _stage(request: OpRequest, implementation: str, chip: str, stage: str, error: str) -> Stage:
    return Stage(request.op, implementation, chip, f"{stage} {request.dtype}", error)


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal" in line or line.startswith("error")]
    return f"{type(error).__name__}: {(fatal or lines or ['no message'])[0]}"
