"""Rotary position embedding by TransformerEngine's names.

Legend: B batch, S sequence length, H heads, D head size, R components that are rotated, N tokens in all.
"""

import torch
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of, shown
from fp4engine.functional.attention import rotate
from fp4engine.modules.te_arguments import te_device
from fp4engine.te.pytorch.constants import QKV_FORMATS


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of the rotary position embedding: ``(position + offset) / rotary_base^(2 i / dim)``, each twice.

    Args:
        dim: R, which ``rotary_percent`` makes smaller.
        seq_len_interpolation_factor, pretrained_max_position_embeddings: with both, positions are divided by the
            factor, or, for sequences longer than that makes room for, by as much as fits them in.
        interleaved: pairs are neighbours instead of the two halves of R.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=te_device(None)) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles [max_seq_len, 1, 1, R], FP32 whatever ``torch.autocast`` says."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        angles = positions[:, None] * self.inv_freq
        twice = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return twice[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first R of D components of ``t`` [S, B, H, D], [B, S, H, D] or [N, H, D]; what comes is contiguous.

    Args:
        freqs: angles [S or more, 1, 1, R].
        start_positions: [B], the position of each sequence's first token; None is zero.
        fused: compute in FP32 and round once, as attention modules do, instead of in the dtype of ``t``.
        cu_seqlens: [B + 1], where sequences begin and end in ``"thd"``.
        cp_size, cp_rank: rank ``cp_rank`` of ``cp_size`` has the sequences' parts ``cp_rank`` and, from behind, again.

    Raises:
        ValueError: another format, ``"thd"`` without ``cu_seqlens`` of all tokens, too few angles, a start that is
            missing or negative, or a rank that is none of ``cp_size``.
    """
    require_one_of("tensor_format", tensor_format, QKV_FORMATS)
    require_integer("cp_size", cp_size, 1)
    require_integer("cp_rank", cp_rank, 0, cp_size - 1)
    lengths: list[int] = []
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens must not be None when tensor_format is 'thd'")
        lengths = (cu_seqlens // cp_size).diff().tolist()
        if sum(lengths) != t.shape[0]:
            raise ValueError(
                f"cu_seqlens must be of {t.shape[0]} tokens on each of cp_size={cp_size} ranks, got {lengths}"
            )
    batch = len(lengths) if tensor_format == "thd" else t.shape[tensor_format.index("b")]
    if start_positions is not None:
        if not isinstance(start_positions, Tensor) or tuple(start_positions.shape) != (batch,):
            raise ValueError(f"start_positions must be a tensor [{batch}], got {shown(start_positions)}")
        if bool((start_positions < 0).any()):
            raise ValueError(f"start_positions must be at least 0, got {start_positions.tolist()}")

    dtype = torch.float32 if fused else t.dtype

    def turned(x: Tensor, start: int) -> Tensor:  # x [S, H, D]
        length, here = x.shape[0], freqs[start:]
        if length * cp_size > here.shape[0]:
            raise ValueError(f"freqs must have {start + length * cp_size} positions, got {freqs.shape[0]}")
        if cp_size > 1:
            half, end = length // 2, length * cp_size
            front = here[cp_rank * half : (cp_rank + 1) * half]
            here = torch.cat((front, here[end - (cp_rank + 1) * half : end - cp_rank * half]))
        return rotate(x.transpose(0, 1)[None], here, interleaved, dtype)[0].transpose(0, 1)

    if tensor_format != "thd" and start_positions is None and cp_size == 1:
        order = (0, 2, 1, 3) if tensor_format == "bshd" else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if tensor_format == "bshd" else (2, 0, 1, 3)
        return rotate(t.permute(order), freqs, interleaved, dtype).permute(back).contiguous()
    starts = [0] * batch if start_positions is None else start_positions.tolist()
    if tensor_format == "thd":
        return torch.cat([turned(part, start) for part, start in zip(t.split(lengths), starts, strict=True)])
    axis = tensor_format.index("b")
    return torch.stack([turned(part, start) for part, start in zip(t.unbind(axis), starts, strict=True)], dim=axis)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [S, B, H Q / K, K] and K [S, B, H, K], rotated by :func:`apply_rotary_pos_emb` in FP32, and V [S, B, H, V].

    Args:
        qkv: [S, B, H, Q + K + V], or with B first.
        q_freqs, k_freqs: angles [S or more, 1, 1, R].
        qkv_split_arg_list: Q, K and V, where K is the size of a head and Q a multiple of it.
        cu_seqlens: without effect.

    Raises:
        ValueError: ``"thd"``, sizes that are not those of ``qkv``, or as :func:`apply_rotary_pos_emb`.
    """
    require_one_of("tensor_format", tensor_format, ("sbhd", "bshd"))
    sizes = list(qkv_split_arg_list)
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) != qkv.shape[-1] or sizes[0] % sizes[1]:
        raise ValueError(
            f"qkv_split_arg_list must be three sizes whose sum is {qkv.shape[-1]}, the first a multiple of the second; "
            f"got {sizes}"
        )
    query, key, value = qkv.split(sizes, dim=-1)
    query = query.reshape(*qkv.shape[:2], -1, sizes[1])
    rest = start_positions, interleaved, True, None, cp_size, cp_rank
    rotated = [
        apply_rotary_pos_emb(part, freqs, tensor_format, *rest) for part, freqs in ((query, q_freqs), (key, k_freqs))
    ]
    return rotated[0], rotated[1], value.contiguous()
