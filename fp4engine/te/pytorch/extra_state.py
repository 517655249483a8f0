"""What TransformerEngine's modules keep in a ``state_dict`` beside their parameters."""

import io
import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine.arguments import shown
from fp4engine.modules.amax_history import get_amax_history, set_amax_history

PICKLED = b"\x80"
"""What pickles begin with."""


class ExtraState(torch.nn.Module):
    """A module with an entry ``_extra_state``: bytes of what delayed scaling remembers, none for other recipes."""

    def get_extra_state(self) -> Tensor:
        """The histories of this module as JSON, in a tensor of bytes, as many as on no other rank.

        ``torch.distributed.checkpoint`` keeps the bytes of one rank for all, and loads no other number of them.
        """
        histories = get_amax_history(self)
        if not histories:
            return torch.empty(0, dtype=torch.uint8)
        data = json.dumps(histories).encode()
        if dist.is_available() and dist.is_initialized():
            data += b" " * ((dist.get_rank() - len(data)) % dist.get_world_size())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Go on with what :meth:`get_extra_state` returned; what TransformerEngine has pickled is not read.

        Warns if that was about delayed scaling, which then begins anew, as it does without bytes.

        Raises:
            ValueError: neither.
        """
        if isinstance(state, Tensor) and state.dtype != torch.uint8:
            raise ValueError(f"_extra_state must be bytes in a tensor of torch.uint8, got {state.dtype}")
        if state is not None and not isinstance(state, Tensor | io.BytesIO):  # older versions wrote a BytesIO
            raise ValueError(f"_extra_state must be bytes in a tensor of torch.uint8, got {shown(state)}")
        data = bytes(state.cpu().tolist()) if isinstance(state, Tensor) else b""
        is_pickled = data.startswith(PICKLED)
        try:
            histories = {} if is_pickled or not data else json.loads(data)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are
            raise ValueError(f"_extra_state is neither JSON nor a pickle, it begins with {data[:16]!r}") from error
        set_amax_history(self, histories)
        if (b"amax_history" in data and is_pickled) or isinstance(state, io.BytesIO):
            warnings.warn(
                f"{type(self).__name__}: the checkpoint's _extra_state was pickled by TransformerEngine and is not "
                "read; delayed scaling begins with a history of its own",
                stacklevel=2,
            )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take a file without the entry, such as one of ``torch.nn.Linear``, for one that remembers nothing."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        entry = f"{prefix}_extra_state"
        if entry in missing_keys:
            missing_keys.remove(entry)
