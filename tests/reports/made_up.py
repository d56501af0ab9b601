"""A made-up RunRecord of GLM-5's shape, to see and measure pages without a 744-billion run.

Every number is invented from a seed; nothing here was measured on anything.
"""

from __future__ import annotations

import numpy as np

from reports.record import (
    Accuracy,
    DataInfo,
    Experts,
    Fallback,
    Layer,
    LayerAccuracy,
    Machine,
    Matrix,
    MtpAccuracy,
    RecipeInfo,
    RunRecord,
    Size,
    SourceInfo,
)
from tests.reports.made_up_measures import indexer, latencies, memory_plan, passes, sweeps

Rng = np.random.Generator
INT8 = ("int8 channel + fp8", "gptq", 8.0)
INT4 = ("int4 g128 + fp8", "gptq", 4.125)
KEPT = ("source dtype", "keep", 16.0)
#       module, role, scheme, method, bits, error, input absmax, rows of input
MATRICES = (
    ("self_attn.q_a_proj", "attention", *INT8, 0.008, 40.0, 6144),
    ("self_attn.q_b_proj", "attention", *INT8, 0.006, 9.0, 2048),
    ("self_attn.kv_a_proj_with_mqa", "attention", *INT8, 0.009, 40.0, 6144),
    ("self_attn.o_proj", "attention", *INT8, 0.011, 14.0, 16384),
    ("self_attn.kv_b_proj", "kv_b", *KEPT, 0.0, None, 512),
    ("self_attn.indexer.wq_b", "indexer_query", *INT8, 0.007, 9.0, 2048),
    ("self_attn.indexer.wk", "indexer_key", *KEPT, 0.0, 40.0, 6144),
)  # fmt: skip
DENSE = (("mlp.down_proj", "dense_mlp", *INT8, 0.012, 220.0, 12288),)
MOE = (
    ("mlp.gate", "router", *KEPT, 0.0, 30.0, 6144),
    ("mlp.shared_experts.down_proj", "shared_expert", *INT8, 0.012, 90.0, 2048),
    ("mlp.experts.gate_up_proj", "routed_expert", *INT4, 0.071, 30.0, 6144),
    ("mlp.experts.down_proj", "routed_expert", *INT4, 0.083, 310.0, 2048),
)  # fmt: skip
ROLE_SHARE = {
    "routed_expert": (1_449_000_000_000, 373_600_000_000),
    "attention": (21_400_000_000, 10_700_000_000),
    "kv_b": (2_319_450_112, 2_319_450_112),
    "shared_expert": (5_737_807_872, 2_869_000_000),
    "dense_mlp": (1_358_954_496, 679_600_000),
    "indexer_query": (1_325_400_064, 662_900_000),
    "router": (239_000_000, 239_000_000),
    "embedding": (1_903_165_440, 1_903_165_440),
    "lm_head": (1_903_165_440, 1_903_165_440),
    "mtp_projection": (150_994_944, 150_994_944),
}


def record(
    layers: int = 78,
    experts: int = 256,
    seed: int = 0,
    kl: float = 0.0123,
    recipe: str = "h200",
    windows: int = 64,
    everything: bool = True,
) -> RunRecord:
    """`everything` False leaves out all that a schema-1 writer need not give."""
    rng = np.random.default_rng(seed)
    made = [_layer(i, layers, experts, rng) for i in range(layers + 1)]
    return RunRecord(
        kind="calibrate",
        created="2026-11-30T09:12:44+00:00",
        command=f"glm5q calibrate models/GLM-5 --recipe {recipe} --data calib.jsonl --output out",
        output="out/GLM-5-W4A8 [int4]",
        machine=Machine(
            platform="Linux-6.1-x86_64",
            processor="made-up processor",
            cores=32,
            device="NVIDIA H200",
            versions={"glm5q": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        ),
        source=SourceInfo(
            path="models/GLM-5",
            variant="GLM-5/5.1",
            content_hash="5f2c" * 16,
            bytes=1_507_728_316_928,
            layers=layers,
            mtp_layers=1,
            parameters=753_864_119_552,
            latent_norm_eps=1e-5,
        ),
        recipe=RecipeInfo(
            name=recipe,
            content_hash="a91b" * 16,
            target=recipe,
            engine="vllm",
            format="compressed-tensors",
            verification="declared; never run on an NPU"
            if recipe.startswith("atlas")
            else "checkpoint checked by transformers; not served in an engine",
            content={
                "version": 1,
                "target": recipe,
                "weights": {
                    "routed_expert": {"method": "gptq", "bits": 4, "group": 128},
                    "attention": {"method": "gptq", "bits": 8},
                    "router": {"method": "keep"},
                },
            },
        ),
        calibration=_data("calib.jsonl", "77aa", 128, rng),
        size=Size(
            source_bytes=1_507_728_316_928, quantized_bytes=401_412_003_840, by_role=ROLE_SHARE
        ),
        layers=made,
        accuracy=_accuracy(layers, kl, windows, rng, everything),
        latency=latencies(recipe, rng) if everything else [],
        times_s={"read": 212.4, "forward": 388.1, "quantize": 402.9, "write": 250.2, "all": 1301.7},
        peak_memory_bytes=88_400_000_000,
        resumed_layers=12,
        notes=["[bold]Not markup[/bold]: every number of this record is <made up>."],
        memory=memory_plan() if everything else None,
        sweeps=sweeps(recipe) if everything else [],
        assembled=passes(recipe) if everything else [],
    )


def _data(name: str, stem: str, windows: int, rng: Rng) -> DataInfo:
    return DataInfo(
        name=name,
        content_hash=stem * 16,
        documents=int(rng.integers(300, 900)),
        windows=windows,
        sequence_length=8192,
        seed=1,
        held_out_windows=8,
    )


def _layer(index: int, layers: int, experts: int, rng: Rng) -> Layer:
    kind = "mtp" if index == layers else "dense" if index < min(3, layers - 1) else "moe"
    rows = MATRICES + (DENSE if kind == "dense" else MOE)
    depth = 0.7 + 0.8 * (index / layers) ** 2
    routed = None if kind == "dense" else _experts(experts, depth, rng)
    return Layer(
        layer=index,
        kind=kind,  # type: ignore[arg-type]
        indexer="full",
        error=float(0.021 * depth * rng.lognormal(0, 0.12)),
        source_bytes=801_797_632 if kind == "dense" else 19_754_809_856,
        quantized_bytes=421_000_000 if kind == "dense" else 5_200_000_000 + index * 1024,
        time_s=float(rng.uniform(14, 18)),
        matrices=[_matrix(row, depth, experts, index, rng) for row in rows],
        experts=routed,
        fallbacks=_fallbacks(index, routed),
    )


def _matrix(row: tuple, depth: float, experts: int, index: int, rng: Rng) -> Matrix:  # type: ignore[type-arg]
    module, role, scheme, method, bits, error, absmax, channels = row
    largest = float((absmax or 1.0) * rng.lognormal(0, 0.35))
    if role == "dense_mlp" and index == 1:
        largest = 71_232.0  # a massive activation, beyond FP16
    seen = absmax is not None  # kv_b is absorbed: its product is never taken
    ranges = {
        "input_absmax": largest,
        "output_absmax": float(largest * rng.uniform(0.4, 1.4)),
        "input_p999": largest / float(rng.uniform(6, 14)),
        "outlier_channels": int(rng.poisson(3 if not seen or absmax < 100 else 9)),
    }
    return Matrix(
        module=module,
        role=role,
        scheme=scheme,
        method=method,
        bits=bits,
        error=float(error * depth * rng.lognormal(0, 0.1)),
        matrices=experts if role == "routed_expert" else 1,
        input_channels=channels,
        weight_error=float(error * 1.4 * rng.lognormal(0, 0.1)),
        **{name: value if seen else None for name, value in ranges.items()},  # type: ignore[arg-type]
    )


def _experts(experts: int, depth: float, rng: Rng) -> Experts:
    share = rng.dirichlet(np.full(experts, 2.2))
    tokens = (share * 1_048_576 * 8).astype(int)
    rare = rng.integers(0, experts, max(experts // 100, 1))
    tokens[rare] = rng.integers(0, 400, rare.size)
    error = 0.078 * depth * rng.lognormal(0, 0.09, experts) * (1 + 300 / (tokens + 150)) ** 0.5
    method = np.where(tokens < 200, "gptq-pooled", "gptq")
    method[tokens == 0] = "rtn"
    method[rng.random(experts) < 0.01] = "rtn"
    return Experts(
        tokens=[int(t) for t in tokens],
        error=[float(e) for e in error],
        method=[str(m) for m in method],
    )


def _fallbacks(layer: int, experts: Experts | None) -> list[Fallback]:
    if experts is None:
        return []
    return [
        Fallback(
            layer=layer,
            module="mlp.experts",
            expert=number,
            reason=f"{tokens} tokens seen, 200 needed",
            action="Gram pooled with the layer's",
        )
        for number, tokens in enumerate(experts.tokens)
        if tokens < 200
    ]


def _accuracy(layers: int, kl: float, windows: int, rng: Rng, everything: bool) -> Accuracy:
    # The text decides most of a window's KL: windows move together between runs, as real ones do.
    text = np.random.default_rng(7).lognormal(0, 0.35, windows)
    by_window = kl * text / text.mean() * rng.lognormal(0, 0.02, windows)
    mean = float(by_window.mean())
    spread = 1.96 * float(by_window.std()) / windows**0.5
    nll = 1.63 * text**0.2
    top1 = np.clip(1 - 2.2 * by_window - rng.uniform(0, 0.004, windows), 0, 1)
    return Accuracy(
        data=_data("held-out.jsonl", "c0de", windows, np.random.default_rng(3)),
        kl_mean=mean,
        kl_low=mean - spread,
        kl_high=mean + spread,
        kl_p50=mean * 0.31,
        kl_p95=mean * 4.6,
        kl_p99=mean * 13.2,
        perplexity_source=float(np.exp(nll.mean())),
        perplexity_quantized=float(np.exp((nll + 0.62 * by_window).mean())),
        top1_agreement=float(top1.mean()),
        window_kl=[float(v) for v in by_window],
        layers=[_layer_accuracy(i, layers, kl, rng, everything) for i in range(layers + 1)],
        mtp=MtpAccuracy(agreement=0.9641, acceptance_source=0.8312, acceptance_quantized=0.8254),
        time_s=412.9,
        window_top1=[float(v) for v in top1] if everything else [],
        window_nll=[float(v) for v in nll + 0.62 * by_window] if everything else [],
        layer_kl="alone" if everything else None,
        indexer=indexer(layers, rng) if everything else None,
    )


def _layer_accuracy(
    index: int, layers: int, kl: float, rng: Rng, everything: bool
) -> LayerAccuracy:
    depth = 0.7 + 0.8 * (index / layers) ** 2
    moe = index >= min(3, layers - 1)
    roles = {"attention": 0.021, "indexer_query": 0.024}
    roles |= {"routed_expert": 0.081, "shared_expert": 0.025} if moe else {"dense_mlp": 0.026}
    overlap = float(0.992 - 0.014 * depth * rng.lognormal(0, 0.3))
    return LayerAccuracy(
        layer=index,
        hidden_error=float(0.006 + 0.05 * (index / layers) ** 1.3 * rng.lognormal(0, 0.05)),
        role_error={k: float(v * depth * rng.lognormal(0, 0.08)) for k, v in roles.items()},
        topk_overlap=overlap,
        topk_overlap_p1=float(overlap - rng.uniform(0.01, 0.03)),
        router_agreement=float(0.985 - 0.02 * depth * rng.lognormal(0, 0.25)) if moe else None,
        kl=float(kl / layers * depth * rng.lognormal(0, 0.6)) if everything else None,
    )
