"""The outer amaxes of a model's weights in one collective, instead of one for every layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine import ops
from fp4engine.arguments import require_model
from fp4engine.formats import ScaleRule
from fp4engine.modules.gemms import Gemms, require_layers
from fp4engine.modules.shared_weight import SharedWeight, WeightAmaxes
from fp4engine.ops.reduce import share_amaxes
from fp4engine.quantizers import Quantizer
from fp4engine.state import current_state, is_recomputed


def share_weight_amaxes(model: nn.Module) -> None:
    """Find the amaxes of all weights that ranks share when a forward of ``model`` begins, and reduce them together.

    Without this, under tensor parallelism every layer reduces its weight's amax itself, in a collective per layer that
    also reduces the input's if that is shared. The bytes are the same. The amaxes hold until the forward ends, and no
    weight may be written to until then. A layer finds its own amax when it runs outside the model's forward, because a
    checkpoint recomputes it or a part of the model runs alone, and when its weight has been replaced meanwhile.

    Call it once, after ``convert`` and ``parallelize_module``. The amaxes are found in eager mode, so blocks of the
    model may be compiled, but neither the model nor its region of ``autocast`` as a whole. Layers also find their own
    amaxes where ``model`` itself enters a region with another recipe, or FSDP2 gathers their weights.

    Raises:
        ValueError: the model has no layer of fp4engine's.
    """
    require_model(model)
    hooks = _Hooks(list(require_layers(model).values()))
    model.register_forward_pre_hook(hooks.before)
    model.register_forward_hook(hooks.after, always_call=True)


class _Hooks:
    """The forward hooks of the model that has ``layers``."""

    def __init__(self, layers: list[Gemms]) -> None:
        self._layers = layers
        self._known: list[SharedWeight | None] = [None] * len(layers)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what refers to process groups, which cannot be copied."""
        return {"_layers": self._layers, "_known": [None] * len(self._layers)}

    @torch.no_grad()
    def before(self, module: nn.Module, arguments: Any) -> None:
        """Leave the amaxes of all weights with their layers."""
        if torch.compiler.is_dynamo_compiling() or is_recomputed():
            return
        state = current_state()
        together: dict[tuple[Any, ...], list[tuple[Gemms, SharedWeight]]] = {}
        for index, layer in enumerate(self._layers):
            found = self._known[index] = layer.shared_weight(state, self._known[index])
            if found is not None:
                together.setdefault((*found.groups, found.weight.device), []).append((layer, found))
        for pairs in together.values():
            parts = [found.weight.to_local() for _, found in pairs]
            amaxes = amaxes_of(parts, [found.plan.weight for _, found in pairs])
            share_amaxes(amaxes, pairs[0][1].groups)
            for (layer, found), rows in zip(pairs, amaxes.view(len(pairs), 2, -1).unbind(), strict=True):
                layer.leave_weight_amaxes(WeightAmaxes(rows, found.weight, found.found_for))

    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Take the amaxes away, since weights may change before the next forward."""
        if not torch.compiler.is_dynamo_compiling():
            for layer, known in zip(self._layers, self._known, strict=True):
                if known is not None:
                    layer.leave_weight_amaxes(None)


def amaxes_of(weights: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> Tensor:
    """FP32 [2 n, AMAX_STRIDE]: two rows for each weight begin with the outer amaxes of its casts, none negative."""
    specs = {spec for quantizer in quantizers for spec in (quantizer.rowwise_spec, quantizer.columnwise_spec)}
    if all(spec and spec.rotation is None and spec.scale_rule is not ScaleRule.ALIGNED for spec in specs):
        found = ops.largest_magnitudes([weight.resolve_neg() for weight in weights])
        return ops.packed_amaxes([found.repeat_interleave(2)])
    pairs = [quantizer.amax(weight) for weight, quantizer in zip(weights, quantizers, strict=True)]
    return ops.packed_amaxes([amax for pair in pairs for amax in pair if amax is not None])
