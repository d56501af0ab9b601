"""Writing a checkpoint so that it is either whole or visibly unfinished, and can be resumed.

Shards land by rename, each beside a small state file; config.json and the index come last. Until
then the folder holds `.glm5q/`, which says whose unfinished run it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5q.errors import OutputError

STATE = ".glm5q"
COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json", "*.model", "*.tiktoken", "LICENSE*",
)  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """A shard on disk: its file, hash, each tensor's bytes, and what the run found making it."""

    file: str
    sha256: str
    tensors: dict[str, int]
    result: dict[str, Any]


@dataclass
class Writer:
    """One output folder being filled with `shards` numbered shards."""

    output: Path
    shards: int
    stem: str = "model"
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def state(self) -> Path:
        return self.output / STATE

    @property
    def manifest(self) -> Path:
        """Whose unfinished run the folder holds."""
        return self.state / "run.json"

    @property
    def index(self) -> Path:
        return self.output / f"{self.stem}.safetensors.index.json"

    def name(self, number: int) -> str:
        return f"{self.stem}-{number + 1:05d}-of-{self.shards:05d}.safetensors"

    def done(self, number: int) -> Shard | None:
        """Returns shard `number` if an earlier run finished it and its bytes are still those."""
        path = self.state / f"shard-{number:05d}.json"
        try:
            shard = Shard(**json.loads(path.read_text(encoding="utf-8")))
            whole = file_sha256(self.output / shard.file) == shard.sha256
        except (OSError, ValueError, TypeError):
            return None
        return shard if whole else None

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> Shard:
        """Writes a shard, which counts only once committed.

        Raises OutputError when the disk is full or fails; committed shards stay for the next run.
        """
        target = self.output / self.name(number)
        partial = self._partial(target)
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        try:
            self.index.unlink(missing_ok=True)  # an earlier run's: no longer true of the shards
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, partial, metadata={"format": "pt"})
            partial.chmod(0o666 & ~_umask())  # the library leaves it to its owner alone
            shard = Shard(target.name, file_sha256(partial), sizes, {})
            _land(partial, target)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise write_error(target, error) from error
        return shard

    def commit(self, number: int, shard: Shard, result: dict[str, Any]) -> Shard:
        """Marks a written shard as done, with what the run found out making it."""
        path = self.state / f"shard-{number:05d}.json"
        shard = replace(shard, result=result)
        try:
            self._write_json(path, asdict(shard))
        except OSError as error:
            raise write_error(path, error) from error
        return shard

    def read(self, number: int) -> dict[str, Tensor]:
        """Returns a finished shard's tensors as they lie on disk."""
        return dict(load_file(self.output / self.name(number)))

    def finish(
        self,
        config: Mapping[str, Any],
        shards: Iterable[Shard],
        source: Path,
        files: Mapping[str, str],
    ) -> None:
        """Copies tokenizer and templates byte for byte, writes config.json, `files`, the index."""
        weight_map, total = {}, 0
        for shard in shards:
            weight_map.update(dict.fromkeys(shard.tensors, shard.file))
            total += sum(shard.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        try:
            for pattern in COPIED:
                for file in sorted(source.glob(pattern)):
                    if file.is_file():
                        partial = self._partial(file)
                        shutil.copyfile(file, partial)
                        _land(partial, self.output / file.name)
            self._write_json(self.output / "config.json", config)
            for name, text in files.items():
                self._write_text(self.output / name, text)
            self._write_json(self.index, index)
        except OSError as error:
            raise write_error(self.output, error) from error

    def close(self, finished: bool) -> None:
        """Releases the folder; a finished run also drops its state, before others may look."""
        if finished:
            self.manifest.unlink(missing_ok=True)
            shutil.rmtree(self.state, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def lock(self) -> None:
        """Keeps other runs out until closed. Raises BlockingIOError if one is in."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        self._lock = (self.state / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def resume(self, identity: Mapping[str, str]) -> None:
        """Claims the locked folder for this run. Raises OutputError if it is another run's."""
        _refuse_foreign(self)  # again: a run may have ended since the first look
        if self.manifest.exists():
            _check_identity(self.manifest, identity)
        else:
            self._write_json(self.manifest, dict(identity))
        for leftover in (*self.output.glob("*.partial"), *self._unfinished.iterdir()):
            leftover.unlink()

    @property
    def _unfinished(self) -> Path:
        """Where files grow; libraries make temporary ones beside them, which a kill leaves."""
        return self.state / "partial"

    def _partial(self, path: Path) -> Path:
        return self._unfinished / path.name

    def _write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        self._write_text(path, json.dumps(content, indent=1) + "\n")

    def _write_text(self, path: Path, text: str) -> None:
        partial = self._partial(path)
        partial.write_text(text, encoding="utf-8")
        _land(partial, path)


def open_writer(
    output: Path, shards: int, identity: Mapping[str, str], stem: str = "model"
) -> Writer:
    """Returns a writer on an empty folder, or on one that holds the same unfinished run.

    `identity` tells runs apart (source, recipe, data, ...). Raises OutputError when the folder
    cannot be written, is in use, holds other files, or holds another run's unfinished work.
    """
    writer = Writer(output, shards, stem)
    try:
        output.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(writer)
        writer.lock()
        writer.resume(identity)
    except BlockingIOError:
        writer.close(finished=False)
        raise OutputError(f"{output}: another run is writing here", "wait for it") from None
    except OSError as error:
        writer.close(finished=False)
        raise write_error(output, error) from None
    except OutputError:
        writer.close(finished=not writer.manifest.exists())  # leave no trace in others' folders
        raise
    return writer


def check_free(output: Path) -> None:
    """Raises OutputError if `output` holds files that are no unfinished run's.

    A folder that cannot be looked into is left to what writes there: it says why.
    """
    writer = Writer(output, 0)
    try:
        if output.is_dir():
            _refuse_foreign(writer)
    except OutputError:
        writer.close(finished=True)  # a finished run may have died dropping its state
        raise
    except OSError:
        return


def _refuse_foreign(writer: Writer) -> None:
    others = [path.name for path in writer.output.iterdir() if path.name != STATE]
    if others and not writer.manifest.exists():
        raise OutputError(
            f"{writer.output}: not empty ({sorted(others)[0]} is there)",
            "give an empty or new folder with --output",
        )


def _check_identity(manifest: Path, identity: Mapping[str, str]) -> None:
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    known = found if isinstance(found, dict) else {}
    differing = [key for key, value in identity.items() if known.get(key) != value]
    if differing:
        raise OutputError(
            f"{manifest.parent.parent}: holds an unfinished run with another {differing[0]}",
            "repeat that run's command to resume it, or give another --output",
        )


def write_error(path: Path, error: Exception) -> OutputError:
    """Returns the one-line error for a failed write to `path`."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error)
    number = getattr(error, "errno", None)
    if number in full or any(f"os error {code}" in text for code in full):
        return OutputError(
            f"{path}: no space left", "free some and repeat the command; finished layers are kept"
        )
    return OutputError(
        f"{path}: cannot be written ({text})", "check the folder and its permissions"
    )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _land(partial: Path, target: Path) -> None:
    """Renames a finished file into place after its bytes are on the disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
