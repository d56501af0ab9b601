"""`glm5q doctor`: every gap planted in what probes found, and its line; and this very machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5q import doctor
from glm5q.doctor import Gap, gaps
from targets import base, machine
from targets.machine import Gpu, Machine, Torch
from tests import small
from tests.commands import refused, run

GIB = 2**30
VERSIONS = dict.fromkeys(machine.PACKAGES) | {
    "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.24.0", "numpy": "2.4.6"
}  # fmt: skip
SOUND = Machine(
    python="3.11.7", processor="a CPU", cores=16, isa=("avx2", "avx512f"), memory_bytes=128 * GIB,
    memory_bytes_s=20e9, disk_write_bytes_s=2e9, disk_read_bytes_s=3e9, compiler="/usr/bin/c++",
    gpus=(Gpu("NVIDIA H200", 140 * GIB),), driver="580.159.04", driver_cuda="13.0", npus=0,
    cann=None, versions=VERSIONS, triton_wanted="3.6.0", torch=Torch("13.0", True),
)  # fmt: skip


def with_versions(**changed: str | None) -> Machine:
    return replace(SOUND, versions=VERSIONS | changed)


def lines(found: Machine, target: str = "h200") -> list[str]:
    return [gap.line() for gap in gaps(found, target)]


def test_a_sound_machine_lacks_nothing() -> None:
    assert lines(SOUND) == []
    assert lines(SOUND, "cpu") == []
    assert doctor.guess(SOUND) == "h200"


NPU = replace(
    SOUND, npus=16, cann="9.0.0", gpus=(),
    versions=VERSIONS | {"torch": "2.11.0+cpu", "torch_npu": "2.11.0"}, torch=Torch(None, False),
)  # fmt: skip
# what was found -> target, whether it stops, what the line says, the fix
PLANTED: dict[str, tuple[Machine, str, bool, str, str]] = {
    "no GPU": (replace(SOUND, gpus=()), "h200", True, "no NVIDIA GPU", "H200"),
    "another GPU": (
        replace(SOUND, gpus=(Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB),)),
        "h200", True, "no H200, only NVIDIA A100-SXM4-80GB", "--target",
    ),
    "a smaller GPU of the name": (
        replace(SOUND, gpus=(Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB),)),
        "a100", True, "no A100 80GB, only NVIDIA A100-SXM4-40GB", "--target",
    ),
    "a part of a GPU": (
        replace(SOUND, gpus=(Gpu("NVIDIA H200", 140 * GIB), Gpu("NVIDIA H200", 70 * GIB))),
        "h200", True, "a GPU has 75.2 GB of memory, NVIDIA H200 is planned with 150.1 GB",
        "whole GPUs",
    ),
    "CUDA too old": (
        replace(SOUND, driver="535.54", driver_cuda="12.2"), "h200", True,
        "CUDA too old: driver 535.54 runs up to 12.2, torch is built for 13.0",
        "driver for CUDA 13.0",
    ),
    "CUDA a little old": (
        replace(SOUND, driver_cuda="12.4", torch=Torch("12.8", True)), "h200", False,
        "CUDA too old", "driver for CUDA 12.8",
    ),
    "CPU torch": (replace(SOUND, torch=Torch(None)), "h200", True, "torch is a CPU build", "CUDA"),
    "GPU unusable": (replace(SOUND, torch=Torch("13.0")), "h200", True, "no usable GPU", "driver"),
    "triton mismatched": (
        with_versions(triton="3.9.0"), "h200", True,
        "triton 3.9.0 does not belong to torch 2.11.0+cu130, which wants 3.6.0", "triton==3.6.0",
    ),
    "triton mismatched by the table": (
        replace(with_versions(torch="2.14.1+cu130", triton="3.6.0"), triton_wanted=None),
        "h200", True, "which wants 3.8", "triton==3.8.*",
    ),
    "no triton": (with_versions(triton=None), "h200", True, "triton is not", "pip install"),
    "no torch": (
        replace(with_versions(torch=None), torch=None), "cpu", True, "torch is not", "pip install"
    ),
    "old torch": (with_versions(torch="2.6.0"), "h20", True, "2.6.0 is older", "torch>=2.11"),
    "transformers too old": (
        with_versions(transformers="5.12.1"), "cpu", False,
        "transformers 5.12.1 rotates GLM-5 wrongly (RoPE", "transformers>=5.13",
    ),
    "vllm too old": (with_versions(vllm="0.20.1"), "h200", False, "vllm 0.20.1", "vllm>=0.33"),
    "torch_npu breaks torch": (
        replace(
            NPU, torch=Torch(error="ImportError: libhccl.so: cannot open", without_plugins=True)
        ),
        "ascend-910c", True, "torch_npu 2.11.0 breaks `import torch` (ImportError: libhccl.so",
        "set_env.sh, or pip uninstall torch_npu",
    ),
    "torch_npu breaks torch on a CPU too": (
        replace(
            with_versions(torch_npu="2.11.0"), torch=Torch(error="OSError", without_plugins=True)
        ),
        "cpu", True, "torch_npu 2.11.0 breaks", "pip uninstall torch_npu",
    ),
    "torch broken by itself": (
        replace(SOUND, torch=Torch(error="OSError: libtorch.so")), "cpu", True,
        "`import torch` fails (OSError: libtorch.so)", "force-reinstall",
    ),
    "no NPU": (replace(NPU, npus=0), "ascend-910b", True, "no Ascend NPU", "Atlas A2"),
    "no CANN": (replace(NPU, cann=None), "ascend-910c", True, "no CANN", "install CANN"),
    "no torch_npu": (
        replace(NPU, versions=dict(NPU.versions) | {"torch_npu": None}), "ascend-910c", True,
        "torch_npu is not installed", "torch-npu==2.11.*",
    ),
    "torch_npu mismatched": (
        replace(NPU, versions=dict(NPU.versions) | {"torch_npu": "2.14.0"}), "ascend-910c", True,
        "torch_npu 2.14.0 does not belong to torch 2.11.0+cpu", "torch-npu==2.11.*",
    ),
    "declared chip": (SOUND, "metax-c500", True, "nothing of glm5q runs on MetaX C500", "CPU"),
    "no compiler": (replace(SOUND, compiler=None), "cpu", False, "no C++ compiler", "g++"),
    "no AVX2": (replace(SOUND, isa=("avx512f",)), "cpu", False, "no AVX2", "CPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_each_gap_is_named_with_its_fix(case: str) -> None:
    found, target, stops, says, fix = PLANTED[case]
    matching = [gap for gap in gaps(found, target) if says in gap.what]
    assert len(matching) == 1, lines(found, target)
    gap = matching[0]
    assert gap.stops is stops
    assert fix in gap.fix
    assert "\n" not in gap.line()
    diagnosis = doctor.Diagnosis(target, found, (gap,))
    assert diagnosis.ok is not stops
    assert gap.line() in diagnosis.lines()


def test_an_npu_that_is_sound_lacks_nothing() -> None:
    assert lines(NPU, "ascend-910c") == []
    assert doctor.guess(NPU) == "ascend-910c"


@pytest.mark.parametrize("target", base.TARGETS)
def test_every_target_is_diagnosed(target: str) -> None:
    assert all(isinstance(gap, Gap) for gap in gaps(SOUND, target))


def test_a_cpu_build_of_torch_asks_for_no_triton() -> None:
    """The CPU wheel pins none; any triton beside it is for the interpreter."""
    found = replace(
        with_versions(torch="2.13.0+cpu", triton="3.6.0"), triton_wanted=None, torch=Torch(None)
    )
    assert lines(found, "cpu") == []


NAMES = {
    "NVIDIA H200": "h200", "NVIDIA H200 NVL": "h200", "NVIDIA H20": "h20", "NVIDIA H20-3e": "h20",
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 4090": "rtx-4090", "Tesla T4": "cpu",
    "NVIDIA A100 80GB PCIe": "a100", "NVIDIA A100-SXM4-40GB": "cpu", "NVIDIA A100-PCIE-40GB": "cpu",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "cpu", "NVIDIA GeForce RTX 4090 D": "cpu",
    "NVIDIA GH200 480GB": "cpu", "NVIDIA A800-SXM4-80GB": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_which_target_a_gpu_is(name: str) -> None:
    assert doctor.guess(replace(SOUND, gpus=(Gpu(name, GIB),))) == NAMES[name]


@pytest.mark.parametrize("target", doctor.GPU_NAMES)
def test_memory_is_held_to_the_target_s(target: str) -> None:
    names = {"rtx-4090": "NVIDIA GeForce RTX 4090", "a100": "NVIDIA A100-SXM4-80GB"}
    planned = base.load(target).memory_bytes.value
    assert planned is not None
    for share, said in ((1.0, 0), (0.951, 0), (0.949, 1)):
        gpu = Gpu(names.get(target, f"NVIDIA {target.upper()}"), int(share * planned))
        found = [line for line in lines(replace(SOUND, gpus=(gpu,)), target) if "planned" in line]
        assert len(found) == said, share


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_bias_that_is_narrow(tmp_path: Path, dtype: torch.dtype) -> None:
    sound = small.write_checkpoint(tmp_path / "sound")
    assert list(doctor.checkpoint_gaps(sound, None)) == []
    for file in sound.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {n: t.to(dtype) if n.endswith("bias") else t for n, t in tensors.items()}
        save_file(changed, file)
    (gap,) = doctor.checkpoint_gaps(sound, None)
    assert "e_score_correction_bias is not float32 (3 of them)" in gap.what
    assert gap.stops


def test_a_tokenizer_that_is_not_the_source_s(tmp_path: Path) -> None:
    source = small.write_checkpoint(tmp_path / "source")
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    assert list(doctor.checkpoint_gaps(copy, source)) == []
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace("!", "?", 1))
    (copy / "chat_template.jinja").unlink()
    first, second = doctor.checkpoint_gaps(copy, source)
    assert "tokenizer.json differs from the source's" in first.what
    assert "chat_template.jinja is missing" in second.what
    (copy / "report.json").write_text(json.dumps({"source": {"path": str(source)}}))
    assert len(list(doctor.checkpoint_gaps(copy, None))) == 2  # the record names the source


def test_a_tokenizer_is_compared_by_content(tmp_path: Path) -> None:
    """Same size and same time of change, as a copy with `cp -p` and one edit has them."""
    source = small.write_checkpoint(tmp_path / "source")
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    mine, theirs = copy / "tokenizer.json", source / "tokenizer.json"
    text = theirs.read_text()
    mine.write_text(text.replace("!", "?", 1))
    assert text != mine.read_text()
    for file in (mine, theirs):
        os.utime(file, ns=(10**18, 10**18))
    assert mine.stat().st_size == theirs.stat().st_size
    (gap,) = doctor.checkpoint_gaps(copy, source)
    assert "tokenizer.json differs" in gap.what


HEADERS = {
    "a list": "[]", "a number": "1", "an empty entry": '{"%s": {}}', "a text": '{"%s": "x"}',
    "a null": '{"%s": null}', "nested": "[" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_none(tmp_path: Path, case: str) -> None:
    header = HEADERS[case].replace("%s", f"model.layers.3.{doctor.BIAS}").encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused("doctor", "--target", "cpu", tmp_path, says=("a.safetensors", "fetch this shard"))


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", '{"source": 1}', '{"source": {"path": []}}',
                                  json.dumps({"source": {"path": "a" * 5000}})])  # fmt: skip
def test_a_record_that_names_no_source(tmp_path: Path, text: str) -> None:
    sound = small.write_checkpoint(tmp_path / "sound")
    (sound / "report.json").write_text(text)
    assert list(doctor.checkpoint_gaps(sound, None)) == []


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused("doctor", tmp_path / "absent", says=("absent", "no such folder"))
    refused("doctor", "--target", "h300", says=("h300", "h200"))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    refused("doctor", tmp_path, says=("model.safetensors", "not a safetensors"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_this_machine_in_five_seconds() -> None:
    """Exit 1 for a GPU target, and what it says of this machine is so.

    Judged by CPU seconds of all its processes: a machine busy with other things takes longer.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "glm5q", "doctor", "--target", "h200", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    said = " ".join(gap["what"] for gap in found["gaps"])
    assert "no NVIDIA GPU" in said
    own = found["machine"]
    assert own["versions"]["torch"] == torch.__version__
    assert own["torch"] == {
        "cuda": torch.version.cuda, "usable": False, "error": None, "without_plugins": False
    }  # fmt: skip
    assert 1e8 < own["memory_bytes_s"] < 1e12
    assert 1e6 < own["disk_write_bytes_s"] < 1e11
    print(f"doctor took {seconds:.1f} s, {used:.1f} s of CPU")
    assert used < 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_cpu_is_enough_for_the_cpu_target() -> None:
    result = run("doctor", "--target", "cpu")
    assert result.exit_code == 0, result.output
    assert "cpu: can run" in result.stdout
    assert "memory" in result.stdout


def test_torch_is_not_imported_in_process() -> None:
    code = (
        "import sys; from pathlib import Path; from glm5q import doctor;"
        "found = doctor.doctor('cpu', None, None, Path('.'));"
        "assert 'torch' not in sys.modules; assert found.machine.torch.error is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torch_that_a_plugin_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself, on a stand-in for torch whose device plugin fails to load."""
    code = (
        "import os, json\n"
        "if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0':\n"
        "    raise ImportError('libhccl.so: cannot open shared object file')\n"
        "print(json.dumps({'cuda': None, 'usable': False}))"
    )
    monkeypatch.setattr(machine, "TORCH_PROBE", code)
    found = machine._finish_import(machine._start_import("2.11.0"))
    assert found == Torch(
        error="ImportError: libhccl.so: cannot open shared object file", without_plugins=True
    )
    monkeypatch.setattr(machine, "TORCH_PROBE", "raise OSError('libtorch.so')")
    found = machine._finish_import(machine._start_import("2.11.0"))
    assert found == Torch(error="OSError: libtorch.so")
    monkeypatch.setattr(machine, "TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "IMPORT_S", 0.5)
    found = machine._finish_import(machine._start_import("2.11.0"))
    assert found == Torch(error="not done after 0.5 s")


def test_nvidia_smi_is_read_as_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of driver 580.159.04 on an H200."""
    printed = {
        2: "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04     CUDA Version: 13.0     |\n",
        4: "NVIDIA H200, 143771 MiB, 580.159.04\nNVIDIA H200, 143771 MiB, 580.159.04\n",
    }
    monkeypatch.setattr(machine, "_output", lambda *command: printed[len(command) + 1])
    driver, cuda, gpus = machine.nvidia()
    assert (driver, cuda) == ("580.159.04", "13.0")
    assert gpus == (Gpu("NVIDIA H200", 143771 << 20),) * 2
