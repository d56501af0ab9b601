"""Our reading of each tool's files against that tool's own: run by `make peers`, after the rows.

    python -m pytest tests/peers/unpackers.py

Skipped, and said so, for a tool whose output is not there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.peers import driver, reader, session
from tests.peers.peers import PEERS

BUILD = Path(__file__).parents[2] / "build" / "peers"
LAYER = "model.layers.1.mlp.experts."
HALF = 2.0**-10  # their layers multiply in float16


def outputs(tool: str) -> list[Path]:
    """The tool's finished outputs, whatever tokens they were made from."""
    names = [driver.slug(peer.name) for peer in PEERS if peer.tool == tool]
    return [
        file.parent
        for name in names
        for file in sorted(BUILD.glob(f"runs-*/{name}/{session.IDENTITY}"))
    ]


def ours(folder: Path) -> dict[str, Tensor]:
    found = {name: t for name, t in reader.decoded(folder) if name.startswith(LAYER)}
    assert len(found) == 48
    return found


def either(tool: str) -> list[object]:
    found: list[object] = list(outputs(tool))
    return found or [pytest.param(None, marks=pytest.mark.skip(f"no output of {tool}"))]


@pytest.mark.parametrize("folder", either("llmcompressor"), ids=str)
def test_llm_compressor_as_compressed_tensors_decompresses(folder: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    stored = load_file(folder / "model.safetensors")
    for name, mine in ours(folder).items():
        base = name.removesuffix(".weight")
        shape = torch.Size(stored[f"{base}.weight_shape"].tolist())
        codes = unpack_from_int32(stored[f"{base}.weight_packed"], 4, shape).float()
        scale = stored[f"{base}.weight_scale"].float()
        theirs = codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)
        assert torch.equal(mine, theirs), name


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tool", ["gptqmodel", "autoround"])
def test_gptq_layout_as_its_own_layer_unpacks(tool: str, tmp_path: Path) -> None:
    folders = outputs(tool)
    if not folders:
        pytest.skip(f"no output of {tool}")
    python = BUILD / tool / "venv" / "bin" / "python"
    script = Path(__file__).parent / f"unpack_with_{tool}.py"
    file = tmp_path / "theirs.safetensors"
    subprocess.run([python, script, folders[0], file], check=True, capture_output=True)
    theirs, mine = load_file(file), ours(folders[0])
    assert theirs.keys() == mine.keys()
    for name, matrix in theirs.items():
        assert (mine[name] - matrix).abs().max() <= HALF * matrix.abs().max(), name
