"""ONNX Runtime's quantized products, timed in a process of their own.

Its threads spin after a call and disturb torch's. These are other schemes than ours and are not
judged here: MatMulNBits quantizes activations to int8 a block of 128 columns, not a token, and
DynamicQuantizeMatMul to uint8 a tensor.

`python -m targets.onnx_runtime ROWS COLUMNS FEATURES ROUNDS THREADS COLD` prints {name: seconds of
each call} as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

BLOCK = 128
CACHE_BYTES = 128 << 20  # as targets.clock
SCHEMES = {
    "onnxruntime MatMulNBits": "int4+int8 per block",
    "onnxruntime DynamicQuantizeMatMul": "int8+uint8 per tensor",
}


def missing() -> str | None:
    """Returns why ONNX Runtime is not timed here, or None."""
    lacking = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    return f"{', '.join(lacking)} not installed (pip install glm5q[onnx])" if lacking else None


def times(
    rows: int, columns: int, features: int, rounds: int, threads: int, cold: bool
) -> dict[str, list[float]]:
    """Returns seconds of each call by name. Raises RuntimeError with the process's last line."""
    sizes = [rows, columns, features, rounds, threads, int(cold)]
    command = [sys.executable, "-m", "targets.onnx_runtime", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def _models(columns: int, features: int) -> dict[str, Any]:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    source, blocks = np.random.default_rng(0), columns // BLOCK
    codes = source.integers(0, 256, (features, blocks, BLOCK // 2), dtype=np.uint8)
    scale = source.random(features * blocks, dtype=np.float32)
    whole = source.integers(-127, 128, (columns, features), dtype=np.int8)
    nodes = {
        "onnxruntime MatMulNBits": (
            helper.make_node(
                "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=columns,
                N=features, bits=4, block_size=BLOCK, accuracy_level=4,
            ),
            (codes, scale),
        ),
        "onnxruntime DynamicQuantizeMatMul": (
            helper.make_node(
                "DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain="com.microsoft"
            ),
            (whole, np.ones(1, np.float32)),
        ),
    }  # fmt: skip
    found = {}
    for name, (node, (weight, scales)) in nodes.items():
        held = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scales, "s")]
        ends = [
            helper.make_tensor_value_info(end, TensorProto.FLOAT, ["rows", size])
            for end, size in (("x", columns), ("y", features))
        ]
        graph = helper.make_graph([node], name.split()[1], ends[:1], ends[1:], held)
        sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        found[name] = helper.make_model(graph, opset_imports=sets, ir_version=8)
    return found


def main(rows: int, columns: int, features: int, rounds: int, threads: int, cold: int) -> None:
    """Prints the calls' seconds after one to warm up."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    x = {"x": np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)}
    room = np.empty(CACHE_BYTES, np.uint8)
    found: dict[str, list[float]] = {}
    for name, model in _models(columns, features).items():
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        session.run(None, x)
        found[name] = []
        for _ in range(rounds):
            if cold:
                room.fill(1)
            start = time.perf_counter()
            session.run(None, x)
            found[name].append(time.perf_counter() - start)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
