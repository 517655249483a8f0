"""Caches of keys and values, for generating text."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of, shown
from fp4engine.modules.te_arguments import refuse, te_device
from fp4engine.te.pytorch.constants import QKV_FORMATS


class InferenceParams:
    """Keys and values of the sequences that are being generated.

    Args:
        max_batch_size, max_sequence_length: what may not be exceeded.
        num_heads_kv, head_dim_k, head_dim_v, dtype: of all keys and values that come; None takes any.
        is_paged, total_num_pages, page_size, max_ctx_len: how memory is handed out; here, as much as a sequence needs.
        qkv_format: layout of what comes, which the attention knows.

    Raises:
        ValueError: a size, dtype or layout that there is not.
        NotImplementedError: a cache manager of one's own.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        refuse("InferenceParams", custom_cache_manager=(custom_cache_manager, None))
        self.max_batch_size = require_integer("max_batch_size", max_batch_size, 1)
        self.max_sequence_length = require_integer("max_sequence_length", max_sequence_length, 1)
        head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        for name, size in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k), ("head_dim_v", head_dim_v)):
            if size is not None:
                require_integer(name, size, 1)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype or None, got {shown(dtype)}")
        require_one_of("qkv_format", qkv_format, QKV_FORMATS)
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v
        self.dtype, self.is_paged, self.page_size = dtype, is_paged, page_size
        self.total_num_pages, self.max_ctx_len = total_num_pages, max_ctx_len
        self.input_qkv_format = qkv_format
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()
        self.cache: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}

    def allocate_memory(self, layer_number: Any) -> None:
        """Make room for a layer; :meth:`step` does it too."""
        self.cache.setdefault(layer_number, {})

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> None:
        """Say which sequences go on, with how many tokens each; others are forgotten.

        Raises:
            ValueError: more sequences, or longer ones, than there may be.
        """
        for count in step_dict.values():
            require_integer("each count of step_dict", count, 0)
        if len(step_dict) > self.max_batch_size:
            raise ValueError(f"max_batch_size={self.max_batch_size} sequences may go on, got {len(step_dict)}")
        before = {name: self.sequences.get(name, 0) for name in step_dict}
        after = {name: before[name] + count for name, count in step_dict.items()}
        if max(after.values(), default=0) > self.max_sequence_length:
            raise ValueError(f"max_sequence_length={self.max_sequence_length}, got {dict(after)}")
        self.sequences_pre_step, self.sequences = OrderedDict(before), OrderedDict(after)
        for layer in self.cache.values():
            for name in set(layer) - set(step_dict):
                del layer[name]

    def get_seqlens_pre_step(self) -> Tensor:
        """[B] lengths before this step."""
        return torch.tensor(list(self.sequences_pre_step.values()), dtype=torch.int32, device=te_device(None))

    def lengths_of_step(self, batch: int, most: int) -> list[int]:
        """How many tokens each sequence goes on with, as :meth:`pre_step` was told.

        Raises:
            ValueError: inputs of ``batch`` sequences of ``most`` tokens do not have them.
        """
        lengths = [count - self.sequences_pre_step[name] for name, count in self.sequences.items()]
        if len(lengths) != batch or max(lengths, default=0) > most:
            raise ValueError(
                f"inputs are of {batch} sequences of {most} tokens, and pre_step was told of {len(lengths)} that go on "
                f"with {lengths}"
            )
        return lengths

    def step(self, layer_number: Any, new_k: list[Tensor], new_v: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """All keys and values [T, G, D] of each sequence, with the new ones at their end.

        Raises:
            ValueError: they have other heads or another dtype than this was made for; the layer has other lengths than
                :meth:`pre_step` was told, as where two layers have one number.
        """
        for key, value in zip(new_k[:1], new_v[:1], strict=True):  # all are of one tensor
            heads, head_dim_k = key.shape[1:]
            come = {"num_heads_kv": heads, "head_dim_k": head_dim_k, "head_dim_v": value.shape[-1], "dtype": key.dtype}
            for name, got in come.items():
                if (told := getattr(self, name)) not in (None, got):
                    raise ValueError(f"InferenceParams has {name}={told}, got keys and values of {name}={got}")
        layer = self.cache.setdefault(layer_number, {})
        whole: list[tuple[Tensor, Tensor]] = []
        for name, key, value in zip(self.sequences, new_k, new_v, strict=True):
            old = layer.get(name)
            held, wanted = 0 if old is None else len(old[0]), self.sequences_pre_step[name]
            if held != wanted:
                raise ValueError(
                    f"the cache of layer_number={layer_number!r} holds {held} tokens of sequence {name!r}, where "
                    f"pre_step was told of {wanted}; each layer needs a layer_number of its own and one call per "
                    "step, and cross-attention has no cache"
                )
            if old is not None:
                key, value = torch.cat((old[0], key)), torch.cat((old[1], value))
            layer[name] = key, value
            whole.append((key, value))
        return whole
