"""Chips known only from what others wrote. Nothing of ours was compiled for them or run on them."""

from __future__ import annotations

from targets.base import UNKNOWN, Figure, Support, Target

_UNSEEN = Support("unknown", "no source found")


def _chip(
    name: str,
    title: str,
    dtypes: dict[str, Support],
    memory: Figure = UNKNOWN,
    bandwidth: Figure = UNKNOWN,
    peaks: dict[str, Figure] | None = None,
    notes: tuple[str, ...] = (),
) -> Target:
    both = {dtype: dtypes.get(dtype, _UNSEEN) for dtype in ("bf16", "int8", "fp8")}
    return Target(
        name=name,
        title=title,
        kind="declared",
        verification="declared",
        weights=both | {"int4": dtypes.get("int4", _UNSEEN)},
        activations=both,
        memory_bytes=memory,
        bandwidth_bytes_s=bandwidth,
        peak_ops_s=peaks or {},
        notes=notes,
    )


def _says(answer: bool, source: str) -> Support:
    return Support("yes" if answer else "no", source)


_MTHREADS = "Moore Threads' launch material, as the press repeats it"
_MUSA = "MooreThreads/vllm-musa serves GLM-5.2 and 5.3 in FP8 on 2 x 8 S5000 (its cookbook)"
_MLU = "Cambricon/vllm-mlu has loaders for SmoothQuant W8A8, GPTQ and AWQ"
_KUNLUN = "baidu/vLLM-Kunlun serves GLM-5-W8A8-INT8 on 8 cards in bfloat16 (its tutorial)"
_KUNLUN_INT4 = "FastDeploy's documentation (WINT4, W4A8C8)"
_METAX = "MetaX C500 product page"
_METAX_INT4 = "MetaX-MACA/vLLM-metax has a W4A8 expert loader (int4 packed, int8 a token)"
_ENFLAME = "Enflame S60 product page lists FP16, BF16, INT8"
_GCU_INT4 = "EnflameTechnology/vllm-gcu: GPTQ and AWQ, four-bit weights alone (its documentation)"
_GCU_FP8 = "EnflameTechnology/vllm-gcu: FP8 not supported (its documentation)"
_HYGON = "Hygon DCU product page"
_HYGON_INT4 = "HYGON-AI/inference-cookbook-das runs DeepSeek-R1-0528-W4A8-V2 on it"

CHIPS = {
    "mthreads-s5000": _chip(
        "mthreads-s5000",
        "Moore Threads S5000",
        {
            "bf16": _says(True, _MTHREADS),
            "int8": _says(True, _MTHREADS),
            "fp8": _says(True, _MUSA),
        },
        memory=Figure(80e9, "press", _MTHREADS),
        bandwidth=Figure(1.6e12, "press", _MTHREADS),
        peaks={
            "fp8": Figure(
                None, "unknown", "920 (air) and 1000 (liquid) TFLOPS quoted without a dtype"
            )
        },
    ),
    "cambricon-mlu590": _chip(
        "cambricon-mlu590",
        "Cambricon MLU590",
        {
            "int8": _says(True, _MLU),
            "int4": Support("yes", _MLU),
            "fp8": Support("unknown", "vllm-mlu has an FP8 loader, it does not say for which chip"),
        },
        memory=Figure(80e9, "hearsay", "commonly said, no primary source"),
    ),
    "kunlunxin-p800": _chip(
        "kunlunxin-p800",
        "Kunlunxin P800",
        {
            "bf16": _says(True, _KUNLUN),
            "int8": _says(True, _KUNLUN),
            "int4": _says(True, _KUNLUN_INT4),
            "fp8": Support("unknown", "GLM-5.2-FP8 failed to start (vLLM-Kunlun issue 395)"),
        },
        memory=Figure(98_304 * 2**20, "press", "xpu-smi as users post it: P800 OAM, 98304 MiB"),
    ),
    "metax-c500": _chip(
        "metax-c500",
        "MetaX C500",
        {
            "bf16": _says(True, _METAX),
            "int8": _says(True, _METAX),
            "int4": _says(True, _METAX_INT4),
            "fp8": _says(False, f"not among the dtypes of the {_METAX}"),
        },
        memory=Figure(64e9, "vendor", _METAX),
        peaks={
            "bf16": Figure(280e12, "vendor", _METAX),
            "int8": Figure(560e12, "vendor", _METAX),
        },
    ),
    "enflame-s60": _chip(
        "enflame-s60",
        "Enflame S60",
        {
            "bf16": _says(True, _ENFLAME),
            "int8": _says(True, _ENFLAME),
            "int4": _says(True, _GCU_INT4),
            "fp8": _says(False, _GCU_FP8),
        },
        memory=Figure(48e9, "hearsay", "commonly said, no primary source"),
    ),
    "hygon-bw1000": _chip(
        "hygon-bw1000",
        "Hygon BW1000",
        {
            "int8": _says(True, _HYGON),
            "int4": _says(True, _HYGON_INT4),
            "fp8": _says(False, f"not among the dtypes of the {_HYGON}"),
        },
        memory=Figure(64e9, "vendor", _HYGON),
        bandwidth=Figure(1.6e12, "vendor", _HYGON),
        peaks={"fp16": Figure(480e12, "vendor", _HYGON)},
    ),
}
