"""Tiles by scan: of those that stage L2 plans on every die of a chip, the ones that reread least.

`python -m targets.ascend.tiles ascend-910c build/ascend` prints what a recipe's `tiles` keeps. No
time is measured: nothing here runs on an NPU. A tile that fits only after the compiler gave up
double buffering or moving code counts as one that does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path

from targets.ascend.chips import DIES, Die
from targets.ascend.kernels import Tiles, variants
from targets.ascend.lower import hivm_of, linalg_of
from targets.ascend.toolchain import StageError

CANDIDATES: dict[str, Mapping[str, tuple[int, ...]]] = {
    "sparse_attention": {"H": (16, 32, 64), "N": (16, 32, 64, 128)},
    "lightning_indexer": {"ROWS": (32, 64, 128, 256), "K": (32, 64, 128, 256)},
    "select_topk": {"N": (512, 1024, 2048, 4096)},
    "expert_gemm": {"ROWS": (16, 32, 64, 128), "N": (64, 128, 256), "WIDTH": (128, 256, 512)},
}
# op -> (elements read from memory a multiply-add, steps a program takes), less is better.
# attention: a row of 576 serves H heads' 576 + 512 products. select_topk reads all, whatever N.
# expert_gemm: a weight of half a byte serves ROWS rows, a code of a row N features.
COST: dict[str, Callable[[Tiles], tuple[float, float]]] = {
    "sparse_attention": lambda t: (576 / (t["H"] * 1088), 1 / t["N"]),
    "lightning_indexer": lambda t: (1 / t["ROWS"] + 1 / t["K"], 0.0),
    "select_topk": lambda t: (1.0, 1 / t["N"]),
    "expert_gemm": lambda t: (0.5 / t["ROWS"] + 1 / t["N"], 1 / t["WIDTH"]),
}


def candidates(op: str) -> list[Tiles]:
    """Returns every combination, best first."""
    names = CANDIDATES[op]
    found: list[Tiles] = [
        dict(zip(names, values, strict=True)) for values in product(*names.values())
    ]
    return sorted(found, key=COST[op])


def refuse(op: str, tiles: Tiles, dies: tuple[Die, ...], environment: Path) -> str | None:
    """Returns why `tiles` do not fit some variant of `op` on some die, or None."""
    for die, variant in product(dies, variants(op)):
        where = f"{variant.name} on {die.name}"
        try:
            hivm = hivm_of(linalg_of(variant, tiles, die, environment), die, environment)
        except StageError as error:
            return f"{where}: {error}"
        if hivm.notes:
            return f"{where}: {hivm.notes[0]}"
    return None


def scan(op: str, chip: str, environment: Path) -> Iterator[tuple[Tiles, str | None]]:
    """Yields tiles, best first, and why they do not fit; the last ones do."""
    for tiles in candidates(op):
        why = refuse(op, tiles, DIES[chip], environment)
        yield tiles, why
        if why is None:
            return


def larger(op: str, tiles: Tiles) -> list[Tiles]:
    """Returns the candidates with one tile a step larger."""
    found: list[Tiles] = []
    for name, sizes in CANDIDATES[op].items():
        found += [{**tiles, name: size} for size in sizes if size > tiles[name]][:1]
    return found


def main() -> None:
    chip, environment = sys.argv[1], Path(sys.argv[2])
    for op in CANDIDATES:
        for tiles, why in scan(op, chip, environment):
            print(f"{op}: {dict(tiles)}: {why or 'fits'}", flush=True)


if __name__ == "__main__":
    main()
