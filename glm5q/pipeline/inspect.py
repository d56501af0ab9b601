"""`glm5q inspect`: what a checkpoint is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.pipeline import describe


def inspect(root: Path) -> dict[str, Any]:
    """Returns what a checkpoint is: variant, sizes, schedule, bytes by layer, role and dtype."""
    source = open_checkpoint(root)
    config = source.config
    expected = names.expected_tensors(config)
    by_role: dict[str, int] = {}
    by_dtype: dict[str, int] = {}
    for name, stored in source.stored.items():
        role = describe.role_of(name, expected)
        by_role[role] = by_role.get(role, 0) + stored.nbytes
        by_dtype[stored.dtype] = by_dtype.get(stored.dtype, 0) + stored.nbytes
    return {
        "path": str(root),
        "variant": config.variant(),
        "parameters": describe.parameters(source),
        "bytes": source.nbytes,
        "tensors": len(source.stored),
        "layers": [
            {
                "layer": number,
                "kind": config.kind(number),
                "indexer": "full" if config.full_indexer[number] else "shared",
                "bytes": source.layer_bytes(number),
            }
            for number in range(config.num_layers)
        ],
        "mtp_layers": config.num_nextn_predict_layers,
        "bytes_by_role": dict(sorted(by_role.items())),
        "bytes_by_dtype": dict(sorted(by_dtype.items())),
        "config": asdict(config),
    }
