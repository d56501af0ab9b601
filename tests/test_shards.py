"""Safetensors files as bytes: hashes, flipped bits, failing disks, and what stays open."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from glm5q.errors import CheckpointError
from glm5q.pipeline.common import scan
from tests import small
from tests.commands import Tensors, edit_shard

EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


def test_hash_does_not_know_the_sharding(tmp_path: Path) -> None:
    hashes = set()
    for shards in (1, 2, 5):
        root = small.write_checkpoint(tmp_path / str(shards), shards=shards)
        hashes.add(open_checkpoint(root).scan())
    assert len(hashes) == 1


@pytest.mark.parametrize("name", [names.EMBEDDING, names.FINAL_NORM, EXPERT])
@pytest.mark.parametrize("bit", [0, 5])
def test_hash_sees_every_tensor(tmp_path: Path, name: str, bit: int) -> None:
    root = small.write_checkpoint(tmp_path / "source", shards=1)
    before = open_checkpoint(root).scan()

    def flip(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1 << bit

    edit_shard(root / "model.safetensors", flip)
    assert open_checkpoint(root).scan() != before


def test_hash_sees_swapped_tensors_and_dtypes(tmp_path: Path) -> None:
    root = small.write_checkpoint(tmp_path / "source", shards=1)
    before = open_checkpoint(root).scan()
    one, two = (f"model.layers.{n}.self_attn.q_a_proj.weight" for n in (0, 1))

    def swap(tensors: Tensors) -> None:
        tensors[one], tensors[two] = tensors[two], tensors[one]

    edit_shard(root / "model.safetensors", swap)
    swapped = open_checkpoint(root).scan()
    edit_shard(root / "model.safetensors", lambda t: t.update({one: t[one].float()}))
    assert len({before, swapped, open_checkpoint(root).scan()}) == 3


def test_scan_reports_every_byte(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path / "source"))
    seen: list[int] = []
    checkpoint.scan(seen.append)
    files = [load_file(file) for file in checkpoint.root.glob("*.safetensors")]
    assert sum(seen) == sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def test_no_flipped_bit_of_a_header_passes(tmp_path: Path) -> None:
    """Read as another tensor or refused: every single bit of a header, and the length before it."""
    root = small.write_checkpoint(
        tmp_path / "source", small.NO_MTP | {"n_routed_experts": 2}, shards=1
    )
    file = root / "model.safetensors"
    before = open_checkpoint(root).stored
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for position in list(range(16)) + list(range(16, length, 29)):
        for bit in range(8):
            with file.open("r+b") as handle:
                handle.seek(position)
                handle.write(bytes([whole[position] ^ 1 << bit]))
            with contextlib.suppress(CheckpointError):
                assert open_checkpoint(root).stored == before, (position, bit)
        with file.open("r+b") as handle:
            handle.seek(position)
            handle.write(whole[position : position + 1])
    assert open_checkpoint(root).stored == before


@pytest.mark.parametrize("failures", [1, 3])
def test_a_read_that_fails_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path / "source"))
    before = checkpoint.scan()
    left, read = [failures], os.preadv
    waited: list[float] = []

    def sometimes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, [buffers[0][:999]], offset)  # short, as networks give at times

    monkeypatch.setattr(os, "preadv", sometimes)
    monkeypatch.setattr(time, "sleep", waited.append)
    assert checkpoint.scan() == before
    assert len(waited) == failures
    assert len(checkpoint.repeated) == failures
    assert set(checkpoint.repeated) <= {entry.file.name for entry in checkpoint.stored.values()}


def test_a_disk_that_keeps_failing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path / "source"))

    def never(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", never)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-00002.*cannot be read.*mend"):
        checkpoint.layer(0)


def test_a_file_cut_short_while_open_is_named(tmp_path: Path) -> None:
    root = small.write_checkpoint(tmp_path / "source", shards=1)
    checkpoint = open_checkpoint(root)
    os.truncate(root / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="ends early"):
        checkpoint.scan()


def _open_files() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            yield str(descriptor.readlink())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_stays_open_or_mapped(tmp_path: Path) -> None:
    root = small.write_checkpoint(tmp_path / "source", shards=3)
    checkpoint = open_checkpoint(root)
    kept = [checkpoint.layer(number) for number in range(4) for _ in range(20)]
    checkpoint.scan()
    assert not [name for name in _open_files() if name.startswith(str(root))]
    assert str(root) not in Path("/proc/self/maps").read_text()
    assert len(kept) == 80


def test_time_grows_with_the_tensors_and_not_their_square(tmp_path: Path) -> None:
    """31,000 tensors in one file, whose header opened for each made a layer take 122 s.

    And a sum over all of them for each one scanned made a scan take minutes.
    """
    raw = small.NO_MTP | {
        "n_routed_experts": 512, "moe_intermediate_size": 2, "hidden_size": 8,
        "num_hidden_layers": 20, "first_k_dense_replace": 0, "num_attention_heads": 1,
    }  # fmt: skip
    tensors = small.random_tensors(parse_config(raw))
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path / "source", raw, tensors, 1))
    started = time.process_time()
    checkpoint.layer(3)
    assert time.process_time() - started < 10.0
    started = time.process_time()
    scan(checkpoint)
    assert time.process_time() - started < 40.0
