"""Where a run may write, and what it leaves when the disk fills up or the folder is not its own."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glm5q.pipeline import CalibrateOptions
from glm5q.writer import open_writer
from tests.commands import INDEX, copy, looks_whole, refused
from tests.runs import command, contents, small_run
from tests.warm import Warm

NOBODY = 65534


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("logs")) as process:
        yield process


@pytest.fixture(scope="module")
def asked() -> Iterator[CalibrateOptions]:
    """A small run in a folder that other users can read."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        run = small_run(folder)
        for file in run.source.iterdir():
            file.chmod(0o644)
        yield run


@pytest.fixture(scope="module")
def unlimited(
    warm: Warm, asked: CalibrateOptions, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    output = tmp_path_factory.mktemp("unlimited") / "out"
    assert warm.run(*command(asked, output)).code == 0
    return contents(output)


# Folders


def test_files_have_the_usual_permissions(
    asked: CalibrateOptions, warm: Warm, tmp_path: Path
) -> None:
    """Who serves a checkpoint is seldom who made it; safetensors leaves files to the owner."""
    output = tmp_path / "out"
    assert warm.run(*command(asked, output)).code == 0
    plain = tmp_path / "plain"
    plain.touch()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in output.iterdir()}
    assert modes == dict.fromkeys(modes, stat.S_IMODE(plain.stat().st_mode))


@pytest.mark.parametrize("name", ["notes.txt", "config.json", INDEX, ".hidden", "sub"])
def test_folder_that_is_not_empty(asked: CalibrateOptions, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == "sub" else (tmp_path / name).write_text("mine")
    refused(*command(asked, tmp_path), says=(str(tmp_path), "not empty", name, "--output"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_output_that_is_a_file(asked: CalibrateOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(*command(asked, tmp_path / "file"), says=("file", "cannot be written"))
    refused(*command(asked, tmp_path / "file" / "below"), says=("file", "cannot be written"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_output_where_no_folder_can_be(asked: CalibrateOptions) -> None:
    refused(*command(asked, Path("/proc/glm5q/out")), says=("/proc/glm5q", "cannot be written"))
    refused(*command(asked, Path("/tmp") / ("x" * 5000)), says=("cannot be written",))


def test_output_of_another_user(asked: CalibrateOptions, warm: Warm) -> None:
    folder = asked.output.parent / "closed"
    folder.mkdir(mode=0o555)
    user = NOBODY if os.geteuid() == 0 else 0
    for output in (folder, folder / "below"):
        ended = warm.run(*command(asked, output), user=user)
        assert ended.code == 1, ended.stderr
        assert "Permission denied" in ended.stderr
        assert "check the folder and its permissions" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not list(folder.iterdir())


def test_source_of_another_user(asked: CalibrateOptions, warm: Warm, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not run: only root can become another user")
    source = copy(asked.source, asked.output.parent / "private")
    for name in ("config.json", INDEX, "tokenizer.json", "model-00001-of-00002.safetensors"):
        (source / name).chmod(0o600)
        arguments = command(asked, tmp_path / "out")
        arguments[1] = source
        ended = warm.run(*arguments, user=NOBODY)
        (source / name).chmod(0o644)
        assert ended.code == 1
        assert name in ended.stderr
        assert "Traceback" not in ended.stderr


def test_output_that_touches_the_source(asked: CalibrateOptions, tmp_path: Path) -> None:
    source = copy(asked.source, tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    for output in (source, tmp_path / "link", source / "below", tmp_path, source / ".." / "source"):
        arguments = command(asked, output)
        arguments[1] = source
        refused(*arguments, says=("the source", "give another --output"))
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_folder_in_use(asked: CalibrateOptions, tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "out", 6, {"run": "another"})
    refused(*command(asked, tmp_path / "out"), says=("another run is writing here",))
    writer.close(finished=False)
    refused(*command(asked, tmp_path / "out"), says=("unfinished run with another",))


# A full disk


@pytest.mark.parametrize("limit", [10_000, 20_000, 60_000, 100_000, 150_000])
def test_file_size_limit(
    asked: CalibrateOptions, warm: Warm, unlimited: dict[str, str], tmp_path: Path, limit: int
) -> None:
    """Whichever file is the first too large, from the first shard to the report."""
    output = tmp_path / "out"
    ended = warm.run(*command(asked, output), file_limit=limit)
    assert_out_of_space(ended.code, ended.stderr)
    assert not list(output.glob("*.partial"))
    assert not (output / "report.html").exists()
    ended = warm.run(*command(asked, output))
    assert ended.code == 0, ended.stderr
    assert contents(output) == unlimited


def assert_out_of_space(code: int, stderr: str) -> None:
    assert code == 1, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("glm5q: ")]
    assert len(lines) == 1, stderr
    assert "no space left" in lines[0]
    assert "free some and repeat the command" in lines[0]
    assert "Traceback" not in stderr


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, as small as `resize` makes it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not run: no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    option = f"remount,size={kilobytes}k"
    subprocess.run(["mount", "-o", option, str(disk)], check=True, capture_output=True)


def test_full_disk(
    asked: CalibrateOptions, warm: Warm, unlimited: dict[str, str], mounted: Path
) -> None:
    """A little more room each time, until it is enough."""
    output = mounted / "out"
    failures = 0
    for kilobytes in range(16, 2000, 76):
        resize(mounted, kilobytes)
        ended = warm.run(*command(asked, output))
        if ended.code == 0:
            break
        failures += 1
        assert_out_of_space(ended.code, ended.stderr)
        assert not looks_whole(output) or (output / "config.json").exists()
    assert failures >= 4
    assert contents(output) == unlimited
