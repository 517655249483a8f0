"""``nn.Linear`` whose three GEMMs follow the recipe in force."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_bool, require_callable, require_integer, require_model, shown
from fp4engine.functional import ExecutedGemms, WeightCache
from fp4engine.functional.weight_cache import require_sealed, told_of_steps
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.model_init import store_weight
from fp4engine.modules.quantized_weight import initialize
from fp4engine.modules.recompute import computed
from fp4engine.modules.sharded import fsdp_module, is_distributed
from fp4engine.modules.te_arguments import refuse_unimplemented, te_place, warn_of_third
from fp4engine.recipe import Recipe


class Linear(Gemms, torch.nn.Linear):
    """``y = x W^T + b``; an ``nn.Linear`` in every respect outside an autocast region.

    Same constructor, same parameters, same ``state_dict`` in both directions; no buffers, no extra state.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        name: the module's name, which recipes may match; ``convert`` sets it.
        params_dtype: TransformerEngine's spelling of ``dtype``. With it, and without ``device``, parameters are
            placed as TransformerEngine places them: on the current CUDA device where there is one.
        recipe: recipe to follow where no autocast region is active; None means high precision there.
        fuse_wgrad_accumulation: wgrad adds to the buffer ``weight.main_grad`` (FP32, BF16 or FP16, shaped like the
            weight) in its epilogue, and ``weight.grad`` stays None. ``DistributedDataParallel`` reduces ``grad`` alone:
            each rank's buffer is yours to reduce.
        init_method: ``init_method(weight)`` initialises the weight, and the bias is zero; None initialises both as
            ``nn.Linear`` does.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        TypeError: an argument that neither library knows.
        ValueError: sizes that are no integers of at least 0, a ``dtype`` beside another ``params_dtype``, a
            ``params_dtype`` of no floating-point numbers or of less than 16 bits, a ``recipe`` that is none or has
            delayed scaling or a schedule in it, or a flag that is no bool.

    Attributes:
        executed: what really ran, see :class:`~fp4engine.functional.ExecutedGemms`.
    """

    init_method: Callable[[Tensor], Any] | None = None
    replaces: type[torch.nn.Linear] = torch.nn.Linear
    """The class of what this was made from: ``nn.Linear``, or a subclass that only has a constructor of its own."""
    __call__: Callable[..., Tensor]  # for type checkers: PyTorch's own says Any

    @warn_of_third
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
        params_dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        **te_arguments: Any,
    ) -> None:
        refuse_unimplemented("Linear", te_arguments)
        in_features = require_integer("in_features", in_features, 0)
        out_features = require_integer("out_features", out_features, 0)
        require_bool("bias", bias)
        if params_dtype is not None:
            if dtype is not None and dtype != params_dtype:
                raise ValueError(f"dtype and params_dtype are the same thing, got {dtype} and {params_dtype}")
            place = te_place(device, params_dtype)
            device, dtype = place["device"], place["dtype"]
        if init_method is not None:
            require_callable("init_method", init_method)
            self.init_method = init_method  # nn.Linear's constructor initialises
        torch.nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._configure(name, recipe, fuse_wgrad_accumulation)
        store_weight(self, "weight", self)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, name: str = "", recipe: Recipe | None = None) -> "Linear":
        """A Linear that shares the parameters, hooks and mode of ``module``; ``module.compile()`` is not handed on.

        Raises:
            ValueError: ``module`` is no ``nn.Linear``, or computes or has something of its own that would be lost, or
                was given an attribute by a name that this class uses.
        """
        if not isinstance(module, torch.nn.Linear):
            raise ValueError(f"module must be a torch.nn.Linear, got {shown(module)}")
        plain = next(kind for kind in (cls, Linear, torch.nn.Linear) if isinstance(module, kind))
        if lost := own_forward(module, plain) or own_attributes(module, plain):
            raise ValueError(f"module must be a plain torch.nn.Linear, got {shown(module)}: {lost}")
        require_free_names("module", module)
        new = cls.__new__(cls)
        new.__dict__.update(torch.nn.Module.__getstate__(module))  # leaves out the compiled call, which runs module
        new._configure(name, recipe, False)
        if not isinstance(module, Linear):
            new.replaces = next(kind for kind in type(module).__mro__ if not issubclass(kind, fsdp_module()))
        return new

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear`` does, or the weight by ``init_method`` and the bias to zero."""
        if self.init_method is None:
            initialize(self.weight, None, self._as_nn_linear)
        else:
            initialize(self.weight, self.bias, self.init_method)

    def _as_nn_linear(self, weight: Tensor) -> None:
        """Initialise ``weight`` and the bias as ``nn.Linear`` does."""
        parameters: Any = SimpleNamespace(weight=weight, bias=self.bias)
        torch.nn.Linear.reset_parameters(parameters)

    def weight_shape(self) -> tuple[int, ...]:
        """(N, K) of the weight, or of ``out_features`` and ``in_features`` if it is computed from other parameters."""
        weight = self._parameters.get("weight")
        return (self.out_features, self.in_features) if weight is None else tuple(weight.shape)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``input @ weight.T + bias``: [..., in_features] -> [..., out_features], in the dtype of ``input``.

        Args:
            input: FP16, BF16, FP32 or FP64, any rank of at least 1, stride and number of rows. Under
                ``torch.autocast`` it is cast first, as by ``nn.Linear``.
            is_first_microbatch: True quantizes the weight and keeps its operands, False reuses them while the weight
                is unchanged, None neither; says nothing about gradients. See also :func:`fp4engine.weight_cache`.

        Raises:
            ValueError: ``input``, ``weight`` and ``bias`` have no values on one device, do not fit each other in
                shape, or hold no floating-point numbers.
        """
        weight = self.weight if "weight" in self._parameters else computed(lambda: self.weight)
        return self.multiply(input, weight, self.bias, is_first_microbatch)


_lock = threading.Lock()
"""Held while regions of :func:`weight_cache` begin and end, which threads may do at once."""


@contextmanager
def weight_cache(model: torch.nn.Module) -> Generator[None]:
    """Region in which each module below ``model`` quantizes its weight once, e.g. around accumulation.

    An entry is dropped when its weight is written to or replaced; every entry is dropped when a ``torch.optim``
    optimizer steps and when the region ends. Cached and uncached passes give the same bytes: at each use the weight's
    bytes are compared with those that were quantized. A GPU makes that comparison after the host has gone on: a write
    that nothing else shows (through ``weight.data``, or by a fused function that is no optimizer of ``torch.optim``)
    makes its products NaN there, and the region raises when it ends. A CUDA graph quantizes weights in each replay.
    Such regions may lie within each other, and end in any order.

    A weight that FSDP2 gathers is quantized anew each time, since nothing shows that its shards were written to.

    Raises:
        ValueError: ``model`` is no module.
        RuntimeError: when the region ends, on a GPU: such a write has been made, and the weight was used afterwards.
    """
    require_model(model)
    gathered = _gathered(model)
    found = {n: m for n, m in model.named_modules() if isinstance(m, Gemms) and m not in gathered}
    layers, caches = list(found.values()), [WeightCache(name or type(layer).__name__) for name, layer in found.items()]
    with _lock:
        for layer, cache in zip(layers, caches, strict=True):
            layer._weight_caches = (*layer._weight_caches, cache)
    try:
        with told_of_steps(caches):
            yield
        require_sealed(caches)
    finally:
        with _lock:
            for layer, cache in zip(layers, caches, strict=True):
                left = vars(layer).get("_weight_caches", ())  # a module that was reverted meanwhile has none
                if cache in left:
                    layer._weight_caches = tuple(other for other in left if other is not cache)


def _gathered(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules below ``model`` whose parameters FSDP2 gathers, also while it has them gathered."""
    of_fsdp2 = fsdp_module()
    return {
        below
        for module in model.modules()
        if isinstance(module, of_fsdp2) or is_distributed(*module.parameters(recurse=False))
        for below in module.modules()
    }


def own_forward(module: torch.nn.Linear, plain: type[torch.nn.Linear] = torch.nn.Linear) -> str:
    """Why ``module`` does not compute what the class ``plain`` says; empty if it does."""
    if type(module).forward is not plain.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the object; convert before wrapping"
    return ""


def own_attributes(module: torch.nn.Linear, plain: type[torch.nn.Linear] = torch.nn.Linear) -> str:
    """What the class of ``module`` and its bases have beside the class ``plain``; empty if nothing.

    Left out are a constructor, which has run, and what ``fully_shard`` gives to a class, whose work is done by hooks.
    """
    kind, of_fsdp2 = type(module), fsdp_module()
    bases = [base for base in kind.__mro__ if base not in plain.__mro__ and not issubclass(base, of_fsdp2)]
    lost = [name for base in bases for name in vars(base) if name not in vars(_Constructed)]
    return f"{kind.__name__} has {lost[0]!r} of its own, which a swap would lose" if lost else ""


def require_free_names(name: str, module: torch.nn.Module) -> None:
    """Check that nobody gave ``module``, which is called ``name``, an attribute by a name that layers of fp4engine use.

    Raises:
        ValueError: somebody did.
    """
    if isinstance(module, Gemms):
        return
    given = {*vars(module), *module._parameters, *module._buffers, *module._modules} & _own_names()
    if isinstance(vars(module).get("executed"), ExecutedGemms):  # of a layer that an earlier convert left alone
        given.remove("executed")
    if given:
        raise ValueError(f"{name} must have no attribute {min(given)!r}, a name that fp4engine's layers use; rename it")


@cache
def _own_names() -> set[str]:
    """What a Linear has and an ``nn.Linear`` has not, but for ``init_method``, which it keeps when it is reverted."""
    ours = {*dir(Linear), *vars(Gemms())}
    return ours - {*dir(torch.nn.Linear), *vars(torch.nn.Module()), "init_method"}


class _Constructed:
    """What a class has that says nothing but how its objects are made."""

    size: int

    def __init__(self) -> None:
        self.size = 0
