"""Scaled dot-product attention with TransformerEngine's mask words, over PyTorch's own.

Legend: B batch, S query length, T key length, H query heads, G key-value groups, D head size.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of, shown

MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may read.

    Attributes:
        kind: one of :data:`MASK_TYPES`. ``causal`` kinds align the diagonal to the top left corner of [S, T], and
            ``bottom_right`` kinds to the bottom right corner; padding does not count as part of a sequence.
        window_size: ``(left, right)``: query i reads keys ``i - left`` to ``i + right`` along that diagonal; -1 sets no
            limit.
        bottom_right_diagonal: where a window's diagonal lies if ``kind`` is not causal; None is bottom right.

    Raises:
        ValueError: unknown kind, a window that is not a pair of integers or contradicts a causal kind, or a diagonal
            that is no bool.
    """

    kind: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None

    def __post_init__(self) -> None:
        require_one_of("attn_mask_type", self.kind, MASK_TYPES)
        require_one_of("bottom_right_diagonal", self.bottom_right_diagonal, (None, False, True))
        if not isinstance(self.window, Sequence) or len(self.window) != 2:
            raise ValueError(f"window_size of a mask must be two integers, got {shown(self.window_size)}")
        for size in self.window:
            require_integer("each of window_size", size, -1)
        if self.is_causal and self.window[1] != 0:
            raise ValueError(f"window_size of a {self.kind!r} mask must end at 0, got {self.window_size}")

    @property
    def is_causal(self) -> bool:
        return "causal" in self.kind

    @property
    def reads_mask(self) -> bool:
        """True if :meth:`allowed` needs a mask tensor."""
        return "padding" in self.kind or self.kind == "arbitrary"

    def warn_if_unread(self, attention_mask: object) -> None:
        """Say that ``attention_mask`` is given, and that nothing reads it."""
        if attention_mask is not None and not self.reads_mask and not torch.compiler.is_compiling():
            warnings.warn(
                f"attention_mask is not read under attn_mask_type={self.kind!r}; padding and arbitrary masks read it",
                stacklevel=3,
            )

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0 if self.is_causal else -1) if self.window_size is None else self.window_size

    def allowed(
        self, masked: Tensor | None, queries: int, keys: int, device: torch.device, padded: Tensor | None = None
    ) -> Tensor | None:
        """Boolean, broadcastable to [B, H, S, T], True where a query reads a key; None if all queries read all keys.

        Args:
            masked: True where NOT to read: [B, 1, 1, T] for padding, broadcastable to [B, H, S, T] for arbitrary.
            padded: True for queries that are padding, [B, 1, 1, S]; None takes ``masked`` for queries as well.

        Raises:
            ValueError: a mask that is needed and missing, not boolean, or of another shape under padding.
        """
        allowed = None
        if self.reads_mask:
            if masked is None:
                raise ValueError(f"a {self.kind!r} mask needs attention_mask")
            self._require_mask(masked, keys)
            if padded is not None:
                self._require_mask(padded, queries)
            allowed = ~masked
        left, right = self.window
        if left < 0 and right < 0:
            return allowed
        distance = self.distance(masked, queries, keys, device, padded)
        inside = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            inside &= distance >= -left
        if right >= 0:
            inside &= distance <= right
        return inside if allowed is None else allowed & inside

    def _require_mask(self, masked: Tensor, length: int) -> None:
        """Check a mask's dtype and, for padding kinds, its shape [B, 1, 1, length], of queries or of keys."""
        given = masked.dtype if isinstance(masked, Tensor) else type(masked).__name__
        if given != torch.bool:
            raise ValueError(f"attention_mask must be boolean, True where NOT to attend, got {given}")
        if "padding" in self.kind and tuple(masked.shape[1:]) != (1, 1, length):
            raise ValueError(
                f"attention_mask of a {self.kind!r} mask must have the shape [batch, 1, 1, {length}], "
                f"got {list(masked.shape)}"
            )

    def distance(
        self, masked: Tensor | None, queries: int, keys: int, device: torch.device, padded: Tensor | None = None
    ) -> Tensor:
        """How far a key lies to the right of its query's diagonal, broadcastable to [B, H, S, T].

        Raises:
            ValueError: the distance depends on how many queries are padding, and ``padded`` is None.
        """
        distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        is_bottom_right = "bottom_right" in self.kind or self.bottom_right_diagonal is not False
        if self.kind in ("causal", "padding_causal") or not is_bottom_right:
            return distance
        if "padding" not in self.kind or masked is None or (padded is None and queries == keys):
            return distance - (keys - queries)
        if padded is None:
            raise ValueError(
                f"attention_mask of a {self.kind!r} mask along the bottom right diagonal of {queries} queries and "
                f"{keys} keys must be a pair, of the queries and of the keys"
            )
        return distance - ((~masked).sum(-1, keepdim=True) - (~padded).sum(-1, keepdim=True))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    masked: Tensor | None = None,
    *,
    padded: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """``softmax(q k^T * scale + bias) v``; the output of a query that may read no key is zeros.

    Args:
        query: [B, H, S, D]; key, value: [B, G, T, D] with H a multiple of G.
        masked, padded: see :meth:`AttentionMask.allowed`.
        bias: added to the scores, broadcastable to [B, H, S, T].
        slopes: of ALiBi, [H] or [B, H]; the slope times the distance of a key from the query's diagonal is subtracted
            from the score.
        scale: None means 1 / sqrt(D).

    Returns:
        [B, H, S, D].

    Raises:
        ValueError: as :meth:`AttentionMask.allowed`; a mask or bias that is not broadcastable.
    """
    grouped = query.shape[1] != key.shape[1]
    attend = partial(F.scaled_dot_product_attention, query, key, value, scale=scale, enable_gqa=grouped)
    if mask == AttentionMask("causal") and bias is None and slopes is None:
        return attend(None, dropout, is_causal=True)
    scores = (*query.shape[:3], key.shape[2])
    place = (masked, query.shape[2], key.shape[2], query.device, padded)
    allowed = mask.allowed(*place)
    _require_broadcastable("attention_mask", allowed, scores)
    _require_broadcastable("core_attention_bias", bias, scores)
    added = None if bias is None else bias.to(query.dtype)
    if slopes is not None:
        slopes = slopes if slopes.ndim == 2 else slopes[None]
        slopes = slopes.to(torch.promote_types(query.dtype, torch.float32))
        alibi = -(slopes[:, :, None, None] * mask.distance(*place).abs()).to(query.dtype)
        added = alibi if added is None else added + alibi
    if added is not None:
        allowed = added if allowed is None else added.masked_fill(~allowed, float("-inf"))
    return attend(allowed, dropout)


def _require_broadcastable(name: str, tensor: Tensor | None, scores: tuple[int, ...]) -> None:
    shape = () if tensor is None else tensor.shape
    sizes = zip(reversed(shape), reversed(scores), strict=False)
    if len(shape) > len(scores) or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(
            f"{name} must be broadcastable to [batch, heads, queries, keys], here {list(scores)}, got {list(shape)}"
        )


def require_core_attention_bias(kind: str, bias: Tensor | None) -> None:
    """Refuse a ``core_attention_bias`` without ``core_attention_bias_type="post_scale_bias"``, and the reverse.

    Raises:
        ValueError: only one of them is given.
    """
    if (bias is None) == (kind == "post_scale_bias"):
        raise ValueError(
            "core_attention_bias goes with core_attention_bias_type='post_scale_bias' and with nothing else, "
            f"got {'None' if bias is None else 'a tensor'} with {kind!r}"
        )


def rotary_pair(rotary_pos_emb: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The angles of queries and of keys: a pair, or one tensor for both.

    Raises:
        ValueError: neither a tensor nor a pair of tensors.
    """
    given = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
    if len(given) != 2 or not all(isinstance(angles, Tensor) for angles in given):
        kinds = ", ".join(type(angles).__name__ for angles in given)
        got = f"a tuple of {len(given)} ({kinds})" if given is rotary_pos_emb else type(rotary_pos_emb).__name__
        raise ValueError(f"rotary_pos_emb must be a tensor of angles, or a pair of them, got {got}")
    return given


def rotate(x: Tensor, angles: Tensor, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rotary position embedding: ``x cos(a) + half_turn(x) sin(a)`` on the first R of D components.

    Args:
        x: [B, H, S, D].
        angles: [S or more, 1 or B, 1, R] in radians, each angle twice, as TransformerEngine's
            ``RotaryPositionEmbedding`` makes them.
        interleaved: whether a pair of components that are rotated together are neighbours. Otherwise they are R / 2
            apart.
        dtype: dtype of the arithmetic, unless ``x`` has a wider one. The result has the dtype of ``x``, rounded once.

    Raises:
        ValueError: no tensor of that form, angles of fewer positions than S, R > D, or an odd R.
    """
    if not isinstance(angles, Tensor):
        raise ValueError(f"rotary_pos_emb must be a tensor of angles, or a pair of them, got {type(angles).__name__}")
    fits = angles.ndim == 4 and angles.shape[0] >= x.shape[2] and angles.shape[1] in (1, x.shape[0])
    if not fits or angles.shape[-1] > x.shape[-1] or angles.shape[-1] % 2:
        raise ValueError(
            f"rotary_pos_emb must have angles of {x.shape[2]} or more positions and of an even number of components, "
            f"{x.shape[-1]} or fewer, [S, 1 or B, 1, R], got {list(angles.shape)}"
        )
    angles = angles[: x.shape[2]].permute(1, 2, 0, 3)
    dtype = torch.promote_types(x.dtype, dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned, rest = x[..., : angles.shape[-1]].to(dtype), x[..., angles.shape[-1] :]
    if interleaved:
        half_turn = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        half_turn = torch.cat((-second, first), dim=-1)
    return torch.cat(((turned * cos + half_turn * sin).to(x.dtype), rest), dim=-1)
