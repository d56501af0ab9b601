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


_MTHREADS = "Moore Threads' launch material"
_METAX = "MetaX C500 product page"
_ENFLAME = "Enflame S60 product page lists FP16, BF16, INT8"
_HYGON = "Hygon DCU product page"
_KUNLUN = "FastDeploy and vllm-kunlun documentation (W8A8, WINT4, W4A8C8)"

CHIPS = {
    "mthreads-s5000": _chip(
        "mthreads-s5000",
        "Moore Threads S5000",
        {
            "bf16": _says(True, _MTHREADS),
            "int8": _says(True, _MTHREADS),
            "fp8": _says(True, _MTHREADS),
        },
        memory=Figure(80e9, "press", _MTHREADS),
        bandwidth=Figure(1.6e12, "press", _MTHREADS),
        peaks={"fp8": Figure(None, "unknown", "1000 TFLOPS quoted without a dtype")},
    ),
    "cambricon-mlu590": _chip(
        "cambricon-mlu590",
        "Cambricon MLU590",
        {"fp8": Support("unknown", "press speaks of FP8 + INT4 on Cambricon, not of which chip")},
        memory=Figure(80e9, "press", "commonly said, no primary source"),
    ),
    "kunlunxin-p800": _chip(
        "kunlunxin-p800",
        "Kunlunxin P800",
        {"int8": _says(True, _KUNLUN), "int4": _says(True, _KUNLUN)},
    ),
    "metax-c500": _chip(
        "metax-c500",
        "MetaX C500",
        {
            "bf16": _says(True, _METAX),
            "int8": _says(True, _METAX),
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
            "fp8": _says(False, _ENFLAME),
        },
        memory=Figure(48e9, "press", "commonly said, no primary source"),
    ),
    "hygon-bw1000": _chip(
        "hygon-bw1000",
        "Hygon BW1000",
        {
            "int8": _says(True, _HYGON),
            "fp8": _says(False, f"not among the dtypes of the {_HYGON}"),
        },
        memory=Figure(64e9, "vendor", _HYGON),
        bandwidth=Figure(1.6e12, "vendor", _HYGON),
        peaks={"fp16": Figure(480e12, "vendor", _HYGON)},
    ),
}
