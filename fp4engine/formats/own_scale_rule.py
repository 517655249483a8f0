"""Scale rules of one's own: a Python function of blocks, which the reference calls and no kernel covers."""

import hashlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.arguments import require_callable, shown


class UnknownScaleRule(ValueError):
    """A key names a rule that nobody has registered in this process."""


@dataclass(frozen=True)
class OwnScaleRule:
    """A rule that :func:`register_scale_rule` returned; takes the place of a ``ScaleRule`` in a ``CastSpec``.

    Attributes:
        name: as keys and labels have it.
        identity: ``"module:function#"`` and twelve hexadecimal digits of the SHA-256 of the function's source.
        function: FP32 blocks [..., n] to FP32 magnitudes [...].
    """

    name: str
    identity: str
    function: Callable[[Tensor], Tensor] = field(compare=False, repr=False)
    is_four_over_six: ClassVar[bool] = False
    is_power_of_two: ClassVar[bool] = False

    @property
    def value(self) -> str:
        """The rule's name in labels and messages."""
        return f"{self.name} (own rule, no kernel)"

    @property
    def key(self) -> str:
        """The rule in a spec's key."""
        return f"{self.name}@{self.identity.replace(':', '/')}"

    def magnitudes(self, blocks: Tensor) -> Tensor:
        """What the function says of FP32 ``blocks`` [..., n]: FP32 [...], mapped onto the spec's target.

        Raises:
            ValueError: the function returns anything else, or for a block of finite numbers, not all of them 0, a
                number that is not positive and finite.
        """
        if blocks.is_meta:  # without values, which the function may ask for: as when stored weights are read back
            return blocks.new_empty(blocks.shape[:-1])
        found: Any = self.function(blocks.clone())
        if not isinstance(found, Tensor) or found.shape != blocks.shape[:-1] or found.dtype != torch.float32:
            expected = f"an FP32 tensor {list(blocks.shape[:-1])}"
            got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else shown(found)
            raise ValueError(f"the scale rule {self.name!r} must return {expected} for {list(blocks.shape)}, got {got}")
        largest = blocks.abs().amax(-1)
        wrong = (largest > 0) & largest.isfinite() & ~((found > 0) & found.isfinite())
        if bool(wrong.any()):
            value = float(found[wrong][0])
            raise ValueError(
                f"the scale rule {self.name!r} must return positive finite numbers for blocks that are finite and not "
                f"all 0, got {value} for a block whose largest magnitude is {float(largest[wrong][0])}"
            )
        return torch.where(largest > 0, found, largest)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickles: the rule of that key, which its function's module has to register where it is read."""
        return _read, (self.key, self.function)


def _read(key: str, function: Callable[[Tensor], Tensor]) -> OwnScaleRule:
    """The rule in a pickle, whose reference to ``function`` has imported the module that registers it."""
    return scale_rule_from_key(key)


_registered: dict[str, OwnScaleRule] = {}
"""Key -> rule. A function that was changed and registered again is another rule."""


def register_scale_rule(name: str, function: Callable[[Tensor], Tensor]) -> OwnScaleRule:
    """A scale rule of one's own, for ``CastSpec(scale_rule=...)`` with block scales in E4M3, UE5M3 or FP32.

    Whatever ``function`` says of a block is mapped onto the spec's target, where the rule ``amax`` takes the largest
    magnitude; elements beyond it saturate. The reference alone calls it, on a GPU too: no kernel does.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``. Keys have it, beside the function's module, name and the hash of
            its source.
        function: FP32 blocks [..., n], rotated where the cast rotates and padded with zeros, to FP32 magnitudes [...].
            A function at the top level of a module, so that another process finds it by importing the module. What it
            calls is not part of the hash.

    Raises:
        ValueError: a name of other characters; no function, or one that has no module-level name or no source.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(f"name must be letters, digits, '.', '_' and '-', got {shown(name)}")
    require_callable("function", function)
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not inspect.isfunction(function) or "<" in str(path) or function.__closure__:
        raise ValueError(f"function must be defined by `def` at the top level of a module, got {shown(function)}")
    try:
        source = inspect.getsource(function)
    except OSError as error:
        raise ValueError(f"the source of {module}:{path}, by which a change is known, cannot be read") from error
    identity = f"{module}:{path}#{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    rule = OwnScaleRule(name, identity, function)
    return _registered.setdefault(rule.key, rule)


def scale_rule_from_key(key: str) -> OwnScaleRule:
    """The registered rule whose ``key`` this is.

    Raises:
        UnknownScaleRule: there is none, or its function has changed.
    """
    if key in _registered:
        return _registered[key]
    name, _, identity = key.partition("@")
    where, _, digest = identity.rpartition("#")
    same = [rule for rule in _registered.values() if rule.key.rpartition("#")[0] == f"{name}@{where}"]
    if same:
        raise UnknownScaleRule(
            f"the scale rule {name!r} has the source {digest}, and that of {where} is another one here: "
            f"{same[-1].identity.rpartition('#')[2]}"
        )
    raise UnknownScaleRule(
        f"the scale rule {name!r} is one of somebody's own, and nothing has registered it here: import "
        f"{where.partition('/')[0]} first, and call fp4engine.formats.register_scale_rule({name!r}, function)"
    )
