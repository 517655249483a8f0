"""What TetraJet-v2 does beside its casts, as hooks of an optimizer: OsciReset and OutControl.

Late in training a weight may cross the middle between two FP4 values at every step: its cast jumps while the weight
hardly moves. :class:`OsciReset` puts such weights onto their FP4 values. A few channels of the input are far larger
than the others: :class:`OutControl` finds them early in training and multiplies them in MXFP8 from then on.

Both count the steps of one ``torch.optim`` optimizer, by its own post hooks or as they are told, change nothing of what
is multiplied until their step has come, and have a ``state_dict`` to save beside the optimizer's. They cover the layers
that the optimizer trains when they are made; a step raises once it trains others.

Source: arXiv 2510.27527; TetraJet-v2 ca5953f, ``olmo/quantization_real``.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp4engine.arguments import is_number, require_bool, require_integer, require_model, shown
from fp4engine.formats import Rotation, Signs
from fp4engine.functional import LinearPlan, linear
from fp4engine.functional.linear import require_features
from fp4engine.modules import Linear
from fp4engine.modules.adoption import require_plain_class
from fp4engine.modules.gemms import layers_by_plain_path
from fp4engine.modules.inputs import cast_by_autocast, unusable_devices
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.modules.recompute import computed
from fp4engine.modules.sharded import is_distributed
from fp4engine.ops.amax_history import optimizer_stepped
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import Casts, LinearRecipe, Recipe, zoo
from fp4engine.recipe.base import require_recipe
from fp4engine.state import in_backward
from fp4engine.steps import ends_step, hooked

__all__ = ["OsciReset", "OutControl", "optimizer_stepped", "outlier_recipe"]


class _StepHook:
    """Counts the steps of ``optimizer`` from 0, and is asked after each of them.

    Attributes:
        step: steps so far.
        layers: the modules that the hook is about, by name.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe | None, manual: bool) -> None:
        require_model(model)
        require_recipe(recipe)
        require_bool("manual", manual)
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
        optimizer = hooked(optimizer)
        kind = type(self).__name__
        if getattr(optimizer, "master_weights", False):
            raise ValueError(f"{kind} works on what the optimizer steps, and {type(optimizer).__name__} steps copies")
        self.step = 0
        self._model, self._optimizer, self._manual = model, optimizer, manual
        self._handle: RemovableHandle | None = None
        self._is_removed = False
        self.layers = self._trained_layers()
        self._known = set(self.layers.values())
        for name, layer in self.layers.items():
            weight = layer.weight
            if isinstance(weight, QuantizedWeight) or is_distributed(weight):
                raise NotImplementedError(
                    f"{kind} works on whole weights in high precision, and that of {name} is a {type(weight).__name__}"
                )
        if not self.layers:
            raise ValueError(f"{kind} found no fp4engine.Linear below the model whose weight the optimizer trains")

    def _trained_layers(self) -> dict[str, Linear]:
        """The layers below the model whose weight is a parameter of the optimizer now, by name without wrappers."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        return {
            name: module
            for name, module in layers_by_plain_path(self._model).items()
            if isinstance(module, Linear) and id(module._parameters.get("weight")) in trained  # None if it is computed
        }

    def _register(self) -> None:
        if not self._is_removed and not self._manual:
            self._handle = self._optimizer.register_step_post_hook(self._called)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for copies, without the handle, which would bring the optimizer's other hooks."""
        return {**vars(self), "_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put a copy on the copy of the optimizer, which PyTorch copies without its hooks."""
        vars(self).update(state)
        self._register()

    def _called(self, optimizer: Optimizer, *_: object) -> None:
        if ends_step(optimizer):
            self.after_step()

    def remove(self) -> None:
        """Take the hook off its optimizer for good."""
        self._is_removed = True
        if self._handle is not None:
            self._handle.remove()

    def after_step(self) -> None:
        """Count a step of the optimizer, and do what is due after it.

        The optimizer calls this after each of its steps, unless the hook is ``manual``. A CUDA graph of a step runs no
        Python when it is replayed: call this after each replay.

        Raises:
            RuntimeError: it is called while a CUDA graph is captured, or after :meth:`remove`; its layers have left the
                model; the optimizer has begun to train others, as ``optimizer.add_param_group`` makes it; or, where
                :class:`OsciReset` has a window open, no longer trains the weight of one.
        """
        if self._is_removed:
            raise RuntimeError(f"this {type(self).__name__} was taken off by remove(); make a new one")
        on_cuda = any(layer.weight.is_cuda for layer in self.layers.values())
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a replayed CUDA graph runs no {type(self).__name__}: make it with manual=True, and call its "
                "after_step() after each replay"
            )
        present = {id(module) for module in self._model.modules()}
        gone = [name for name, layer in self.layers.items() if id(layer) not in present]
        if gone:
            raise RuntimeError(
                f"{type(self).__name__}'s layers {', '.join(gone)} are no longer in the model, as after "
                "fp4engine.revert; call the hook's remove() before they are replaced, and make a new one after"
            )
        trained = self._trained_layers()
        later = [name for name, layer in trained.items() if layer not in self._known]
        if later:
            raise RuntimeError(
                f"the optimizer trains {', '.join(later)} only since {type(self).__name__} was made, as after "
                "add_param_group; call the hook's remove() before such layers are added, and make a new one after"
            )
        with torch.no_grad():
            self._stepped(self.step, set(trained.values()))
        self.step += 1

    def _stepped(self, index: int, trained: Container[Linear]) -> None:
        """Do what is due after step ``index`` of the optimizer, which trains the weights of the layers ``trained``."""
        raise NotImplementedError

    def _require_own(self, state_dict: Any, **fits: Callable[[Linear, Sequence[Tensor]], bool]) -> int:
        """The step of a ``state_dict``. What is not that of these layers is refused.

        Args:
            fits: by key, whether the tensors that are kept of a layer can be that layer's.

        Raises:
            ValueError: another form, or other layers.
        """
        kind = type(self).__name__
        if (
            not isinstance(state_dict, dict)
            or set(state_dict) != {"step", *fits}
            or not all(isinstance(state_dict[key], dict) for key in fits)
        ):
            raise ValueError(f"state_dict must be what {kind}.state_dict returned, got {shown(state_dict)}")
        step = require_integer("state_dict['step']", state_dict["step"], 0)
        for key, fit in fits.items():
            kept = state_dict[key]
            for name, tensors in kept.items():
                are_tensors = isinstance(tensors, tuple | list) and all(isinstance(t, Tensor) for t in tensors)
                if name not in self.layers or not are_tensors or not fit(self.layers[name], tensors):
                    got = f"shapes {[tuple(t.shape) for t in tensors]}" if are_tensors else shown(tensors)
                    raise ValueError(f"{kind}'s {key} of {name} fit no layer of this model, got {got}")
            missing = [name for name in self.layers if name not in kept]
            if kept and missing:
                raise ValueError(
                    f"{kind}'s {key} are of some layers only, and those of {', '.join(missing)} are missing"
                )
        return step


class Oscillation(NamedTuple):
    """What is known of a weight within a window, each FP32 [N, K].

    Attributes:
        previous: the weight after the last step.
        moved: sum of ``|w_t - w_(t-1)|``; moved_quantized: of ``|Q(w_t) - Q(w_(t-1))|``.
    """

    previous: Tensor
    moved: Tensor
    moved_quantized: Tensor


class OsciReset(_StepHook):
    """Sets weights that oscillate to what their cast decodes to.

    Every ``period`` steps a window opens. It adds up how far each element moves in ``window`` steps, and how far its
    quantized value does. After one more step ``w = Q(w)`` where the second is ``threshold`` times the first or more.

    It covers every ``fp4engine.Linear`` whose weight ``optimizer`` trains and whose recipe casts it in fprop; of a
    layer that :class:`OutControl` has split, the channels that this recipe still casts.

    Args:
        recipe: by which the model is trained; None means what each module follows outside autocast regions.
        start: no window opens before this step; TetraJet-v2 starts at 64% to 69% of its runs.
        period, window, threshold: the published runs take 200 or 400, 50 and 8; the code's own default is 16.
        manual: whether you call :meth:`after_step` after each of the optimizer's steps, as where a CUDA graph replays
            them. Otherwise the optimizer does.

    Attributes:
        reset_share: share of the elements, of these channels, that the latest reset changed; None before the first.

    Raises:
        ValueError: settings that leave no window; no such layer; a cast of weights that draws random bits, rotates or
            remembers, for then there is no ``Q(w)`` to return to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe | None = None,
        *,
        start: int = 0,
        period: int = 200,
        window: int = 50,
        threshold: float = 8.0,
        manual: bool = False,
    ) -> None:
        start, window = require_integer("start", start, 0), require_integer("window", window, 1)
        period = require_integer("period", period, 3)
        if window > period - 2:
            raise ValueError(f"window must be at most period - 2, got window={window} and period={period}")
        if not (is_number(threshold) and 0 < threshold < math.inf):
            raise ValueError(f"threshold must be a positive finite number, got {threshold!r}")
        super().__init__(model, optimizer, recipe, manual)
        self.start, self.period, self.window, self.threshold = start, period, window, threshold
        self.reset_share: float | None = None
        found = {name: _weight_cast(name, layer, recipe) for name, layer in self.layers.items()}
        self._casts = {name: quantizer for name, quantizer in found.items() if quantizer is not None}
        if not self._casts:
            raise ValueError("OsciReset found no layer whose weight is cast in fprop; give it the recipe")
        self.layers = {name: self.layers[name] for name in self._casts}
        self._oscillations: dict[str, Oscillation] = {}
        self._register()

    def _stepped(self, index: int, trained: Container[Linear]) -> None:
        place = index % self.period
        opens = index >= self.start and place == 0
        if opens or self._oscillations:
            self._require_all(trained)
        if opens:
            for name in self._casts:
                weight = self.layers[name].weight.detach()
                moved = torch.zeros_like(weight, dtype=torch.float32)
                self._oscillations[name] = Oscillation(weight.clone(), moved, moved)
        elif self._oscillations and place <= self.window:
            self._oscillations = {name: self._moved(name, known) for name, known in self._oscillations.items()}
        elif self._oscillations:
            self._reset()

    def _require_all(self, trained: Container[Linear]) -> None:
        """Refuse a layer that is not among ``trained`` any more: what is written to its weight would be lost."""
        lost = [name or "the model itself" for name, layer in self.layers.items() if layer not in trained]
        if lost:
            raise RuntimeError(
                f"the optimizer no longer trains the weight of {', '.join(lost)}, which was replaced or parametrized "
                "since, as by load_state_dict(assign=True); call OsciReset's remove(), and make a new one with an "
                "optimizer of the weights that there are now"
            )

    def _channels(self, name: str) -> Tensor | None:
        """The channels that the recipe casts, where OutControl has taken the others from it; None for all."""
        layer = self.layers[name]
        return layer.channels.others if isinstance(layer, _Controlled) and layer.channels is not None else None

    def _quantized(self, name: str, weight: Tensor) -> Tensor:
        """``Q(w)``, FP32; 0, which never jumps, in channels that the recipe does not cast."""
        channels = self._channels(name)
        cast = weight if channels is None else weight.index_select(1, channels)
        rowwise = self._casts[name].quantize(cast, columnwise=False).rowwise
        assert rowwise is not None
        values = rowwise.dequantize(torch.float32)
        if channels is None:
            return values
        return torch.zeros_like(weight, dtype=torch.float32).index_copy_(1, channels, values)

    def _moved(self, name: str, known: Oscillation) -> Oscillation:
        weight = self.layers[name].weight.detach()
        step = (weight.float() - known.previous.float()).abs()
        jump = (self._quantized(name, weight) - self._quantized(name, known.previous)).abs()
        return Oscillation(weight.clone(), known.moved + step, known.moved_quantized + jump)

    def _reset(self) -> None:
        changed = elements = 0
        sharing: dict[Tensor, list[str]] = {}
        for name in self._oscillations:
            sharing.setdefault(self.layers[name].weight, []).append(name)
        for weight, names in sharing.items():
            stepped = weight.detach().clone()  # each layer casts this, and not what another has reset
            for name in names:
                known = self._oscillations[name]
                ratio = torch.where(known.moved == 0, 0.0, known.moved_quantized / known.moved)
                oscillates = ratio >= self.threshold
                channels = self._channels(name)
                if channels is not None:  # OutControl may have taken the others within the window, when some had jumped
                    oscillates &= torch.zeros_like(oscillates).index_fill_(1, channels, True)
                weight.copy_(torch.where(oscillates, self._quantized(name, stepped).to(weight.dtype), weight))
                changed += int(oscillates.sum())
                elements += weight.numel() if channels is None else len(weight) * len(channels)
        self.reset_share = changed / max(elements, 1)
        self._oscillations = {}

    def state_dict(self) -> dict[str, Any]:
        """``{"step": ..., "oscillations": {layer: (previous, moved, moved_quantized)}}``, empty between windows."""
        return {"step": self.step, "oscillations": {name: tuple(known) for name, known in self._oscillations.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: another form, or other layers.
        """

        def fits(layer: Linear, kept: Sequence[Tensor]) -> bool:
            return len(kept) == 3 and all(t.is_floating_point() and t.shape == layer.weight.shape for t in kept)

        self.step = self._require_own(state_dict, oscillations=fits)
        self._oscillations = {
            name: Oscillation(*(tensor.to(self.layers[name].weight.device, copy=True) for tensor in tensors))
            for name, tensors in state_dict["oscillations"].items()
        }


def _weight_cast(name: str, layer: Linear, recipe: Recipe | None) -> Quantizer | None:
    """What casts the weight in fprop; None for high precision."""
    recipe = layer.recipe if recipe is None else recipe
    if recipe is None:
        return None
    quantizer = layer.plan_by(recipe).weight
    spec = quantizer.rowwise_spec
    if spec is None:
        return None
    if quantizer.is_stateful or not quantizer.only_casts or spec.is_stochastic or spec.rotation is not None:
        raise ValueError(
            f"OsciReset returns weights to what their cast decodes to, and the one of {name} ({spec.label}) draws "
            "random bits, rotates, remembers or is not a cast alone"
        )
    return quantizer


class _Channels(NamedTuple):
    """Indices of a layer's channels, int64.

    Attributes:
        outlying, others: by falling norm; together all K of them.
        places: [K], where each channel is in ``outlying`` followed by ``others``.
    """

    outlying: Tensor
    others: Tensor
    places: Tensor

    @staticmethod
    def of(outlying: Tensor, others: Tensor) -> "_Channels":
        return _Channels(outlying, others, torch.cat([outlying, others]).argsort())

    def split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """``(tensor[..., outlying], tensor[..., others])``."""
        return _Split.apply(tensor, *self)


class _Split(torch.autograd.Function):
    """:meth:`_Channels.split`, whose gradients are gathered by ``places``.

    Those of ``index_select`` would be added up by ``index_add``, which does not know that no two indices are equal.
    PyTorch's deterministic algorithms sort the indices first, by which a step of a GPT of 3M took three times as long.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, outlying: Tensor, others: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        return tensor.index_select(-1, outlying), tensor.index_select(-1, others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return torch.cat(grads, -1).index_select(-1, places), None, None, None


class _Controlled(Linear):
    """A Linear that OutControl has taken over.

    Attributes:
        norms: FP32 [K] that the norms of the input's channels are added to, or None.
        channels: those that are multiplied apart, and the others; or None.
        outliers: how the outlying channels are multiplied.
    """

    norms: Tensor | None
    channels: _Channels | None
    outliers: LinearPlan

    @property
    def unseen(self) -> str:
        """Why what it multiplies cannot be recorded; empty if it can."""
        return "" if self.channels is None else "OutControl splits its channels, and multiplies each part by itself"

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        state = self._state_in_force()
        plan = None if self.channels is None else self._plan_under(state, self.weight)
        if self.channels is None or plan is None or plan.is_identity:
            output = super().forward(input, is_first_microbatch)
            if self.norms is not None and self.training and not in_backward():  # checkpointing repeats forwards
                self.norms += input.detach().reshape(-1, self.in_features).float().norm(dim=0)
            return output
        channels, weight = self.channels, computed(lambda: self.weight)
        if is_distributed(input, weight, self.bias):
            raise NotImplementedError(f"{self.name}: OutControl splits whole matrices, not DTensors")
        if getattr(input, "device", None) != weight.device:
            raise unusable_devices(input, weight)
        require_features(input, weight)  # or channels beyond the weight's would be left out
        w_outlying, w_others = computed(lambda: channels.split(weight))
        x_outlying, x_others = channels.split(cast_by_autocast(input))
        return self.multiply(x_others, w_others, self.bias) + linear(
            x_outlying,
            w_outlying,
            None,
            self.outliers,
            executed=self.executed,
            shards=self._shards(x_outlying, weight, self.outliers, state),
        )


def outlier_recipe() -> LinearRecipe:
    """Casts of the outlying channels in TetraJet-v2: fprop and wgrad in MXFP8, dgrad in the NVFP4 of all channels."""
    stochastic = zoo.TETRAJET_STOCHASTIC.replace(rotation=Rotation(16, Signs.DGRAD))
    return LinearRecipe(
        input=zoo.from_forward(zoo.MXFP8, zoo.MXFP8),
        weight=zoo.from_forward(zoo.MXFP8, stochastic),
        grad_output=Casts(stochastic, zoo.MXFP8),
    )


class OutControl(_StepHook):
    """Multiplies the channels of the input with the largest norms by a recipe of their own.

    From step ``start`` on, each layer adds up the norms of its input's channels over every forward in train mode;
    ``steps`` steps later it chooses. From then on ``y = x[others] W[:, others]^T + b + x[outlying] W[:, outlying]^T``,
    each term rounded to the output's dtype, the first by the recipe in force and the second by ``recipe``. Nothing is
    split where no recipe is in force, or where that recipe leaves all six operands of the layer in high precision.
    ``inspect.record`` says of a layer that is split that it cannot see it.

    It covers every ``fp4engine.Linear`` whose weight ``optimizer`` trains. The modules stay the same objects, and their
    ``state_dict`` is what it was: the chosen channels are in the hook's.

    Args:
        recipe: of the outlying channels; None means :func:`outlier_recipe`.
        start, steps: when norms are recorded.
        share: of the channels, a whole number of them that is rounded up to a ``multiple`` (tensor cores like 128).
        group: process group of the ranks that hold copies of these weights. Their norms are added up before they
            choose, so that all choose the same channels; until then each rank's state has the norms of its own inputs.
            None only where there is one rank.
        manual: as of :class:`OsciReset`. A CUDA graph holds what layers do when it is captured: capture the step anew
            after steps ``start`` and ``start + steps``.

    Raises:
        ValueError: settings that choose no channel or all of them; no such layer, or one that adds to ``main_grad``; a
            recipe with delayed scaling; several ranks and no ``group``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe | None = None,
        *,
        start: int = 501,
        steps: int = 50,
        share: float = 0.1,
        multiple: int = 128,
        group: Any = None,
        manual: bool = False,
    ) -> None:
        start, steps = require_integer("start", start, 0), require_integer("steps", steps, 1)
        multiple = require_integer("multiple", multiple, 1)
        if not (is_number(share) and 0 < share < 1):
            raise ValueError(f"share must be in (0, 1), got {share!r}")
        _require_group(group)
        super().__init__(model, optimizer, recipe, manual)
        self.group = group
        self.start, self.steps, self.share, self.multiple = start, steps, share, multiple
        for name, layer in self.layers.items():
            wrong = ""
            if not 0 < self._count(layer) < layer.in_features:
                wrong = f"has {layer.in_features} channels, of which {self._count(layer)} would be chosen"
            elif layer.fuse_wgrad_accumulation:
                wrong = "adds its weight's gradient to main_grad"
            elif isinstance(layer, _Controlled):
                wrong = "is split by another OutControl, or is a copy of a layer that is"
            elif type(layer) is not Linear:
                wrong = f"is a {type(layer).__name__}"
            if wrong:
                raise ValueError(f"OutControl splits the channels of every fp4engine.Linear, and {name} {wrong}")
        recipe = outlier_recipe() if recipe is None else recipe
        plans = {name: layer.plan_by(recipe) for name, layer in self.layers.items()}
        if any(plan.is_stateful for plan in plans.values()):
            raise ValueError(
                f"recipe must not scale by earlier steps, for outlying channels have no history: {recipe!r}"
            )
        self._controlled: dict[str, _Controlled] = {}
        for name, layer in self.layers.items():
            layer.__class__ = _Controlled
            assert isinstance(layer, _Controlled)
            layer.norms = layer.channels = None
            layer.outliers = plans[name]
            self._controlled[name] = layer
        self._register()

    def _count(self, layer: Linear) -> int:
        """How many channels of a layer are outlying."""
        wanted = -(-int(layer.in_features * self.share) // self.multiple) * self.multiple
        return min(layer.in_features // self.multiple * self.multiple, wanted)

    def remove(self) -> None:
        """Take the hook off its optimizer, and give the layers back as they were.

        Raises:
            ValueError: a layer was parametrized since; nothing is changed then.
        """
        for name, layer in self._controlled.items():
            require_plain_class(name, layer, "remove()")
        super().remove()
        for name, layer in self._controlled.items():
            del layer.norms, layer.channels, layer.outliers
            self.layers[name].__class__ = Linear
        self._controlled = {}

    def _stepped(self, index: int, trained: Container[Linear]) -> None:
        for name, layer in self._controlled.items():
            if index == self.start:
                layer.norms = torch.zeros(layer.in_features, dtype=torch.float32, device=layer.weight.device)
            elif index == self.start + self.steps and layer.norms is not None:
                if self.group is not None:
                    dist.all_reduce(layer.norms, group=self.group)
                if not (layer.norms.isfinite().all() and layer.norms.any()):
                    raise RuntimeError(
                        f"OutControl cannot tell which channels of {name!r} are outlying: it saw no forward in train "
                        f"mode with numbers other than 0 between steps {self.start} and {index}, or NaN or infinity"
                    )
                order = layer.norms.argsort(descending=True, stable=True)
                layer.channels = _Channels.of(order[: self._count(layer)], order[self._count(layer) :])
                layer.norms = None

    def state_dict(self) -> dict[str, Any]:
        """``{"step": ..., "norms": {layer: (norms,)}, "channels": {layer: (outlying, others)}}``."""
        layers = self._controlled.items()
        return {
            "step": self.step,
            "norms": {name: (layer.norms.clone(),) for name, layer in layers if layer.norms is not None},
            "channels": {name: tuple(layer.channels[:2]) for name, layer in layers if layer.channels is not None},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: another form, other layers, or a state of a later step without channels.
        """

        def fits_norms(layer: Linear, kept: Sequence[Tensor]) -> bool:
            return len(kept) == 1 and kept[0].is_floating_point() and kept[0].shape == (layer.in_features,)

        def fits_channels(layer: Linear, kept: Sequence[Tensor]) -> bool:
            if len(kept) != 2 or not all(t.dtype == torch.int64 and t.ndim == 1 and t.numel() for t in kept):
                return False
            return torch.cat([t.cpu() for t in kept]).sort().values.tolist() == list(range(layer.in_features))

        step = self._require_own(state_dict, norms=fits_norms, channels=fits_channels)
        chooses = self.start + self.steps
        if step > (chooses if state_dict["norms"] else self.start) and self._controlled and not state_dict["channels"]:
            verb = "chosen" if state_dict["norms"] else "looked at"
            raise ValueError(
                f"the state is of step {step}, when no channels had been {verb}, and this hook looks at them from step "
                f"{self.start} on and chooses after step {chooses}: it would never choose any; give it a start of at "
                f"least {step}, or the settings of the hook that the state is of"
            )
        self.step = step
        for name, layer in self._controlled.items():
            norms, channels = state_dict["norms"].get(name), state_dict["channels"].get(name)
            device = layer.weight.device
            layer.norms = None if norms is None else norms[0].to(device, copy=True)
            layer.channels = None if channels is None else _Channels.of(*(part.to(device) for part in channels))


def _require_group(group: Any) -> None:
    """Accept a process group, and None where there is one rank."""
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "group must be the process group of the ranks that hold copies of these weights (dist.group.WORLD "
                "under data parallelism alone): without it each rank would choose channels of its own"
            )
    elif not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a torch.distributed process group or None, got {shown(group)}")
