"""The rows of the comparison: which tool at which setting, and which of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One tool at one setting. `tool` names its script, requirements and environment."""

    name: str
    tool: str
    group: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    def asked(self) -> dict[str, Any]:
        """What its script is given."""
        return {"group": self.group, **self.settings}


# llm-compressor: its default sends every token through every expert and has no clip search.
GPTQ = {"method": "gptq", "observer": None, "all_experts": True}
GPTQ_BEST = {"method": "gptq", "observer": "memoryless_mse", "all_experts": False}
RTN_BEST = {"method": "rtn", "observer": "memoryless_mse", "all_experts": False}
AWQ = {"method": "awq", "observer": None, "all_experts": False, "map": "own"}
AWQ_BEST = {"method": "awq", "observer": "memoryless_mse", "all_experts": False, "map": "up-down"}
# AutoRound: rounding alone, and tuned; `batch` windows a step instead of its 8, for time.
ROUND = {"iterations": 0, "batch": 4}
TUNED = {"iterations": 200, "batch": 4}

PEERS = (
    Peer("llm-compressor GPTQ best g128", "llmcompressor", 128, GPTQ_BEST),
    Peer("llm-compressor GPTQ default g128", "llmcompressor", 128, GPTQ),
    Peer("llm-compressor RTN best g128", "llmcompressor", 128, RTN_BEST),
    Peer("llm-compressor AWQ up-down g128", "llmcompressor", 128, AWQ_BEST),
    Peer("llm-compressor AWQ own map g128", "llmcompressor", 128, AWQ),
    Peer("AutoRound tuned g128", "autoround", 128, TUNED),
    Peer("AutoRound RTN g128", "autoround", 128, ROUND),
    Peer("GPTQModel GPTQ mse g128", "gptqmodel", 128, {"options": {"mse": 2.4}}),
    Peer("GPTQModel GPTQ default g128", "gptqmodel", 128, {"options": {}}),
    Peer("llm-compressor GPTQ best channel", "llmcompressor", None, GPTQ_BEST),
    Peer("AutoRound tuned channel", "autoround", None, TUNED),
    Peer("msModelSlim SSZ channel", "msmodelslim", None, {"command": False}),
    Peer("msModelSlim command channel", "msmodelslim", None, {"command": True}),
)

# Ours, as variants of `glm5q ablate`: name -> variant.
OURS = {
    "glm5q rtn": "rtn",
    "glm5q gptq": "gptq-alone",
    "glm5q fast": "fast",
    "glm5q fast positive": "positive-scales",
    "glm5q best": "best",
    "glm5q best positive": "best-positive-scales",
}
GROUPS = {"g128": 128, "channel": None}
