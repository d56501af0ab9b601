"""Routed experts' product of rows and codes in bytes for Hopper in Gluon, Triton's layouts.

What portable Triton cannot say: two groups of four warps in turn, one scaling a step's sums while
the tensor cores multiply for the other, and a warp that does nothing but fetch.

Features are the product's rows, so that a thread holds few of them and needs four scales a step.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PART = gl.constexpr(64)  # features of a warpgroup's instruction; each of two has two such parts


@gluon.jit
def tile_at(
    tiles, offsets, place, most, features, GROUP: gl.constexpr, ROWS: gl.constexpr,
    FEATURES: gl.constexpr,
):  # fmt: skip
    """(expert or -1 after the last, first row, the expert's end, first feature) at a place.

    An expert's row tiles come in groups of GROUP at most, a group's one feature tile after the
    other: what runs at once shares weights and rows in the L2. The last feature tile ends with the
    features, and may do some of its neighbour's again.
    """
    across = (features + FEATURES - 1) // FEATURES
    tile = gl.minimum(place // across, most)
    expert = gl.load(tiles + tile * 3)
    row = gl.load(tiles + tile * 3 + 1)
    end = gl.load(tiles + tile * 3 + 2)
    start = gl.load(offsets + gl.maximum(expert, 0)).to(gl.int32)
    held = gl.maximum((end - start + ROWS - 1) // ROWS, 1)
    groups = (held + GROUP - 1) // GROUP
    size = (held + groups - 1) // groups
    before = (row - start) // ROWS % size  # tiles of its group
    first = (row - start) // ROWS - before
    inside = place - (tile - before) * across
    size = gl.minimum(size, held - first)
    feature = gl.minimum(inside // size * FEATURES, features - FEATURES)
    return expert, start + (first + inside % size) * ROWS, end, feature


@gluon.jit
def turned(stage, phase, STAGES: gl.constexpr):
    """The next buffer and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def added(total, product, scale, CHANNEL: gl.constexpr):
    """total + product x scale [features], held in its place among the products.

    LLVM would move it behind the next product, whose registers then are not this one's.
    """
    if CHANNEL:
        return gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [total, product], dtype=gl.float32, is_pure=False,
            pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $2, $3, $1;", "=f,f,f,f", [total, product, scale[:, None]],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def produce(
    x, weight, rows, codes, full, empty, tiles, offsets, most, features, steps, GROUP: gl.constexpr
):
    """Keeps the buffers full. Rows past an expert's end are its neighbour's, and never stored."""
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    FEATURES: gl.constexpr = codes.shape[1]
    STEP: gl.constexpr = rows.shape[2]
    stage = 0
    phase = 1
    place = gl.program_id(0)
    expert, row, _, feature = tile_at(tiles, offsets, place, most, features, GROUP, ROWS, FEATURES)
    while expert >= 0:
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (ROWS + FEATURES) * STEP)
            tma.async_copy_global_to_shared(
                weight, [expert * features + feature, step * STEP], full.index(stage),
                codes.index(stage),
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                x, [row, step * STEP], full.index(stage), rows.index(stage)
            )
            stage, phase = turned(stage, phase, STAGES)
        place += gl.num_programs(0)
        expert, row, _, feature = tile_at(
            tiles, offsets, place, most, features, GROUP, ROWS, FEATURES
        )


@gluon.jit
def write(sums, scale, staged, out, row, end, feature, features):
    """Stores sums [features, rows] x scale [rows] as bfloat16 [rows, features]."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    staged.store(gl.permute((sums * scale[None, :]).to(gl.bfloat16), (1, 0)))
    values = staged.load(STORED)
    row += gl.arange(0, staged.shape[0], gl.SliceLayout(1, STORED))
    feature += gl.arange(0, staged.shape[1], gl.SliceLayout(0, STORED))
    at = out + row.to(gl.int64)[:, None] * features + feature[None, :]
    gl.store(at, values, mask=(row < end)[:, None])


@gluon.jit
def consume(
    out, x_scale, scale, rows, codes, staged, full, empty, tiles, offsets, most, features, steps,
    HALF: gl.constexpr, GROUP: gl.constexpr, CHANNEL: gl.constexpr,
):  # fmt: skip
    """Half of the tile's features. Float8 sums of the tensor cores reach over one step only.

    They keep about 14 bits; scaled or not, each step is added to a total in float32. Sums of int8
    are exact, over all steps.
    """
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    FEATURES: gl.constexpr = codes.shape[1]
    FIRST: gl.constexpr = HALF * 2 * PART
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = FIRST + gl.arange(0, PART, gl.SliceLayout(1, SUMS))
    line = gl.arange(0, ROWS, LINE)
    groups = 1 if CHANNEL else steps
    WHOLE: gl.constexpr = rows.dtype == gl.int8
    zeros = gl.zeros([PART, ROWS], gl.int32 if WHOLE else gl.float32, SUMS)
    product = zeros
    stage = 0
    phase = 0
    place = gl.program_id(0)
    expert, row, end, feature = tile_at(
        tiles, offsets, place, most, features, GROUP, ROWS, FEATURES
    )
    at = scale + gl.maximum(expert, 0).to(gl.int64) * groups * features + feature
    near_scale = gl.load(at + lane)
    far_scale = gl.load(at + PART + lane)
    while expert >= 0:
        place += gl.num_programs(0)
        next_expert, next_row, next_end, next_feature = tile_at(
            tiles, offsets, place, most, features, GROUP, ROWS, FEATURES
        )
        next_at = scale + gl.maximum(next_expert, 0).to(gl.int64) * groups * features + next_feature
        row_scale = gl.load(x_scale + row + line, mask=row + line < end, other=0.0)
        near = zeros
        far = zeros
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            columns = rows.index(stage).permute((1, 0))
            if WHOLE:
                near = hopper.warpgroup_mma(
                    codes.index(stage).slice(FIRST, PART), columns, near, use_acc=step > 0,
                    is_async=True,
                )  # fmt: skip
                far = hopper.warpgroup_mma(
                    codes.index(stage).slice(FIRST + PART, PART), columns, far, use_acc=step > 0,
                    is_async=True,
                )  # fmt: skip
                near, far = hopper.warpgroup_mma_wait(0, deps=(near, far))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage))
            else:
                product = hopper.warpgroup_mma(
                    codes.index(stage).slice(FIRST, PART), columns, product, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                if not CHANNEL:
                    # Scales are asked for a step ahead, the next tile's too: a step would wait for
                    # its own. Here the tensor cores have work; as fast on an H200 as before it.
                    at = gl.where(step + 1 < steps, at + features, next_at)
                    next_near = gl.load(at + lane)
                    next_far = gl.load(at + PART + lane)
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                near = added(near, product, near_scale, CHANNEL)
                product = hopper.warpgroup_mma(
                    codes.index(stage).slice(FIRST + PART, PART), columns, product, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage))
                far = added(far, product, far_scale, CHANNEL)
                if not CHANNEL:
                    near_scale = next_near
                    far_scale = next_far
            stage, phase = turned(stage, phase, STAGES)
        if CHANNEL:
            near = near.to(gl.float32) * near_scale[:, None]
            far = far.to(gl.float32) * far_scale[:, None]
            near_scale = gl.load(next_at + lane)
            far_scale = gl.load(next_at + PART + lane)
        by_row = gl.convert_layout(row_scale, gl.SliceLayout(0, SUMS))
        write(near, by_row, staged, out, row, end, feature + FIRST, features)
        write(far, by_row, staged, out, row, end, feature + FIRST + PART, features)
        expert, row, end, feature, at = next_expert, next_row, next_end, next_feature, next_at


@gluon.jit
def multiply(
    x, weight, scale, x_scale, tiles, offsets, out, most, features, steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, CHANNEL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Each program goes through its share of the tiles, 256 features of 128 rows each.

    `tiles` [most + 1, 3] are list_tiles', the rest -1.
    """
    ROWS: gl.constexpr = x.block_shape[0]
    FEATURES: gl.constexpr = weight.block_shape[0]
    STEP: gl.constexpr = x.block_shape[1]
    STAGED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, STEP], x.layout)
    codes = gl.allocate_shared_memory(x.dtype, [STAGES, FEATURES, STEP], weight.layout)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, PART], STAGED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    out, x_scale, scale, rows, codes, staged.index(0), full, empty, tiles, offsets,
                    most, features, steps, 0, GROUP, CHANNEL,
                ),
            ),
            (
                consume,
                (
                    out, x_scale, scale, rows, codes, staged.index(1), full, empty, tiles, offsets,
                    most, features, steps, 1, GROUP, CHANNEL,
                ),
            ),
            (
                produce,
                (
                    x, weight, rows, codes, full, empty, tiles, offsets, most, features, steps,
                    GROUP,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
