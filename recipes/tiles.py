"""The sizes that a recipe may launch a chip's kernels with, by the names of their constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes a tile may have: `least` to `most`, powers of two or else multiples of `multiple`.

    The bounds are what a kernel's arithmetic needs; what fits a chip its compiler says.
    """

    least: int = 1
    most: int | None = None
    multiple: int | None = None

    def refuse(self, size: int) -> str | None:
        """Returns which size to give, or None if `size` is one."""
        near = self.least <= size and (self.most is None or size <= self.most)
        if near and (size % self.multiple == 0 if self.multiple else not size & (size - 1)):
            return None
        kind = "a power of two" if self.multiple is None else "a number"
        kind += f", a multiple of {self.multiple}," if (self.multiple or 1) > 1 else ""
        reach = "" if self.most is None else f" up to {self.most}"
        return f"give {kind}" + (f" from {self.least}{reach}" if self.least > 1 or reach else "")


POWER = Sizes()
DOT = Sizes(16, 1024)  # a side of a matrix product
STAGES, PROGRAMS = Sizes(1, 8, multiple=1), Sizes(1, 32, multiple=1)
WARPS = Sizes(1, 16)
SEGMENT = Sizes(32, 8192)  # the indexer counts two rows of one in 16 bits each
REGISTERS = Sizes(24, 248, multiple=8)  # what setmaxnreg takes, PTX ISA 8.x

# An implementation's tiles, by the names of its kernel's constants: a table a kind of chip.
ASCEND = {
    "sparse_attention": {"H": POWER, "N": POWER},
    "lightning_indexer": {"ROWS": POWER, "K": POWER},
    "select_topk": {"N": POWER},
    "expert_gemm": {"ROWS": POWER, "N": POWER, "WIDTH": POWER},
}
CUDA = {
    "sparse_attention": {"H": DOT, "N": DOT, "STAGES": STAGES},
    "lightning_indexer": {
        "ROWS": DOT, "K": DOT, "WARPS": WARPS, "SEGMENT": SEGMENT, "OCCUPANCY": PROGRAMS,
        "REGISTERS": REGISTERS,
    },
    "select_topk": {"SEGMENT": SEGMENT, "SELECTIONS": PROGRAMS},
    "expert_gemm": {"ROWS": DOT, "N": DOT, "WIDTH": Sizes(64, 1024), "STAGES": STAGES},
}  # fmt: skip
HOPPER = CUDA | {
    "sparse_attention-gluon": {
        "PRODUCERS": Sizes(1, 8), "REGISTERS": REGISTERS, "WIDEN_REGISTERS": REGISTERS
    }
}  # fmt: skip
TILES = {
    "ascend-910b": ASCEND,
    "ascend-910c": ASCEND,
    "h200": HOPPER,
    "h20": HOPPER,
    "a100": CUDA,
    "rtx-4090": CUDA,
}


def problems(target: str, given: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """Yields (what is wrong, the fix) of a recipe's `tiles`."""
    if not given:
        return
    if (known := TILES.get(target)) is None:
        yield f"tiles: no kernel for {target} reads them", "mend target, or leave out tiles"
        return
    names = {op: set(tiles) for op, tiles in given.items()}
    alike = [chip for chip in TILES if names == {op: set(TILES[chip][op]) for op in TILES[chip]}]
    if alike and any(names[op] - set(known.get(op, ())) for op in names):
        chips = " and ".join(alike)
        yield f"tiles: they are for {chips}, not {target}", "leave out tiles"
        return
    for op in known:
        if op not in given:
            yield f"tiles.{op}: missing", "give every op's tiles, or leave out tiles"
    for op, tiles in given.items():
        if op not in known:
            yield f"tiles.{op}: no such op", f"tiles are of {', '.join(known)}"
        yield from _size_problems(f"tiles.{op}", known.get(op, {}), tiles)
    indexer = given["lightning_indexer"]
    if indexer.get("SEGMENT", indexer["K"]) < indexer["K"]:
        fix = "give K or more: a segment is scored tile by tile"
        yield f"tiles.lightning_indexer.SEGMENT: {indexer['SEGMENT']}", fix


def _size_problems(
    where: str, known: Mapping[str, Sizes], tiles: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    for name in sorted(set(known) ^ set(tiles)):
        word = "unknown" if name in tiles else "missing"
        yield f"{where}.{name}: {word}", f"give {', '.join(known)}"
    for name, size in tiles.items():
        if fix := known[name].refuse(size):
            yield f"{where}.{name}: {size}", fix
