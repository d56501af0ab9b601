"""The parts of the made-up record that are not accuracy: indexer, latency, memory. All invented."""

from __future__ import annotations

import numpy as np

from reports.measures import (
    Assembled,
    AssembledPart,
    DevicePlan,
    Indexer,
    IndexerLayer,
    MemoryPlan,
    RecallPoint,
    SelectionMap,
    Sweep,
    SweepPoint,
)
from reports.record import Latency

EDGES = [0, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
PREFILL = {"tokens": 4096, "keys": 65536}
DECODE = {"tokens": 64, "keys": 65536}
GEMM = {"experts": 256, "k": 6144, "n": 4096}
#      op, implementation, shape, dtype, median, floor, how
OPS = (
    ("lightning_indexer", "triton", PREFILL, "fp8", 4.81e-3, 1.92e-3, "measured"),
    ("lightning_indexer", "triton", DECODE, "fp8", 96.2e-6, 61.0e-6, "measured"),
    ("sparse_attention", "triton", PREFILL, "bf16", 3.12e-3, 1.51e-3, "measured"),
    ("sparse_attention", "triton", DECODE, "fp8", 104e-6, 49.9e-6, "measured"),
    ("expert_gemm", "triton", {"tokens": 64} | GEMM, "w4a8", 1.33e-3, 0.86e-3, "measured"),
    ("expert_gemm", "triton", {"tokens": 4096} | GEMM, "w4a8", 2.45e-3, 1.31e-3, "measured"),
)
DECLARED = (
    ("lightning_indexer", "roofline", PREFILL, "int8", 6.4e-3, 6.4e-3, "computed"),
    ("sparse_attention", "roofline", PREFILL, "bf16", 4.4e-3, 4.4e-3, "computed"),
    ("sparse_attention", "vendor", DECODE, "bf16", 210e-6, None, "quoted"),
    ("expert_gemm", "roofline", {"tokens": 64} | GEMM, "w4a8", 2.9e-3, 2.9e-3, "computed"),
)


def latencies(recipe: str, rng: np.random.Generator) -> list[Latency]:
    rows: list[tuple[tuple, str, str]] = []  # type: ignore[type-arg]
    rows += [(row, recipe, "NVIDIA H200") for row in OPS]
    rows += [(row, "atlas-800t-a3", "declared, not run") for row in DECLARED]
    return [_latency(row, target, device, rng) for row, target, device in rows]


def _latency(row: tuple, target: str, device: str, rng: np.random.Generator) -> Latency:  # type: ignore[type-arg]
    op, implementation, shape, dtype, median, floor, how = row
    if how == "measured":
        median = float(median * rng.uniform(0.97, 1.03))
    wide = 0.03 if how == "measured" else 0.0
    return Latency(
        op=op,
        implementation=implementation,
        target=target,
        shape=shape,
        dtype=dtype,
        median_s=median,
        low_s=median * (1 - wide),
        high_s=median * (1 + wide * 2),
        floor_s=floor,
        how=how,
        device=device,
        p99_s=median * 1.11 if how == "measured" else None,
        bound=None if floor is None else "compute" if shape["tokens"] > 64 else "memory",
    )


def sweeps(recipe: str) -> list[Sweep]:
    return [
        _sweep("decode step", recipe, "NVIDIA H200", "measured", 31e-3, 120.0),
        _sweep("decode step", "atlas-800t-a3", "declared, not run", "computed", 52e-3, 70.0),
    ]


def _sweep(op: str, target: str, device: str, how: str, base: float, knee: float) -> Sweep:
    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        median = base * (1 + batch / knee + (batch / 260) ** 2.2)
        wide = 0.02 if how == "measured" else 0.0
        points.append(
            SweepPoint(
                batch=batch,
                median_s=median,
                low_s=median * (1 - wide),
                high_s=median * (1 + wide),
                tokens_per_s=batch / median,
            )
        )
    peak = max(points, key=lambda p: p.tokens_per_s).batch
    return Sweep(
        op=op,
        implementation="triton" if how == "measured" else "roofline",
        target=target,
        device=device,
        context=65536,
        how=how,  # type: ignore[arg-type]
        points=points,
        peak_batch=peak,
    )


def passes(recipe: str) -> list[Assembled]:
    made = []
    for target, device, how, slow in (
        (recipe, "NVIDIA H200", "measured", 1.0),
        ("atlas-800t-a3", "declared, not run", "computed", 1.9),
    ):
        for stage, batch, tokens, unit in (("decode", 64, 64, 1.0), ("prefill", 1, 4096, 21.0)):
            parts = [
                AssembledPart(op=op, calls=calls, time_s=share * unit * slow, how=how)  # type: ignore[arg-type]
                for op, calls, share in (
                    ("expert_gemm", 150, 17.1e-3),
                    ("lightning_indexer", 78, 7.5e-3),
                    ("sparse_attention", 78, 8.1e-3),
                    ("linear", 468, 6.4e-3),
                )
            ]
            total = sum(part.time_s for part in parts)
            made.append(
                Assembled(
                    stage=stage,  # type: ignore[arg-type]
                    target=target,
                    device=device,
                    context=65536,
                    batch=batch,
                    tokens=tokens,
                    total_s=total,
                    tokens_per_s=tokens / total,
                    how=how,  # type: ignore[arg-type]
                    parts=parts,
                )
            )
    return made


def memory_plan() -> MemoryPlan:
    gb = 10**9
    chips = (
        ("NVIDIA H200", 4, "TP4 EP4", 141 * gb, 98.7, 25.4, 3.1, True, 202_752, 13),
        ("NVIDIA H200", 8, "TP8 EP8", 141 * gb, 49.4, 25.4, 3.1, True, 202_752, 28),
        ("Atlas 800T A3", 16, "TP8 EP16", 64 * gb, 25.1, 25.4, 2.6, True, 202_752, 9),
        ("NVIDIA H20", 4, "TP4 EP4", 96 * gb, 98.7, 25.4, 3.1, False, 0, 0),
        ("RTX 4090", 16, "TP16 EP16", 24 * gb, 25.1, 25.4, 1.9, False, 0, 0),
    )
    return MemoryPlan(
        context=202_752,
        concurrency=2,
        kv_layout="fp8 latent, 656 B a token and layer",
        kv_bytes_per_token=51_824,
        index_bytes_per_token=10_428,
        devices=[
            DevicePlan(
                chip=chip,
                count=number,
                layout=layout,
                capacity_bytes=capacity,
                parts={
                    "weights": int(weights * gb),
                    "mtp": int(weights * gb * 0.0135),
                    "kv_cache": int(cache * gb * 0.83),
                    "index_cache": int(cache * gb * 0.17),
                    "activations": int(work * gb),
                    "reserve": capacity // 20,
                },
                fits=fits,
                max_context=context,
                max_concurrency=most,
            )
            for chip, number, layout, capacity, weights, cache, work, fits, context, most in chips
        ],
    )


def indexer(layers: int, rng: np.random.Generator) -> Indexer:
    made = []
    for layer in range(layers + 1):
        depth = 0.7 + 0.8 * (layer / layers) ** 2
        loss = 0.006 * depth * np.arange(1, len(EDGES) - 1) ** 0.5 * rng.lognormal(0, 0.15, 6)
        made.append(IndexerLayer(layer=layer, overlap=[None, *(float(1 - v) for v in loss)]))
    chosen = sorted({0, layers // 3, 2 * layers // 3, layers - 1})
    recall = []
    for k in (256, 512, 1024, 2048, 4096, 8192):
        mass = 1 - 0.31 * (k / 256) ** -0.72
        recall.append(
            RecallPoint(
                k=k,
                attention_mass=mass,
                attention_mass_p5=mass - 0.11 * (256 / k) ** 0.4,
                kl=0.0 if k == 2048 else 0.011 * abs(np.log2(k / 2048)) ** 1.6,
                flop=78 * (2 * 65536 * 32 * 128 + 2 * 64 * k * 1088),
            )
        )
    return Indexer(
        topk=2048,
        context=131_072,
        bucket_edges=EDGES,
        layers=made,
        selection=[_selection(layer, rng) for layer in chosen],
        recall=recall,
        recommended_k=2048,
        recommended_because="least k with at least 0.9 of attention mass and KL under 0.001",
    )


def _selection(layer: int, rng: np.random.Generator, blocks: int = 24) -> SelectionMap:
    source, quantized = [], []
    for i in range(blocks):
        weight = 0.25 + np.exp(-(i - np.arange(i + 1)) / 2.5) * 2 + (np.arange(i + 1) == 0) * 1.3
        weight = weight * rng.lognormal(0, 0.25, i + 1)
        other = weight * rng.lognormal(0, 0.04, i + 1)
        source.append([round(float(v), 4) for v in weight / weight.sum()])
        quantized.append([round(float(v), 4) for v in other / other.sum()])
    return SelectionMap(layer=layer, block=131_072 // blocks, source=source, quantized=quantized)
