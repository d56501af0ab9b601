"""A process that has imported everything and forks itself for each command: seconds saved a run.

Run as a module it answers on stdin and stdout; `Warm` is the other end. A child can be told to die
by SIGKILL just before its n-th change to a folder, which reaches every moment between two writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, Any, NoReturn

CHANGES = frozenset(
    ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate")
)
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    """A finished child: exit code, negative for a signal; its output, processor time, memory."""

    code: int
    stdout: str
    stderr: str
    cpu_s: float
    peak_bytes: int


class Warm:
    """Starts commands in forks of one warm process, one at a time."""

    def __init__(self, logs: Path, **environment: str) -> None:
        self._logs = logs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment},
        )  # fmt: skip

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(self, *arguments: str | Path, **how: Any) -> int:
        """Starts `glm5q ARGUMENTS` and returns its process id. See `_prepare` for `how`."""
        assert self._process.stdin is not None
        request = {"arguments": [str(a) for a in arguments], "logs": str(self._logs), "how": how}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def wait(self) -> Ended:
        """Waits for the child that `start` started."""
        answer = self._answer()
        texts = [(self._logs / name).read_text() for name in ("stdout", "stderr")]
        return Ended(answer["code"], texts[0], texts[1], answer["cpu_s"], answer["peak_bytes"])

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Signals a started child; one that has ended by now is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def run(self, *arguments: str | Path, **how: Any) -> Ended:
        self.start(*arguments, **how)
        return self.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(**request)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        _, status, usage = os.wait4(pid, 0)
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        print(json.dumps(answer), file=answers, flush=True)


def _child(arguments: list[str], logs: str, how: dict[str, Any]) -> NoReturn:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(Path(logs) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
    from glm5q.cli import main

    sys.argv = ["glm5q", *arguments]
    _prepare(**how)
    code = 70
    try:
        main(arguments, prog_name="glm5q")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare(
    kill_at: int = 0, within: str = "", kill_after_s: float = 0, file_limit: int = 0, user: int = 0
) -> None:
    """`kill_at` n: die before the n-th change under `within`. `file_limit`: bytes a file may have.

    `kill_after_s`: die after so much processor time, which other processes' load does not move.
    `user`: become this user id.
    """
    if kill_after_s:
        Thread(target=_die_after, args=(kill_after_s,), daemon=True).start()
    if file_limit:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if user:
        os.setegid(user)
        os.seteuid(user)
    if not kill_at:
        return
    left = kill_at

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal left
        opened = event == "open" and isinstance(details[2], int) and details[2] & os.O_ACCMODE
        if (event in CHANGES or opened) and str(details[0]).startswith(within):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _die_after(cpu_s: float) -> NoReturn:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # no thread may exist before a fork
    # Another user's child may not be let into the folder that Python lies in.
    for module in ("glm5q.pipeline", "glm5q.progress", "reports.terminal", "encodings.utf_8_sig"):
        import_module(module)
    pages = import_module("reports.html")._environment()
    for template in pages.list_templates(extensions=["j2"]):
        pages.get_template(template)
    _serve(sys.stdin, sys.stdout)
