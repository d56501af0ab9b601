"""Grams of float8 codes for Hopper in Gluon, Triton's layouts, and the codes in plain Triton.

Float8 tensor cores want both operands with the summed dimension innermost, and a Gram sums over
rows: a first kernel turns rows into codes. The second is made as expert_gemm's gluon_kernel: two
groups of four warps in turn, one promoting a step's sums while the tensor cores multiply for the
other, and a warp that does nothing but fetch.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

MOST = tl.constexpr(448.0)  # e4m3's largest
LEAST = tl.constexpr(2.0**-50)  # of the scale's square, float32 keeps what this leaves
PART = gl.constexpr(64)  # Gram rows of a warpgroup's instruction; each of two has two such parts
PIECE = gl.constexpr(32)  # Gram columns of one addition to global memory: a swizzle's 128 bytes


@triton.jit
def turn_codes(
    x, absmax, blocks, codes, pitch, columns, DEEP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """codes [block, columns, DEEP] = e4m3 of x [rows, columns] x 448 / absmax, turned.

    A block is DEEP rows of one expert, zero after its last; `blocks` are list_tiles'. Four rows'
    codes are a word before anything moves between threads.
    """
    block = tl.program_id(0).to(tl.int64)
    expert = tl.load(blocks + block * 3)
    if expert < 0:
        return
    first, end = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    lift = tl.div_rn(MOST, tl.maximum(tl.load(absmax), LEAST))
    word = tl.arange(0, DEEP // 4)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    near, far = first + word * 4, first + word * 4 + 2
    words = tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [
            lifted(x, near, end, lift, pitch, column),
            lifted(x, near + 1, end, lift, pitch, column),
            lifted(x, far, end, lift, pitch, column),
            lifted(x, far + 1, end, lift, pitch, column),
        ],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    at = codes + (block * columns + column)[:, None] * (DEEP // 4) + word[None, :]
    tl.store(at, tl.trans(words))


@triton.jit
def lifted(x, row, end, lift, pitch, column):
    """x [row, column] x lift in float32, 0 from row `end` on."""
    inside = row < end
    at = x + row.to(tl.int64)[:, None] * pitch + column[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32) * lift


@gluon.jit
def piece_at(tiles, bounds, place, chunk, places, count, experts):
    """(expert, its first block and end, the tile's row and column) of a place's chunk, or the last.

    As loaded: asked for before a chunk's products, it is not waited for until after them. An
    expert's tiles follow one another: what runs at once shares its codes in the L2.
    """
    place = gl.minimum(place, places - 1)
    expert = place // count
    at = bounds + chunk * (experts + 1) + expert
    tile = tiles + place % count * 2
    return expert, gl.load(at), gl.load(at + 1), gl.load(tile), gl.load(tile + 1)


@gluon.jit
def after(place, chunk, chunks):
    """The next chunk of a place, or the first of this program's next place."""
    last = chunk + 1 == chunks
    return gl.where(last, place + gl.num_programs(0), place), gl.where(last, 0, chunk + 1)


@gluon.jit
def squared_scale(absmax):
    """What a product of two codes stands for."""
    scale = gl.maximum(absmax, LEAST) / MOST
    return scale * scale


@gluon.jit
def turned(stage, phase, STAGES: gl.constexpr):
    """The next buffer and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def added(total, product, factor):
    """total + product x factor, held in its place among the products.

    LLVM would move it behind the next product, whose registers then are not this one's.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $2, $3, $1;", "=f,f,f,f", [total, product, factor], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@builtin
def add_to_global(descriptor, place, values, _semantic=None):
    """Adds shared memory's float32 `values` to global memory, in the L2 and behind our back."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, descriptor.handle, place, values.handle)


@gluon.jit
def produce(
    left, right, tall, wide, full, empty, tiles, bounds, places, chunks, count, experts, columns
):
    """Keeps the buffers full. Past the last Gram row come the next block's codes, never added."""
    STAGES: gl.constexpr = tall.shape[0]
    TALL: gl.constexpr = tall.shape[1]
    WIDE: gl.constexpr = wide.shape[1]
    DEEP: gl.constexpr = tall.shape[2]
    stage = 0
    phase = 1
    place = gl.program_id(0)
    chunk = 0
    _, first, end, row, column = piece_at(tiles, bounds, place, chunk, places, count, experts)
    while place < places:
        place, chunk = after(place, chunk, chunks)
        _, next_first, next_end, next_row, next_column = piece_at(
            tiles, bounds, place, chunk, places, count, experts
        )
        for block in range(first, end):
            start = block * columns
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (TALL + WIDE) * DEEP)
            tma.async_copy_global_to_shared(
                left, [start + row * TALL, 0], full.index(stage), tall.index(stage)
            )
            tma.async_copy_global_to_shared(
                right, [start + column * WIDE, 0], full.index(stage), wide.index(stage)
            )
            stage, phase = turned(stage, phase, STAGES)
        first, end, row, column = next_first, next_end, next_row, next_column


@gluon.jit
def add_piece(values, grams, staged, row, column):
    """Adds [PART, PIECE] values to global memory by way of shared memory [PART, PIECE].

    No sum but this one goes to its place in a launch, so that results are the same bits each time.
    Straight from registers it took 27.9 ms where this took 23.5; asking for the Gram ahead of time
    changed nothing.
    """
    tma.store_wait(1)  # the other piece may still be on its way, the one before it has been read
    gl.thread_barrier()
    staged.store(values)
    hopper.fence_async_shared()
    gl.thread_barrier()
    add_to_global(grams, [row, column], staged)


@gluon.jit
def halves(x):
    """The first and the last half of a tensor's columns."""
    x = gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return gl.split(gl.permute(x, (0, 2, 1)))


@gluon.jit
def add_part(sums, grams, staged, row, column):
    """Adds [PART, 128] sums to `grams` [experts x columns, columns] at a row and a column."""
    near, far = halves(sums)
    first, second = halves(near)
    third, fourth = halves(far)
    add_piece(first, grams, staged.index(0), row, column)
    add_piece(second, grams, staged.index(1), row, column + PIECE)
    add_piece(third, grams, staged.index(0), row, column + 2 * PIECE)
    add_piece(fourth, grams, staged.index(1), row, column + 3 * PIECE)


@gluon.jit
def consume(
    grams, absmax, tall, wide, staged, full, empty, tiles, bounds, places, chunks, count, experts,
    columns, HALF: gl.constexpr,
):  # fmt: skip
    """Half of the tile's Gram rows. The tensor cores' sums reach over one step only.

    They keep about 14 bits; scaled, each step's is added to a total in float32. Without that the
    product was no faster, and an element off by 2.3 % of the largest after 2048 rows.
    """
    STAGES: gl.constexpr = tall.shape[0]
    TALL: gl.constexpr = tall.shape[1]
    WIDE: gl.constexpr = wide.shape[1]
    FIRST: gl.constexpr = HALF * 2 * PART
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    zeros = gl.zeros([PART, WIDE], gl.float32, SUMS)
    product = zeros
    stage = 0
    phase = 0
    place = gl.program_id(0)
    chunk = 0
    expert, first, end, row, column = piece_at(tiles, bounds, place, chunk, places, count, experts)
    factor = squared_scale(gl.load(absmax))
    next_expert, next_row, next_column = expert, row, column
    while place < places:
        near = zeros
        far = zeros
        taken = 0
        for _ in range(chunks):
            place, chunk = after(place, chunk, chunks)
            next_expert, next_first, next_end, next_row, next_column = piece_at(
                tiles, bounds, place, chunk, places, count, experts
            )
            next_absmax = gl.load(absmax + chunk)
            for _block in range(first, end):
                mbarrier.wait(full.index(stage), phase)
                turned_wide = wide.index(stage).permute((1, 0))
                product = hopper.warpgroup_mma(
                    tall.index(stage).slice(FIRST, PART), turned_wide, product, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                near = added(near, product, factor)
                product = hopper.warpgroup_mma(
                    tall.index(stage).slice(FIRST + PART, PART), turned_wide, product,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage))
                far = added(far, product, factor)
                stage, phase = turned(stage, phase, STAGES)
            taken += end - first
            first, end, factor = next_first, next_end, squared_scale(next_absmax)
        # What lies past the Gram's last row, or wholly above its diagonal, is nobody's.
        top = row * TALL + FIRST
        left = column * WIDE
        if (taken > 0) & (top < columns) & (top >= left):
            add_part(near, grams, staged, expert * columns + top, left)
            add_part(far, grams, staged, expert * columns + top + PART, left)
        expert, row, column = next_expert, next_row, next_column
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["places", "chunks", "count", "experts", "columns"])
def add_grams(
    left, right, grams, absmax, tiles, bounds, places, chunks, count, experts, columns,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Each program goes through its share of the tiles, 256 Gram rows and 128 columns each.

    `left` and `right` are codes [blocks x columns, rows of a block]; `tiles` int32 [count, 2] names
    an expert's; `places` is experts x count. Rows came in chunks: `bounds` int32 [chunks, experts +
    1] bounds each expert's blocks, `absmax` float32 [chunks] is what codes of 448 stand for.
    """
    TALL: gl.constexpr = left.block_shape[0]
    WIDE: gl.constexpr = right.block_shape[0]
    DEEP: gl.constexpr = left.block_shape[1]
    tall = gl.allocate_shared_memory(left.dtype, [STAGES, TALL, DEEP], left.layout)
    wide = gl.allocate_shared_memory(right.dtype, [STAGES, WIDE, DEEP], right.layout)
    near = gl.allocate_shared_memory(gl.float32, [2, PART, PIECE], grams.layout)
    far = gl.allocate_shared_memory(gl.float32, [2, PART, PIECE], grams.layout)
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
                    grams, absmax, tall, wide, near, full, empty, tiles, bounds, places, chunks,
                    count, experts, columns, 0,
                ),
            ),
            (
                consume,
                (
                    grams, absmax, tall, wide, far, full, empty, tiles, bounds, places, chunks,
                    count, experts, columns, 1,
                ),
            ),
            (
                produce,
                (
                    left, right, tall, wide, full, empty, tiles, bounds, places, chunks, count,
                    experts, columns,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
