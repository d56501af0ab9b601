"""`glm5q doctor`: what this machine has, what a target needs, and the fix for each gap.

Stands beside the pipeline, not in it: the pipeline imports torch, and a torch that cannot be
imported is one of the things to find out.
"""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5q.errors import UserError
from targets import base
from targets.machine import Machine, probe

TORCH = "2.11"
TRANSFORMERS = "5.13"  # earlier ones rotate GLM-5's queries, or its indexer's, wrongly
# torch -> triton it was released with, for builds whose metadata does not say it.
TRITON = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
ENGINES = {"vllm": "0.33", "sglang": "0.5.23"}  # whose loaders the formats were held to
GPU_NAMES = {"h200": "H200", "h20": "H20", "a100": "A100 80GB", "rtx-4090": "RTX 4090"}
# As nvidia-smi names them: `NVIDIA A100-SXM4-80GB`; not a Laptop's 4090, nor the 4090 D.
GPU_PATTERNS = {"h200": r"\bH200\b", "h20": r"\bH20\b", "a100": r"\bA100\b.*\b80GB\b",
                "rtx-4090": r"\bRTX 4090$"}  # fmt: skip
LEAST_MEMORY = 0.95  # of what the target has: drivers keep some of it for themselves
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
          "chat_template.jinja", "generation_config.json")  # fmt: skip
BIAS = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class Gap:
    """Something missing or wrong. `stops`: the target cannot run, or would run wrong, with it."""

    what: str
    fix: str
    stops: bool = True

    def line(self) -> str:
        return f"{'needs' if self.stops else 'note'}: {self.what}; {self.fix}"


@dataclass(frozen=True)
class Diagnosis:
    """A machine, and what stands between it and a target."""

    target: str
    machine: Machine
    gaps: tuple[Gap, ...]

    @property
    def ok(self) -> bool:
        return not any(gap.stops for gap in self.gaps)

    def lines(self) -> list[str]:
        """Returns what people read: facts, gaps, verdict."""
        rows = facts(self.machine)
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += ["", *(gap.line() for gap in self.gaps)]
        verdict = "can run" if self.ok else "cannot run as it is"
        return [*lines, f"{self.target}: {verdict} ({self.machine.seconds:.1f} s to find out)"]

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "ok": self.ok,
            "machine": asdict(self.machine) | {"versions": dict(self.machine.versions)},
            "gaps": [asdict(gap) for gap in self.gaps],
        }


def doctor(
    target: str | None, checkpoint: Path | None, source: Path | None, folder: Path
) -> Diagnosis:
    """Returns the diagnosis for a target (default: what this machine is), and of a checkpoint.

    Raises UserError for a target or folder that does not exist.
    """
    if target is not None:
        base.load(target)
    problems = [] if checkpoint is None else list(checkpoint_gaps(checkpoint, source))
    machine = probe(folder)
    chosen = target or guess(machine)
    return Diagnosis(chosen, machine, (*gaps(machine, chosen), *problems))


def guess(machine: Machine) -> str:
    """Returns the target that this machine's accelerator is, `cpu` for none or another."""
    for target in GPU_NAMES:
        if any(_is(gpu.name, target) for gpu in machine.gpus):
            return target
    return "ascend-910c" if machine.npus else "cpu"


def gaps(machine: Machine, target: str) -> Iterator[Gap]:
    """Yields what `target` needs and this machine has not."""
    chip = base.load(target)
    if chip.kind == "declared":
        yield Gap(
            f"nothing of glm5q runs on {chip.title}, its recipe is declared from data sheets",
            "quantize on a CPU or an NVIDIA GPU and serve there with the vendor's engine",
        )
    yield from _torch(machine)
    yield from KINDS.get(chip.kind, _nothing)(machine, chip)
    yield from _versions(machine)


def _torch(machine: Machine) -> Iterator[Gap]:
    own, found = machine.versions.get("torch"), machine.torch
    if own is None or found is None:
        yield Gap("torch is not installed", f"pip install 'torch>={TORCH}'")
        return
    if _below(own, TORCH):
        yield Gap(f"torch {own} is older than {TORCH}", f"pip install 'torch>={TORCH}'")
    if found.error is None:
        return
    npu = machine.versions.get("torch_npu")
    if npu is not None and found.without_plugins:
        yield Gap(
            f"torch_npu {npu} breaks `import torch` ({found.error})",
            "source the CANN toolkit's set_env.sh, or pip uninstall torch_npu",
        )
    else:
        yield Gap(f"`import torch` fails ({found.error})", "pip install --force-reinstall torch")


def _cuda(machine: Machine, chip: base.Target) -> Iterator[Gap]:
    wanted = GPU_NAMES[chip.name]
    names = sorted({gpu.name for gpu in machine.gpus})
    if not names:
        yield Gap("no NVIDIA GPU (nvidia-smi lists none)", f"run on a machine with an {wanted}")
    elif not any(_is(name, chip.name) for name in names):
        yield Gap(f"no {wanted}, only {', '.join(names)}", "give --target for that one")
    yield from _memory(machine, chip)
    found = machine.torch
    if found is None or found.error is not None:
        return
    if found.cuda is None:
        yield Gap("torch is a CPU build", "install a CUDA build of torch")
        return
    if machine.driver_cuda is not None and _below(machine.driver_cuda, found.cuda):
        yield Gap(
            f"CUDA too old: driver {machine.driver} runs up to {machine.driver_cuda}, torch is "
            f"built for {found.cuda}",
            f"install a driver for CUDA {found.cuda}, or a torch built for {machine.driver_cuda}",
            stops=_major(machine.driver_cuda) < _major(found.cuda),
        )
    elif names and not found.usable:
        yield Gap("torch sees no usable GPU", "check the driver: nvidia-smi, dmesg")
    yield from _triton(machine)


def _memory(machine: Machine, chip: base.Target) -> Iterator[Gap]:
    """Yields the least memory of the target's own GPUs where it is less than the target's."""
    sizes = [gpu.memory_bytes for gpu in machine.gpus if _is(gpu.name, chip.name)]
    wanted = chip.memory_bytes.value
    if sizes and wanted is not None and min(sizes) < LEAST_MEMORY * wanted:
        yield Gap(
            f"a GPU has {_size(min(sizes))} of memory, {chip.title} is planned with "
            f"{_size(wanted)}",
            "use whole GPUs of that kind",
        )


def _triton(machine: Machine) -> Iterator[Gap]:
    own, torch = machine.versions.get("triton"), machine.versions.get("torch") or ""
    wanted = machine.triton_wanted or TRITON.get(".".join(torch.split(".")[:2]))
    pin = f"pip install 'triton=={wanted}'" if machine.triton_wanted else "pip install triton"
    if own is None:
        yield Gap("triton is not installed", pin)
    elif wanted is not None and _numbers(own)[:2] != _numbers(wanted)[:2]:
        yield Gap(
            f"triton {own} does not belong to torch {torch}, which wants {wanted}",
            f"pip install 'triton=={wanted}{'' if wanted.count('.') > 1 else '.*'}'",
        )


def _ascend(machine: Machine, chip: base.Target) -> Iterator[Gap]:
    if not machine.npus:
        yield Gap(
            "no Ascend NPU (/dev/davinci0 is not there)", f"run on a machine with {chip.title}"
        )
    if machine.cann is None:
        yield Gap("no CANN toolkit under /usr/local/Ascend", "install CANN for this NPU")
    npu, torch = machine.versions.get("torch_npu"), machine.versions.get("torch")
    if npu is None:
        fix = f"pip install torch-npu=={'.'.join((torch or TORCH).split('.')[:2])}.*"
        yield Gap("torch_npu is not installed", fix)
    elif torch is not None and _numbers(npu)[:2] != _numbers(torch)[:2]:
        yield Gap(
            f"torch_npu {npu} does not belong to torch {torch}",
            f"pip install torch-npu=={'.'.join(torch.split('.')[:2])}.*",
        )


def _cpu(machine: Machine, _chip: base.Target) -> Iterator[Gap]:
    if machine.compiler is None:
        yield Gap("no C++ compiler: kernels run in plain torch", "install g++", stops=False)
    if machine.isa and not {"avx2", "asimd"} & set(machine.isa):
        yield Gap("no AVX2: kernels run portable code", "use a newer CPU", stops=False)


def _nothing(_machine: Machine, _chip: base.Target) -> Iterator[Gap]:
    yield from ()


KINDS: dict[str, Callable[[Machine, base.Target], Iterator[Gap]]] = {
    "cuda": _cuda,
    "ascend": _ascend,
    "cpu": _cpu,
}


def _versions(machine: Machine) -> Iterator[Gap]:
    """Yields packages that work, and wrongly, or that nobody checked a checkpoint with."""
    own = machine.versions.get("transformers")
    if own is not None and _below(own, TRANSFORMERS):
        yield Gap(
            f"transformers {own} rotates GLM-5 wrongly (RoPE, before {TRANSFORMERS})",
            f"pip install 'transformers>={TRANSFORMERS}'",
            stops=False,
        )
    for engine, checked in ENGINES.items():
        own = machine.versions.get(engine)
        if own is not None and _below(own, checked):
            yield Gap(
                f"{engine} {own} is older than {checked}, whose loader was read",
                f"pip install '{engine}>={checked}'",
                stops=False,
            )


def checkpoint_gaps(root: Path, source: Path | None) -> Iterator[Gap]:
    """Yields what a checkpoint brings that bites later: its router's bias, another tokenizer.

    `source` None: the one its record names, if it is still there.
    """
    for folder in (root, source):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such folder", "give a checkpoint's folder")
    narrow = [name for name, kind in _biases(root) if kind in ("BF16", "F16")]
    if narrow:
        yield Gap(
            f"{root}: {narrow[0]} is not float32 ({len(narrow)} of them): its few steps of "
            "bfloat16 reroute tokens",
            "take the float32 tensors of the release",
        )
    original = source or _recorded_source(root)
    if original is None:
        return
    for name in COPIED:
        mine, theirs = root / name, original / name
        if mine.exists() != theirs.exists():
            where = original if mine.exists() else root
            yield Gap(f"{name} is missing in {where}", f"copy the source's {name}")
        elif mine.exists() and not filecmp.cmp(mine, theirs, shallow=False):
            yield Gap(f"{mine} differs from the source's", f"copy {theirs} over it")


def _recorded_source(root: Path) -> Path | None:
    try:
        record = json.loads((root / "report.json").read_text(encoding="utf-8"))
        found = Path(record["source"]["path"])
        return found if found.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _biases(root: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, dtype) of every router bias, from the shards' headers alone.

    Raises UserError for a header that is none.
    """
    for file in sorted(root.glob("*.safetensors")):
        try:
            with file.open("rb") as raw:
                header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
            found = [
                (name, entry["dtype"]) for name, entry in header.items() if name.endswith(BIAS)
            ]
        except (OSError, ValueError, MemoryError, OverflowError, RecursionError):
            raise UserError(f"{file}: not a safetensors file", "fetch this shard again") from None
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"{file}: its header is no table", "fetch this shard again") from None
        yield from found


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Returns (name, value) rows for people."""
    m = machine
    torch = m.torch
    built = "not importable" if torch is None or torch.error else f"CUDA {torch.cuda or 'none'}"
    gpus = [f"{gpu.name} {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in m.gpus]
    packages = [f"{name} {own}" for name, own in m.versions.items() if own is not None]
    absent = [name for name, own in m.versions.items() if own is None]
    return [
        ("python", m.python),
        ("CPU", f"{m.processor}, {m.cores} cores, {' '.join(m.isa) or 'no known extension'}"),
        ("memory", f"{_size(m.memory_bytes)}, copies {_size(m.memory_bytes_s)}/s on one thread"),
        (
            "disk here",
            f"writes {_size(m.disk_write_bytes_s)}/s, reads {_size(m.disk_read_bytes_s)}/s",
        ),
        ("C++ compiler", m.compiler or "none"),
        ("GPU", ", ".join(gpus) or "none"),
        ("driver", f"{m.driver}, CUDA {m.driver_cuda}" if m.driver else "none"),
        ("NPU", f"{m.npus} Ascend devices" if m.npus else "none"),
        ("CANN", m.cann or "none"),
        ("torch built for", built if m.versions.get("torch") else "not installed"),
        ("installed", ", ".join(packages)),
        ("not installed", ", ".join(absent) or "nothing of what is looked for"),
    ]


def _size(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.1f} GB"


def _is(name: str, target: str) -> bool:
    return re.search(GPU_PATTERNS[target], name) is not None


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    found = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def _major(text: str) -> int:
    return (_numbers(text) or (0,))[0]


def _below(own: str, wanted: str) -> bool:
    return _numbers(own) < _numbers(wanted)
