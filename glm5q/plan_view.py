"""A plan for people: right at 80 columns, plain when piped, and as a Markdown table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5q.pipeline.plan import Found
from reports import text
from reports.markdown import escaped
from reports.markdown import table as markdown_table
from reports.terminal import plain
from targets.base import Figure
from targets.plan import memory
from targets.plan.memory import Device
from targets.plan.roofline import Estimate

HEAD = ("layout", "weights", "MTP", "caches", "work", "total", "fits", "longest", "most")
WORK = ("activations", "scores", "reserve")
CACHES = ("kv_cache", "index_cache")
BESIDE = (*CACHES, *WORK, "mtp")
WIDEST = 1000  # characters a line of the table may take
BAR = 64  # characters that the wider of memory and need takes
LETTERS = {
    "weights": "W", "mtp": "M", "kv_cache": "K", "index_cache": "I", "activations": "A",
    "scores": "S", "reserve": "R",
}  # fmt: skip


def show(found: Found, console: Console) -> None:
    """Prints the plan: the load, layouts, the best one's memory, its speed, and calibration."""
    for line in _opening(found):
        console.print(Text(line))
    console.print()
    table = Table(*HEAD, box=None, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for device in found.devices:
        table.add_row(*(Text(cell) for cell in _row(device)))
    # A number that is cut short is another number: a line may rather be longer than the screen.
    table.width = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    console.print(table, crop=False)
    for one in found.layouts:
        if one.why_not is not None:
            console.print(Text(f"{one.layout.label()} is not legal: {one.why_not}"))
    console.print()
    for line in [*_bar(found.best), *_roles(found.best)]:
        console.print(Text(line))
    console.print()
    for line in [*_other_caches(found), "", *_speed(found), "", *_calibration(found)]:
        console.print(Text(line))


def markdown(found: Found) -> str:
    """Returns the layouts as a Markdown table, and the best one's speed in a line below."""
    rows = [tuple(map(escaped, _row(device))) for device in found.devices]
    opening = f"{_opening(found)[0]}; GB on the fullest device"
    lines = [escaped(opening) + ":", "", *markdown_table(HEAD, rows, numeric=len(HEAD) - 1), ""]
    return "\n".join([*lines, escaped(". ".join(_speed(found)[:3])) + "."]) + "\n"


def _opening(found: Found) -> list[str]:
    chip, load, config = found.chip, found.load, found.subject.config
    size = chip.memory_bytes
    each = f"{_size(size.value)} each, {size.grade}" if size.value else "memory unknown"
    kv = memory.kv_bytes_per_token(config, found.cache, found.mtp)
    index = memory.index_bytes_per_token(config, found.cache, found.mtp)
    lines = [
        f"{config.variant()} by {found.recipe.name} on {found.count} x {chip.title} ({each}), "
        f"{load.context:,} tokens x {load.concurrency:,}",
        f"cache: {found.cache.kv} KV {kv:,} B + {found.cache.index} index {index:,} B a token",
        f"weights: {_size(found.whole.total)}, "
        + (f"{_size(found.whole.mtp)} of it MTP" if found.mtp else "no MTP"),
        f"recipe: {found.recipe.verification}",
    ]
    smallest = "none up to 64" if found.smallest is None else f"{found.smallest} x {chip.title}"
    if chip.memory_bytes.value is None:
        smallest = "unknown, as the chip's memory is"
    return [*lines, f"smallest that fits: {smallest}", *(f"note: {note}" for note in found.notes)]


def _row(device: Device) -> tuple[str, ...]:
    parts = device.parts
    own = sum(size for name, size in parts.items() if name not in BESIDE)
    return (
        device.layout.label(),
        _gb(own),
        _gb(parts["mtp"]),
        _gb(sum(parts[name] for name in CACHES)),
        _gb(sum(parts[name] for name in WORK)),
        _gb(device.total),
        {True: "yes", False: "no", None: "unknown"}[device.fits],
        _count(device.max_context),
        _count(device.max_concurrency),
    )


def _bar(device: Device) -> list[str]:
    """One device in letters, a `|` where its memory ends."""
    capacity = device.capacity
    widest = max(device.total, capacity or 0)
    groups: dict[str, int] = {}
    for name, size in device.parts.items():
        key = name if name in BESIDE else "weights"
        groups[key] = groups.get(key, 0) + size
    line, done = "", 0
    for name, size in groups.items():
        done += size
        line += LETTERS[name] * (round(done / widest * BAR) - len(line))
    line = line.ljust(BAR, ".")
    if capacity is not None:
        end = round(capacity / widest * BAR)
        line = line[:end] + "|" + line[end:]
    keys = [f"{LETTERS[name]} {name} {_gb(size)}" for name, size in groups.items()]
    keys.append(f"| memory {_gb(capacity)}" if capacity is not None else "memory unknown")
    return [f"{device.layout.label()}, one device, GB:", line, *_wrapped(keys)]


def _roles(device: Device) -> list[str]:
    roles = [f"{name} {_gb(s)}" for name, s in device.parts.items() if name not in BESIDE and s]
    return _wrapped(["weights by role:", *roles])


def _wrapped(words: list[str], width: int = 79) -> list[str]:
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}  {word}" if lines[-1] else word
        if len(joined) > width:
            lines.append(f"  {word}")
        else:
            lines[-1] = joined
    return lines


def _other_caches(found: Found) -> list[str]:
    """What each KV layout would allow in the best layout."""
    lines = []
    for kv, device in found.kv.items():
        row = memory.kv_row_bytes(found.subject.config, kv)
        if isinstance(device, str):
            lines.append(f"KV {kv}: no: {device}")
        else:
            longest, most = _count(device.max_context), _count(device.max_concurrency)
            known = found.chip.support(kv).answer == "yes" or kv == "bf16"
            lines.append(
                f"KV {kv} ({row} B a token and layer): longest {longest}, most requests {most}"
                + ("" if known else f" (nobody confirmed {kv} on this chip)")
            )
    return lines


def _speed(found: Found) -> list[str]:
    """The roofline's two stages in the best layout, and the figures that they rest on.

    A prefill is of one prompt in each data-parallel group, whatever the concurrency.
    """
    layout = found.best.layout
    prompts = {"decode": found.load.concurrency, "prefill": layout.data}
    lines = [
        f"{layout.label()}, {prompts[one.stage]:,} x {found.load.context:,}, {_stage(one)}"
        for one in found.estimates
    ]
    inputs = {name: f for one in found.estimates for name, f in one.inputs.items()}
    lines.append("By " + ", ".join(_figure(name, figure) for name, figure in inputs.items()))
    lines += [f"  {name}: {figure.source}" for name, figure in inputs.items()]
    return [*lines, "  no communication, launches, MTP or imbalance: an engine takes longer"]


def _stage(one: Estimate) -> str:
    if one.total_s is None or one.tokens_per_s is None:
        return f"{one.stage}: unknown, for want of {', '.join(one.unknown)}"
    most = max(one.parts, key=lambda part: part.time_s or 0)
    share = (most.time_s or 0) / one.total_s
    what = "a step" if one.stage == "decode" else f"for {one.tokens:,} tokens"
    return (
        f"{one.stage}: at least {plain(text.seconds(one.total_s))} {what}, "
        f"{one.tokens_per_s:,.0f} tokens/s at most ({share:.0%} {most.part}, {most.bound})"
    )


def _calibration(found: Found) -> list[str]:
    needs, plan = found.needs, found.recipe.calibration
    cpu, host, gpu = (sum(side.values()) for side in (needs.cpu, needs.host, needs.gpu))
    tokens = plan.windows * plan.sequence_length
    compute = "unknown"
    if needs.compute_s is not None:
        compute = f"{plain(text.seconds(needs.compute_s))} at the chip's bf16 peak"
    disk = f"{plain(text.seconds(needs.disk_s))} at {_size(needs.disk_bytes_s)}/s of disk"
    return [
        f"to calibrate on {tokens:,} tokens: disk {_size(needs.source_bytes)} source + "
        f"{_size(needs.output_bytes)} output",
        f"  --device cuda: host {_size(host)}, GPU {_size(gpu)}; --device cpu: {_size(cpu)} of RAM",
        *_wrapped(["  GPU:", *(f"{name} {_size(s)}" for name, s in needs.gpu.items())]),
        *_wrapped(["  host:", *(f"{name} {_size(s)}" for name, s in needs.host.items())]),
        f"  time at least {disk}, products {compute}",
    ]


def _figure(name: str, figure: Figure) -> str:
    """`bandwidth 4.260 TB/s (measured)`, `peak int8 1979 Tops/s (vendor)`, `peak fp8 unknown`."""
    if figure.value is None:
        return f"{name} unknown"
    unit = "TB/s" if name == "bandwidth" else "Tops/s"
    return f"{name} {text.significant(figure.value / 1e12, 4)} {unit} ({figure.grade})"


def _size(value: float) -> str:
    return plain(text.size(value))


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f}" if value >= 1e8 else f"{value / 1e9:.2g}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
