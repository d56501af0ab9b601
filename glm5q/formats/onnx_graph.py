"""Building an ONNX graph whose weights lie in a file beside it, written one at a time."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from glm5q.errors import UserError

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
DATA = "model.onnx.data"
ALIGNMENT = 64
# onnx.TensorProto's numbers
FLOAT, UINT8, INT8, INT32, INT64, BOOL, BFLOAT16, FLOAT8 = 1, 2, 3, 6, 7, 9, 16, 17
TENSOR_TYPES = {
    torch.float32: FLOAT,
    torch.uint8: UINT8,
    torch.int8: INT8,
    torch.int32: INT32,
    torch.int64: INT64,
    torch.bool: BOOL,
    torch.bfloat16: BFLOAT16,
}


def onnx() -> Any:
    """Returns the onnx package, an optional extra. Raises UserError on one line without it."""
    try:
        return import_module("onnx")
    except ImportError:
        raise UserError("onnx is not installed", "pip install 'glm5q[onnx]'") from None


class Graph:
    """Nodes and initializers of one graph; large weights go to DATA in `folder` at once."""

    def __init__(self, folder: Path) -> None:
        self._onnx = onnx()
        self._file = (folder / DATA).open("wb")
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[tuple[Any, ...], str] = {}
        self._count = 0

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node of one output and returns its name."""
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Adds a node and returns the names of its outputs."""
        names = [self._fresh(kind.lower()) for _ in range(outputs)]
        self._nodes.append(
            self._onnx.helper.make_node(kind, list(inputs), names, domain=domain, **attributes)
        )
        return names

    def constant(self, values: Any, dtype: torch.dtype = torch.float32) -> str:
        """Returns the name of a small constant, the same for equal ones."""
        tensor = torch.as_tensor(values, dtype=dtype)
        key = (dtype, tuple(tensor.shape), tuple(tensor.flatten().tolist()))
        if key not in self._constants:
            name = self._constants[key] = self._fresh("constant")
            proto = self._proto(name, tensor)
            proto.raw_data = _raw(tensor)
            self._initializers.append(proto)
        return self._constants[key]

    def weight(self, name: str, tensor: Tensor) -> str:
        """Writes a weight to the data file and returns its name."""
        proto = self._proto(name, tensor)
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        place = {"location": DATA, "offset": self._file.tell()}
        place["length"] = self._file.write(_raw(tensor))
        proto.data_location = self._onnx.TensorProto.EXTERNAL
        for key, value in place.items():
            entry = proto.external_data.add()
            entry.key, entry.value = key, str(value)
        self._initializers.append(proto)
        return name

    def floats(self, name: str, tensor: Tensor) -> str:
        """Returns a weight as float32, stored in its own dtype where ONNX has it."""
        if tensor.dtype in (torch.float32, torch.bfloat16):
            stored = self.weight(name, tensor)
            return stored if tensor.dtype == torch.float32 else self.op("Cast", stored, to=FLOAT)
        return self.weight(name, tensor.float())

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, kind: int, shape: list[int | str]) -> None:
        """Gives a value a name and makes it an output."""
        self._nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, kind, shape))

    def save(self, path: Path) -> None:
        """Writes the graph and has onnx's checker read it back with its data."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes, "glm5q", self._inputs, self._outputs, self._initializers
        )
        model = helper.make_model(
            graph,
            ir_version=IR_VERSION,
            producer_name="glm5q",
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)],
        )
        self._file.flush()
        path.write_bytes(model.SerializeToString())
        self._onnx.checker.check_model(str(path))

    def _proto(self, name: str, tensor: Tensor) -> Any:
        proto = self._onnx.TensorProto()
        proto.name, proto.data_type = name, TENSOR_TYPES[tensor.dtype]
        proto.dims.extend(tensor.shape)
        return proto

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
