"""Times llm-compressor's own GPTQ functions on a layer's shapes, to stand beside bench-calibrate's.

Run in the environment that has llm-compressor (tests/peers/llmcompressor.txt), on the same GPU:
`python tests/peers/time_llmcompressor_gptq.py --device cuda`. A few experts are timed, Hessians and
batched rounding; forwards, observers and loading are not. What a whole layer would take is
projected by the count of experts and tokens, and said to be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

PARENTS = ("llmcompressor", "llmcompressor.modifiers", "llmcompressor.modifiers.gptq")
GROUP, REPEATS = 128, 3


def functions() -> tuple[Any, Any, Any, Any]:
    """Returns its functions, their files as they are.

    Its packages' own __init__ is not run: it wants datasets and pyarrow, which nothing here does.
    """
    found = importlib.util.find_spec(PARENTS[0])
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-compressor is not installed here")
    root = found.submodule_search_locations[0]
    for name in PARENTS:
        module = types.ModuleType(name)
        module.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = module
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian

    return make_empty_hessian, accumulate_hessian, quantize_weight, QuantizationArgs


def median_s(do: Callable[[], object], device: str) -> float:
    """Median seconds, the device's work included; the first run, which compiles, is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        do()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8, help="rounded in one batch")
    parser.add_argument("--of-experts", type=int, default=256, help="projected to")
    parser.add_argument(
        "--routed", type=int, default=8 << 20, help="rows of all experts, projected"
    )
    parser.add_argument("--call", type=int, default=4096, help="rows of an expert in one call")
    asked = parser.parse_args()
    empty, accumulate, quantize, arguments = functions()
    scheme = arguments(
        num_bits=4, group_size=GROUP, strategy="group", symmetric=True, actorder="static"
    )
    device, hessian_s, round_s = asked.device, 0.0, 0.0
    shapes = [(asked.inner, asked.hidden)] * 2 + [(asked.hidden, asked.inner)]  # gate, up, down
    for rows, columns in shapes:
        module = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device=device)
        x = torch.randn(1, asked.call, columns, device=device).bfloat16()
        hessian, seen = empty(module, device=device), torch.zeros((), device=device)
        call_s = median_s(lambda: accumulate(x, module, hessian, seen), device)  # noqa: B023
        hessian_s += call_s * asked.routed / asked.call
        inputs = torch.randn(2 * columns, columns, device=device)
        hessians = (inputs.T @ inputs / len(inputs)).expand(asked.experts, columns, columns)
        weight = 0.02 * torch.randn(asked.experts, rows, columns, device=device).bfloat16()
        scale = weight.float().unflatten(-1, (-1, GROUP)).abs().amax(-1).div(7.5).bfloat16()
        zero = torch.zeros_like(scale, dtype=torch.int8)
        batch_s = median_s(
            lambda: quantize(weight.clone(), hessians.clone(), scale, zero, None, scheme),  # noqa: B023
            device,
        )
        round_s += batch_s * asked.of_experts / asked.experts
    found = {
        "what": "projected from timed calls; no forward, observer or loading in it",
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "asked": vars(asked),
        "hessians_s": hessian_s,
        "rounding_s": round_s,
        "layer_s": hessian_s + round_s,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
