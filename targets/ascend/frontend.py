"""Stage L1, a script for the Ascend environment's own Python: Triton kernels to linalg.

Reads {"source", "kernel", "signature", "constants", "chip"} as JSON on stdin and writes {"linalg",
"mix"} or {"error"} on stdout. `source` is the kernel's file; nothing of ours is imported, as this
Python's `triton` is another package than the main environment's.
"""
# mypy: ignore-errors
# triton here is triton-ascend.

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys

from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def lower(request: dict) -> dict:
    """Returns the kernel in linalg, and "aiv" (vector cores alone) or "mix" (cube too)."""
    spec = importlib.util.spec_from_file_location("kernel", request["source"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = GPUTarget("npu", request["chip"], 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({})
    source = ASTSource(
        fn=getattr(module, request["kernel"]),
        signature=request["signature"],
        constants=request["constants"],
    )
    context = ir.context()
    ir.load_dialects(context)
    ttir = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {"hash": "", "target": target, **options.__dict__}
    ttir = compiler.make_ttir(ttir, metadata, options)
    linalg = compiler.ttir_to_linalg(ttir, metadata, options, named_ops=True)
    linalg, metadata = compiler._parse_linalg_metadata(linalg, metadata)
    return {"linalg": linalg, "mix": metadata["mix_mode"]}


def main() -> None:
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = lower(request)
        except subprocess.CalledProcessError as error:
            answer = {"error": error.stderr.decode(errors="replace")}
        except Exception as error:  # noqa: BLE001, RUF100 - whatever is raised is the verdict
            answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
