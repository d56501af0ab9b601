"""What a code means: grids, scales, rounding, packing. Nobody else rounds or packs."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5q.types import ActivationGrid, IntScheme, StaticFp8

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128  # GLM-5-FP8 stores one scale a 128 x 128 block
SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def group_columns(columns: int, group_size: int | None) -> int:
    """Returns the columns that share a scale: the group, or the whole row per channel."""
    return columns if group_size is None else group_size


def grouped(weight: Tensor, group_size: int | None) -> Tensor:
    """Views weight [..., out, in] as [..., out, groups, columns of a group]."""
    width = group_columns(weight.shape[-1], group_size)
    return weight.view(*weight.shape[:-1], -1, width)


def absmax_scale(weight: Tensor, scheme: IntScheme) -> Tensor:
    """Returns float32 scales [..., out, groups] whose grid just reaches the largest magnitude.

    Four bits reach to -8 .. 7, so the step is absmax / 7.5: half a step is lost on the positive
    side and the other fifteen codes are finer, 0.5 dB better than absmax / 7 on gaussian weights.
    """
    reach = 7.5 if scheme.bits == 4 else 127.0
    return grouped(weight.float(), scheme.group_size).abs().amax(-1) / reach


def round_scale(scale: Tensor, scheme: IntScheme) -> Tensor:
    """Returns float32 scales rounded to the dtype they are stored in; a zero group gets scale 1.

    Codes must be chosen after this: the stored scale is what the kernel multiplies by. A scale
    below zero stays so: its group reaches to 8 steps on the positive side.
    """
    stored = scale.to(SCALE_DTYPES[scheme.scale_dtype]).float()
    usable = torch.isfinite(stored) & (stored.abs() >= torch.finfo(torch.bfloat16).tiny)
    return torch.where(usable, stored, torch.ones_like(stored))


def quantize(weight: Tensor, scale: Tensor, scheme: IntScheme) -> Tensor:
    """Returns int8 codes [..., out, in], the nearest on the grid of scale [..., out, groups]."""
    scaled = grouped(weight.float(), scheme.group_size) / scale.unsqueeze(-1)
    codes = scaled.round().clamp_(scheme.code_min, scheme.code_max)
    return torch.flatten(codes.to(torch.int8), -2)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns codes [..., out, in] x scale [..., out, groups] in `dtype`, rounded once.

    The float32 product is exact for bfloat16 scales (8 + 8 significant bits). e4m3 codes have a
    scale a 128 x 128 block.
    """
    if codes.dtype == FP8:
        return dequantize_fp8_blocks(codes, scale).to(dtype)
    values = codes.view(*scale.shape, -1).float() * scale.float().unsqueeze(-1)
    return torch.flatten(values, -2).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Packs int8 codes [..., in] in -8 .. 7 into int32 [..., ceil(in / 8)].

    Offset by 8, eight a word, the first column in the lowest nibble; columns missing from the last
    word are zero bits (compressed-tensors `pack-quantized`).
    """
    padding = -codes.shape[-1] % 8
    if codes.is_cuda and not padding:
        return _pack_words(codes)
    nibbles = torch.nn.functional.pad(codes.to(torch.int64) + 8, (0, padding)).unflatten(
        -1, (-1, 8)
    )
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _pack_words(codes: Tensor) -> Tensor:
    """pack_int4 of whole words, eight bytes of codes at a time as one integer.

    Each step brings neighbours together: nibbles to bytes, bytes to halves, halves to a word.
    """
    words = (codes + 8).contiguous().view(torch.int64)
    for shift, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        words = (words | words >> shift) & kept
    return words.to(torch.int32)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """Inverse of pack_int4: int8 codes [..., columns]."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[..., :columns] - 8).to(torch.int8)


def dequantize_fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 [out, in] of GLM-5-FP8: weight e4m3 x scale [ceil(out/128), ceil(in/128)].

    The stored name is `weight_scale_inv`, but it multiplies. Edge blocks are cropped.
    """
    out, columns = weight.shape[-2:]
    full = scale.float().repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return weight.float() * full[..., :out, :columns]


def quantize_fp8_blocks(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [out, in], float32 scale [ceil(out/128), ceil(in/128)]) of a weight.

    A block's scale is absmax / 448 (DeepSeek-V3's weight_quant), 1 for a block of zeros. The scale
    that a weight was dequantized with gives its very codes back.
    """
    out, columns = weight.shape
    padding = (0, -columns % FP8_BLOCK, 0, -out % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), padding)
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    if scale is None:
        absmax = blocks.abs().amax((1, 3))
        scale = torch.where(absmax > 0, absmax / FP8_MAX, torch.ones_like(absmax))
    scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    codes = scaled.flatten(2, 3).flatten(0, 1)[:out, :columns]
    return codes.to(FP8).contiguous(), scale


def quantize_activation(x: Tensor, dtype: ActivationGrid | None) -> Tensor:
    """Returns x [..., features] after a round trip through the target's activation grid.

    int8: scale absmax / 127 a token, round to even. fp8: scale absmax / 448 a token, e4m3;
    fp8_block: the same a token and 128 columns; static: the scale given, beyond it clamped. An
    all-zero token stays.
    """
    if dtype is None:
        return x
    if isinstance(dtype, StaticFp8):
        scaled = (x.float() / dtype.scale).clamp(-FP8_MAX, FP8_MAX)
        return (scaled.to(FP8).float() * dtype.scale).to(x.dtype)
    if dtype == "fp8_block":
        columns = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -columns % FP8_BLOCK))
        blocks = padded.unflatten(-1, (-1, FP8_BLOCK))
        return quantize_activation(blocks, "fp8").flatten(-2)[..., :columns]
    if dtype == "fp8_static":
        raise ValueError("a static grid needs its scale: StaticFp8")
    values = x.float()
    reach = 127.0 if dtype == "int8" else FP8_MAX
    absmax = values.abs().amax(-1, keepdim=True)
    scale = torch.where(absmax > 0, absmax / reach, torch.ones_like(absmax))
    scaled = values / scale
    rounded = scaled.round() if dtype == "int8" else scaled.clamp(-reach, reach).to(FP8).float()
    return (rounded * scale).to(x.dtype)
