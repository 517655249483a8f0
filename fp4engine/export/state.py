"""The parameters and buffers of a model, by the names that its checkpoints give them."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fp4engine.arguments import require_dense
from fp4engine.checkpoint_names import Piece, checkpoint_pieces, require_like
from fp4engine.modules.adoption import adapter_names
from fp4engine.modules.sharded import is_distributed


class ModelState:
    """The model's tensors as checkpoints have them; those that a reader ties to others are left out.

    Args:
        weights: values by the names that they have in checkpoints; None takes the model's own.

    Attributes:
        pieces: ``name in checkpoints -> what it is in the model``, in the model's order.

    Raises:
        ValueError: a part of the state is no dense tensor; a tensor has no value, or is spread over processes; a
            wrapper is a part of the tensors' names; adapters of PEFT are not merged; a tensor differs from the one that
            readers would tie it to.
        NotImplementedError: transformers writes a tensor of the model in another way than in parts of its rows.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        _require_own_names(model)
        whole = model.state_dict(keep_vars=True)
        for name, tensor in whole.items():
            require_dense(f"{name!r} of the model's state", tensor)
        tied = _tied(model, whole, weights)
        self._state: dict[str, Tensor] = {name: tensor for name, tensor in whole.items() if name not in tied}
        self._weights = weights
        for name, tensor in self._state.items():
            if weights is None and tensor.is_meta:
                raise ValueError(f"{name!r} is on the meta device, without values; pass weights=")
            if is_distributed(tensor):
                raise ValueError(f"{name!r} is a DTensor; gather the model first, and export on one process")
        self.pieces = {piece.name: piece for piece in checkpoint_pieces(model, self._state)}
        self._of: dict[str, list[Piece]] = {}
        for piece in self.pieces.values():
            self._of.setdefault(piece.source, []).append(piece)
        for name in self.pieces:
            if weights is not None and name not in weights:
                raise ValueError(f"weights lacks {name!r}; it has, for example, {', '.join(list(weights)[:3])}")

    @property
    def names(self) -> list[str]:
        """Names in checkpoints."""
        return list(self.pieces)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names in ``weights`` that the model has no tensor for."""
        return tuple(name for name in self._weights or () if name not in self.pieces)

    def of(self, source: str) -> list[Piece]:
        """The pieces of one tensor of the model; none for a name that shares it with an earlier one."""
        return self._of.get(source, [])

    def owners(self, module: str) -> list[str]:
        """Modules of the model with one name each, whose tensors are those of ``module`` in checkpoints."""
        pieces = [piece for piece in self.pieces.values() if piece.module == module and piece.rows is None]
        return [piece.source.rpartition(".")[0] for piece in pieces if piece.expert is None]

    def __getitem__(self, name: str) -> Tensor:
        piece = self.pieces[name]
        own = self._state[piece.source]
        if self._weights is None:
            return piece.of(own)
        tensor = self._weights[name]
        require_like(name, tensor, piece.shape, own.dtype)
        return tensor


def _tied(model: nn.Module, state: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None) -> set[str]:
    """Names of tensors that readers tie to others, as the model of transformers says by its configuration.

    Raises:
        ValueError: such a tensor is another one than that.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    known = {name: source for name, source in tied.items() if name in state and source in state}
    values = state if weights is None else weights
    for name, source in known.items():
        if name not in values or source not in values or values[name] is values[source]:
            continue
        one, other = values[name], values[source]
        if not one.is_meta and not (one.shape == other.shape and bool((one == other).all())):
            raise ValueError(
                f"{name!r} has other values than {source!r}, and readers take the one for the other, as the model's "
                "configuration has it; set model.config.tie_word_embeddings = False, and make the model by that"
            )
    return set(known)


def _require_own_names(model: nn.Module) -> None:
    """Raise if a wrapper or an adapter, whose name servers do not know, is the model or a part of it."""
    for name, module in model.named_modules():
        *owner, last = name.split(".")
        if last == "_orig_mod":
            raise ValueError(
                f"torch.compile has wrapped {'.'.join(owner) or 'the model'}, and '_orig_mod' would be a part of its "
                "tensors' names; export the model that was compiled, or compile in place: module.compile()"
            )
        if last in ("_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
            raise ValueError(
                f"PyTorch has wrapped {'.'.join(owner) or 'the model'}, and {last!r} is a part of its modules' names; "
                "load its state_dict into a model without wrappers, and export that"
            )
        if isinstance(module, nn.DataParallel | DistributedDataParallel | AveragedModel):
            raise ValueError(f"{name or 'the model'} is a {type(module).__name__}; export what it wraps, its .module")
    if adapters := adapter_names(model):
        layer = adapters[0].rpartition(".")[0]
        raise ValueError(
            f"{layer!r} has an adapter of PEFT, which its served weight would lack; merge first, by "
            "model = model.merge_and_unload(), and before that by fp4engine.dequantize_weights(model) if weights are "
            "stored as codes"
        )
