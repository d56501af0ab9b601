"""Sparse Flash Attention for Hopper in Gluon, Triton's language of explicit layouts.

What portable Triton cannot say: two blocks of rows in shared memory, the next one asked for while
the tensor cores still work on the last, and scores that begin before the last product has ended.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy as copies
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fused_ops.triton_shared import holder as portable_holder

holder = gluon.jit(portable_holder.fn)


@gluon.jit
def positions(listed, room, lane):
    """The listed positions at `lane` of a block, -1 after the last."""
    return gl.load(listed + lane, mask=lane < room, other=-1)


@gluon.jit
def rows_at(latent, position, keys, pages, page_stride, row_stride, PAGE: gl.constexpr):
    """(pointers to the rows at `position`, which of them are chosen)."""
    chosen = (position >= 0) & (position < keys)
    place = gl.where(chosen, position, 0)
    if PAGE > 0:
        page = gl.load(pages + place // PAGE, mask=chosen, other=0)
        row = page.to(gl.int64) * page_stride + (place % PAGE).to(gl.int64) * row_stride
    else:
        # Unsigned, this is one instruction and not five.
        row = place.to(gl.uint32).to(gl.uint64) * row_stride.to(gl.uint32).to(gl.uint64)
    return latent + row, chosen


@gluon.jit
def copy(
    values, rests, latent, position, rest_position, keys, pages, page_stride, row_stride,
    empty, phase, full, PAGE: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Asks for the rows at [N] positions into shared memory: values [N, 512] and rest [N, 64].

    After `empty` has reached `phase`, if it is there; `full` learns when the rows are.
    """
    column = gl.arange(0, values.shape[1], gl.SliceLayout(0, WIDE))
    rest = values.shape[1] + gl.arange(0, rests.shape[1], gl.SliceLayout(0, NARROW))
    row, chosen = rows_at(latent, position, keys, pages, page_stride, row_stride, PAGE)
    more, more_chosen = rows_at(latent, rest_position, keys, pages, page_stride, row_stride, PAGE)
    if empty is not None:
        mbarrier.wait(empty, phase)
    copies.async_copy_global_to_shared(values, row[:, None] + column[None, :], chosen[:, None])
    copies.async_copy_global_to_shared(rests, more[:, None] + rest[None, :], more_chosen[:, None])
    if full is not None:
        copies.mbarrier_arrive(full, increment_count=False)
    copies.commit_group()


@gluon.jit
def rounded(x):
    """bfloat16 of float32, two by one instruction; cast one by one they take the slow unit."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def read(
    latent, position, keys, pages, page_stride, row_stride, PAGE: gl.constexpr, TILED: gl.constexpr
):
    """([N, 4, 32] int32 of four fp8 codes, [N, 4] scales) of cache rows at [N] positions, or 0."""
    tile = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, TILED)))
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, TILED)))
    row, chosen = rows_at(latent, position, keys, pages, page_stride, row_stride, PAGE)
    at = row.to(gl.pointer_type(gl.int32))[:, None] + (tile * 32)[None, :]
    codes = gl.load(at[:, :, None] + column[None, None, :], mask=chosen[:, None, None], other=0)
    at = (row + 512).to(gl.pointer_type(gl.float32))
    return codes, gl.load(at[:, None] + tile[None, :], mask=chosen[:, None], other=0.0)


@gluon.jit
def in_words(values):
    """`values` [2, N, 512] bfloat16 in shared memory as [2, N, 256] int32."""
    HALVES: gl.constexpr = values.shape[2] // 2
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    return values._reinterpret(gl.int32, [2, values.shape[1], HALVES], WORDS)


@gluon.jit
def widen(words, codes, scales):
    """Writes codes x scales as bfloat16, two a word, to shared memory [N, 256].

    Four codes a register, as a loop can carry them; as bytes each would take one.
    """
    first, second = gl.inline_asm_elementwise(
        """{ .reg .b16 low, high, a, b, c, d; .reg .b32 two; .reg .f32 e, f, g, h;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 two, low; mov.b32 {a, b}, two;
        cvt.rn.f16x2.e4m3x2 two, high; mov.b32 {c, d}, two;
        cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;
        mul.f32 e, e, $3; mul.f32 f, f, $3; mul.f32 g, g, $3; mul.f32 h, h, $3;
        cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }""",
        "=r,=r,r,f", [codes, scales[:, :, None]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    words.store(gl.reshape(gl.join(first, second), (words.shape[0], words.shape[1])))


@gluon.jit
def copy_rests(
    rests, latent, position, keys, pages, page_stride, row_stride,
    PAGE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Asks for the 64 rotated features of cache rows of 656 bytes."""
    rest = gl.arange(0, rests.shape[1], gl.SliceLayout(0, NARROW))
    row, chosen = rows_at(latent, position, keys, pages, page_stride, row_stride, PAGE)
    at = (row + 528).to(gl.pointer_type(gl.bfloat16))
    copies.async_copy_global_to_shared(rests, at[:, None] + rest[None, :], mask=chosen[:, None])
    copies.commit_group()


@gluon.jit
def produce_widened(
    values, rests, full, empty, latent, listed, room, keys, pages, page_stride, row_stride,
    N: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As produce, of rows of 656 bytes: by way of registers, a quarter of a block at a time.

    While one quarter is widened the next two are on their way, and the lists of the two after them.
    """
    words = in_words(values)
    PART: gl.constexpr = N // 4
    TILED: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 2, 16], [gl.num_warps(), 1, 1], [2, 1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, PART, gl.SliceLayout(1, gl.SliceLayout(2, TILED)))
    rest_lane = gl.arange(0, N, gl.SliceLayout(1, NARROW))
    rest = positions(listed, room, rest_lane)
    first = positions(listed, room, lane)
    second = positions(listed + PART, room - PART, lane)
    codes, scales = read(latent, first, keys, pages, page_stride, row_stride, PAGE, TILED)
    after, after_scales = read(latent, second, keys, pages, page_stride, row_stride, PAGE, TILED)
    first = positions(listed + 2 * PART, room - 2 * PART, lane)
    second = positions(listed + 3 * PART, room - 3 * PART, lane)
    for start in range(0, room, N):
        step = start // N
        turn = step % 2
        next_rest = positions(listed + start + N, room - start - N, rest_lane)
        mbarrier.wait(empty.index(turn), (step // 2 & 1) ^ 1)
        copy_rests(
            rests.index(turn), latent, rest, keys, pages, page_stride, row_stride, PAGE, NARROW
        )
        for part in gl.static_range(4):
            last, last_scales = read(
                latent, first, keys, pages, page_stride, row_stride, PAGE, TILED
            )
            first = second
            ahead = start + (part + 4) * PART
            second = positions(listed + ahead, room - ahead, lane)
            widen(words.index(turn).slice(part * PART, PART), codes, scales)
            codes, scales = after, after_scales
            after, after_scales = last, last_scales
        copies.wait_group(0)
        hopper.fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(turn))
        rest = next_rest


@gluon.jit
def produce(
    values, rests, full, empty, latent, listed, room, keys, pages, page_stride, row_stride,
    N: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Keeps both buffers full. These warps do nothing else: products would hold them up."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, N, gl.SliceLayout(1, WIDE))
    rest_lane = gl.arange(0, N, gl.SliceLayout(1, NARROW))
    position = positions(listed, room, lane)
    rest_position = positions(listed, room, rest_lane)
    for start in range(0, room, N):
        step = start // N
        turn = step % 2
        # The next list is asked for before this one's rows.
        next_position = positions(listed + start + N, room - start - N, lane)
        next_rest_position = positions(listed + start + N, room - start - N, rest_lane)
        copy(
            values.index(turn), rests.index(turn), latent, position, rest_position, keys, pages,
            page_stride, row_stride, empty.index(turn), (step // 2 & 1) ^ 1, full.index(turn),
            PAGE, WIDE, NARROW,
        )  # fmt: skip
        position = next_position
        rest_position = next_rest_position
    copies.wait_group(0)


@gluon.jit
def held(x):
    """[64, 2, 8]: of a row of [64, 64] scores, those that one thread holds are added."""
    return gl.sum(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 16, 8)), 2)


@gluon.jit
def weigh(weights, bits, totals, wholes):
    """Writes 2^bits to shared memory as bfloat16; the sums with them, as they were and rounded."""
    weight = gl.exp2(bits)
    used = rounded(weight)
    weights.store(used)
    totals += held(weight)
    wholes += held(used.to(gl.float32))
    hopper.fence_async_shared()
    gl.thread_barrier()
    return totals, wholes


@gluon.jit
def of_rows(x, SCORES: gl.constexpr):
    """[64] sums of what `held` left, as SCORES holds its rows."""
    return gl.convert_layout(gl.sum(gl.sum(x, 2), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def consume(
    near, far, values, rests, weights, full, empty, query, query_head, latent, listed, room,
    keys, pages, page_stride, row_stride, out, lse, block, heads, row, scale,
    N: gl.constexpr, PAGE: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Softmax over the rows and their sum: two groups of four warps, half of the scores each."""
    H: gl.constexpr = near.shape[0]
    VALUE: gl.constexpr = near.shape[1]
    REST: gl.constexpr = far.shape[1]
    LEAST: gl.constexpr = 2.0**-53  # 2,048 rows of 2^-64
    MOST: gl.constexpr = 2.0**64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, VALUE // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    head = block + gl.arange(0, H, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, VALUE, gl.SliceLayout(0, WIDE))
    at = query + head[:, None].to(gl.int64) * query_head + column[None, :]
    copies.async_copy_global_to_shared(near, at, mask=(head < heads)[:, None])
    head = block + gl.arange(0, H, gl.SliceLayout(1, NARROW))
    column = VALUE + gl.arange(0, REST, gl.SliceLayout(0, NARROW))
    at = query + head[:, None].to(gl.int64) * query_head + column[None, :]
    copies.async_copy_global_to_shared(far, at, mask=(head < heads)[:, None])
    copies.commit_group()
    copies.wait_group(0)
    gl.thread_barrier()

    lane = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    base = gl.zeros([H], gl.float32, gl.SliceLayout(1, SCORES))
    product = hopper.warpgroup_mma_init(gl.zeros([H, VALUE], gl.float32, SUMS))
    totals = held(gl.zeros([H, N], gl.float32, SCORES))
    wholes = totals
    for start in range(0, room, N):
        step = start // N
        turn = step % 2
        position = positions(listed + start, room - start, lane)
        chosen = (position >= 0) & (position < keys)
        mbarrier.wait(full.index(turn), step // 2 & 1)
        hopper.fence_async_shared()
        # Issue of a product waits for those before it, so the short one is in line while the last
        # block's ends and its buffer is given back.
        logits = hopper.warpgroup_mma(
            far, rests.index(turn).permute((1, 0)), gl.zeros([H, N], gl.float32, SCORES),
            use_acc=False, is_async=True,
        )  # fmt: skip
        sums = hopper.warpgroup_mma_wait(1, deps=(product,))
        gl.thread_barrier()
        if step > 0:
            mbarrier.arrive(empty.index(1 - turn))
        logits = hopper.warpgroup_mma(
            near, values.index(turn).permute((1, 0)), logits, is_async=True
        )
        scores = hopper.warpgroup_mma_wait(0, deps=(logits,)) * scale
        bits = gl.where(chosen[None, :], scores, float("-inf"))
        totals, wholes = weigh(weights, bits, totals, wholes)
        product = hopper.warpgroup_mma(weights, values.index(turn), sums, is_async=True)
    sums = hopper.warpgroup_mma_wait(0, deps=(product,))
    total = of_rows(totals, SCORES)
    whole = of_rows(wholes, SCORES)
    astray = (total < LEAST) | (total > MOST)
    if gl.max(astray.to(gl.int32), 0) > 0:
        peaks = gl.full([H, N], float("-inf"), gl.float32, SCORES)
        for start in range(0, room, N):
            scores = again(
                near, far, values, rests, latent, listed + start, room - start, keys, pages,
                page_stride, row_stride, scale, lane, SCORES, WIDE, NARROW, PAGE, KV,
            )  # fmt: skip
            peaks = gl.maximum(peaks, scores)
        peak = gl.max(peaks, 1)
        base = gl.where(astray & (peak > float("-inf")), peak, 0.0)
        sums = gl.zeros([H, VALUE], gl.float32, SUMS)
        totals = held(gl.zeros([H, N], gl.float32, SCORES))
        wholes = totals
        for start in range(0, room, N):
            scores = again(
                near, far, values, rests, latent, listed + start, room - start, keys, pages,
                page_stride, row_stride, scale, lane, SCORES, WIDE, NARROW, PAGE, KV,
            )  # fmt: skip
            totals, wholes = weigh(weights, scores - base[:, None], totals, wholes)
            sums = hopper.warpgroup_mma(weights, values.index(0), sums)
        total = of_rows(totals, SCORES)
        whole = of_rows(wholes, SCORES)
    some = total > 0
    head = block + gl.arange(0, H, gl.SliceLayout(1, SCORES))
    logged = (base + gl.log2(gl.where(some, total, 1.0))) * 0.6931471805599453
    gl.store(lse + row * heads + head, gl.where(some, logged, float("-inf")), mask=head < heads)
    head = block + gl.arange(0, H, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, VALUE, gl.SliceLayout(0, SUMS))
    at = out + (row * heads + head[:, None]) * VALUE + column[None, :]
    # Divided by the sum of the rounded weights, one row alone comes out as it is.
    divisor = gl.convert_layout(gl.where(some, whole, 1.0), gl.SliceLayout(1, SUMS))
    result = sums / divisor[:, None]
    gl.store(at, result.to(out.dtype.element_ty), mask=(head < heads)[:, None])


@gluon.jit
def again(
    near, far, values, rests, latent, listed, room, keys, pages, page_stride, row_stride,
    scale, lane, SCORES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
    PAGE: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """[64, N] scores in bits of one block, which is in the first buffer then. The slow way."""
    H: gl.constexpr = near.shape[0]
    N: gl.constexpr = values.shape[1]
    gl.thread_barrier()
    rest_position = positions(listed, room, gl.arange(0, N, gl.SliceLayout(1, NARROW)))
    if KV == 0:
        position = positions(listed, room, gl.arange(0, N, gl.SliceLayout(1, WIDE)))
        copy(
            values.index(0), rests.index(0), latent, position, rest_position, keys, pages,
            page_stride, row_stride, None, 0, None, PAGE, WIDE, NARROW,
        )  # fmt: skip
    else:
        TILED: gl.constexpr = gl.BlockedLayout(
            [1, 1, 2], [1, 2, 16], [gl.num_warps(), 1, 1], [2, 1, 0]
        )
        copy_rests(
            rests.index(0), latent, rest_position, keys, pages, page_stride, row_stride, PAGE,
            NARROW,
        )  # fmt: skip
        row_lane = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, TILED)))
        codes, scales = read(
            latent, positions(listed, room, row_lane), keys, pages, page_stride, row_stride, PAGE,
            TILED,
        )  # fmt: skip
        widen(in_words(values).index(0), codes, scales)
    position = positions(listed, room, lane)
    chosen = (position >= 0) & (position < keys)
    copies.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()
    logits = hopper.warpgroup_mma(
        near, values.index(0).permute((1, 0)), gl.zeros([H, N], gl.float32, SCORES)
    )
    logits = hopper.warpgroup_mma(far, rests.index(0).permute((1, 0)), logits)
    return gl.where(chosen[None, :], logits * scale, float("-inf"))


@gluon.jit
def attend(
    query, latent, indices, offsets, key_offsets, pages, out, lse,
    query_token, query_head, page_stride, row_stride, index_stride, page_count, tokens, heads,
    sequences, scale,
    SELECTED: gl.constexpr, PART: gl.constexpr, VALUE: gl.constexpr, REST: gl.constexpr,
    PAGE: gl.constexpr, STEPS: gl.constexpr, N: gl.constexpr, KV: gl.constexpr,
    PRODUCERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 heads of a token over PART of its SELECTED rows, N at a time.

    `scale` is in bits: log2(e) x the softmax's. KV is 0 for plain rows, 1 for fp8
    rows of 656 bytes. As in triton_kernel the softmax's base is zero, and
    a token whose sum shows that its logits lie far from zero is done again from its own largest.
    """
    H: gl.constexpr = 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    code = query.dtype.element_ty
    token = gl.program_id(0).to(gl.int64)
    part = gl.program_id(2)
    sequence = holder(token, offsets, sequences, STEPS)
    first = gl.load(key_offsets + sequence).to(gl.int64)
    keys = (gl.load(key_offsets + sequence + 1) - first).to(gl.int32)
    if PAGE == 0:
        latent += first * row_stride
    pages += sequence * page_count
    listed = indices + token * index_stride + part * PART
    room = gl.minimum(PART, SELECTED - part * PART)
    near = gl.allocate_shared_memory(code, [H, VALUE], SHARED)
    far = gl.allocate_shared_memory(code, [H, REST], SHARED)
    values = gl.allocate_shared_memory(code, [2, N, VALUE], SHARED)
    rests = gl.allocate_shared_memory(code, [2, N, REST], SHARED)
    weights = gl.allocate_shared_memory(code, [H, N], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(full.index(turn), 1 if KV else 32 * PRODUCERS)  # or every thread that copies
        mbarrier.init(empty.index(turn), 1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    near, far, values, rests, weights, full, empty, query + token * query_token,
                    query_head, latent, listed, room, keys, pages, page_stride, row_stride,
                    out, lse, gl.program_id(1) * H, heads, part * tokens + token, scale, N, PAGE,
                    KV,
                ),
            ),
            (
                produce_widened if KV else produce,
                (
                    values, rests, full, empty, latent, listed, room, keys, pages,
                    page_stride, row_stride, N, PAGE,
                ),
            ),
        ],
        [PRODUCERS],
        [REGISTERS],
    )  # fmt: skip
