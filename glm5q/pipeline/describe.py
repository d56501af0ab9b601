"""What a run found out, as its record says it."""

from __future__ import annotations

import platform
import resource
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from calibrate import selection
from calibrate.data import Windows
from calibrate.evaluate import Comparison, IndexerComparison, bootstrap_interval
from calibrate.job import Job
from glm5q import names
from glm5q.checkpoint import Checkpoint
from glm5q.config import ModelConfig
from glm5q.formats import hub
from glm5q.types import LayerResult
from glm5q.writer import write_error
from recipes.schema import Recipe
from reports import html, measures
from reports import record as records

PACKAGES = ("glm5q", "torch", "safetensors", "tokenizers", "numpy", "pydantic")


def role_of(name: str, expected: dict[str, names.TensorSpec]) -> str:
    base = name.removesuffix("_scale_inv")
    if base in expected:
        return expected[base].role.value
    return "routed_expert"  # experts fused into one tensor are the only other names a check lets by


def parameters(source: Checkpoint) -> int:
    """Weights of the checkpoint, FP8 scales not counted."""
    total = 0
    for name, stored in source.stored.items():
        if not name.endswith("_scale_inv"):
            count = 1
            for size in stored.shape:
                count *= size
            total += count
    return total


def accuracy(
    comparison: Comparison, data: records.DataInfo, config: ModelConfig
) -> records.Accuracy:
    token_kl = comparison.token_kl
    window_kl = token_kl.double().mean(1)
    window_nll = comparison.nll.double().mean(2)
    agreeing = (comparison.argmax[0] == comparison.argmax[1]).double().mean(1)
    low, high = bootstrap_interval(window_kl)
    p50, p95, p99 = _quantiles(token_kl.flatten(), (0.5, 0.95, 0.99))
    draft = comparison.draft
    return records.Accuracy(
        data=data,
        kl_mean=float(window_kl.mean()),
        kl_low=low,
        kl_high=high,
        kl_p50=p50,
        kl_p95=p95,
        kl_p99=p99,
        perplexity_source=float(window_nll[0].mean().exp()),
        perplexity_quantized=float(window_nll[1].mean().exp()),
        top1_agreement=float(agreeing.mean()),
        window_kl=window_kl.tolist(),
        window_nll=window_nll[1].tolist(),
        window_top1=agreeing.tolist(),
        layers=[records.LayerAccuracy(**asdict(layer)) for layer in comparison.layers],
        layer_kl="lens",
        indexer=_indexer(comparison.indexer, data.sequence_length, config),
        mtp=None
        if draft is None
        else records.MtpAccuracy(
            agreement=draft[0], acceptance_source=draft[1], acceptance_quantized=draft[2]
        ),
        time_s=comparison.time_s,
    )


def fallbacks(comparison: Comparison) -> list[str]:
    """Returns a line for each time that evaluation ran out of device memory."""
    return [
        f"{one.module}, layer {one.layer}: {one.reason}, {one.action}"
        for one in comparison.fallbacks
    ]


def _indexer(found: IndexerComparison, length: int, config: ModelConfig) -> measures.Indexer:
    recall = [
        measures.RecallPoint(
            k=k,
            attention_mass=float(found.mass[:, index].mean()),
            attention_mass_p5=float(found.mass[:, index].quantile(0.05)),
            flop=selection.query_cost(config, k, length).flop,
        )
        for index, k in enumerate(found.sizes)
        if len(found.mass)
    ]
    recommended: tuple[int | None, str] = (None, "")
    if recall:
        recommended = selection.recommend(found.sizes, found.mass, config.index_topk)
    return measures.Indexer(
        topk=config.index_topk,
        context=length,
        bucket_edges=selection.bucket_edges(length),
        layers=[measures.IndexerLayer(layer=n, overlap=o) for n, o in found.overlap.items()],
        selection=[
            measures.SelectionMap(
                layer=number, block=left.block, source=left.shares(), quantized=right.shares()
            )
            for number, (left, right) in found.maps.items()
        ],
        recall=recall,
        recommended_k=recommended[0],
        recommended_because=recommended[1],
    )


def _quantiles(values: torch.Tensor, levels: tuple[float, ...]) -> list[float]:
    """Quantiles by sorting: torch.quantile stops at 16 million values."""
    ordered = values.sort().values
    return [float(ordered[int(level * (len(ordered) - 1))]) for level in levels]


def source_info(source: Checkpoint, content_hash: str) -> records.SourceInfo:
    config = source.config
    return records.SourceInfo(
        path=str(source.root),
        variant=config.variant(),
        content_hash=content_hash,
        bytes=source.nbytes,
        layers=config.num_hidden_layers,
        mtp_layers=config.num_nextn_predict_layers,
        parameters=parameters(source),
        latent_norm_eps=config.latent_norm_eps,
        **asdict(hub.origin(source.root, source.raw_config)),
    )


def recipe_info(recipe: Recipe) -> records.RecipeInfo:
    return records.RecipeInfo(
        name=recipe.name,
        content_hash=recipe.content_hash(),
        target=recipe.target,
        engine=recipe.engine,
        format=recipe.format,
        verification=recipe.verification,
        content=recipe.model_dump(mode="json"),
    )


def data_info(windows: Windows, held_out: int, file_hash: str) -> records.DataInfo:
    return records.DataInfo(
        name=windows.name,
        content_hash=windows.content_hash,
        documents=windows.documents,
        windows=windows.tokens.shape[0],
        sequence_length=windows.tokens.shape[1],
        seed=windows.seed,
        held_out_windows=held_out,
        file_hash=file_hash,
    )


def layer(result: LayerResult) -> records.Layer:
    return records.Layer.model_validate(asdict(result))


def size(source: Checkpoint, job: Job) -> records.Size:
    expected = names.expected_tensors(source.config)
    by_role: dict[str, list[int]] = {}
    for name, stored in source.stored.items():
        by_role.setdefault(role_of(name, expected), [0, 0])[0] += stored.nbytes
    for shard in job.shards:
        for name, size in shard.tensors.items():
            base = base_name(name)
            by_role.setdefault(role_of(base, expected), [0, 0])[1] += size
    return records.Size(
        source_bytes=source.nbytes,
        quantized_bytes=sum(both[1] for both in by_role.values()),
        by_role={role: (both[0], both[1]) for role, both in sorted(by_role.items())},
    )


def base_name(name: str) -> str:
    """The source tensor that a quantized one belongs to, whatever the format."""
    for suffix in ("_packed", "_scale", "_shape", "_scale_inv", "_offset"):
        if name.endswith(".weight" + suffix):
            return name.removesuffix(suffix)
    if name.endswith((".scale_bias", ".input_scale")):
        return name.rsplit(".", 1)[0] + ".weight"
    return name


def machine(device: str) -> records.Machine:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return records.Machine(
        # A kernel's name, in platform.platform(), can tell whose machine it is; records are shown.
        platform=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=torch.get_num_threads(),
        device=name,
        versions={"python": platform.python_version()} | {p: package_version(p) for p in PACKAGES},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def peak_memory_bytes() -> int:
    """Returns the largest resident size this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    return shlex.join(["glm5q", *sys.argv[1:]])


@dataclass(frozen=True)
class Finished:
    """Where a run left what matters."""

    checkpoint: Path
    record: Path
    page: Path
    run: records.RunRecord


def write(finished: records.RunRecord, path: Path, checkpoint: Path) -> Finished:
    page = path.with_suffix(".html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write_record(finished, path)
        html.write_page(finished, page)
    except OSError as error:
        raise write_error(path, error) from None
    return Finished(checkpoint, path, page, finished)
