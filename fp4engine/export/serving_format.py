"""The two checkpoint formats that servers read, as data: tensor names, the outer scale's direction, the configuration.

| | compressed-tensors | ModelOpt |
|---|---|---|
| codes, uint8 [N, K/2], even column in the low nibble | `weight_packed` | `weight` |
| block scales, E4M3 [N, K/16] | `weight_scale` | `weight_scale` |
| outer scale of the weight, FP32 [1] | `weight_global_scale = numerator / amax` | `weight_scale_2 = amax / numerator` |
| outer scale of the input, FP32 [1] | `input_global_scale = numerator / amax` | `input_scale = amax / numerator` |
| configuration | `quantization_config` in `config.json` | `hf_quant_config.json` |

Legend: N out_features, K in_features.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_one_of
from fp4engine.constants import BLOCK_SIZE
from fp4engine.reference.scaling import divide, encode_scale


@dataclass(frozen=True, slots=True)
class ServingFormat:
    """The names under which a format stores the tensors of an operand.

    Attributes:
        name: what users call it.
        codes, block_scales, outer_scale, input_scale: last part of the tensors' names, after the module's.
        divides: True if the outer scale is a divisor of the decoded values, False if it multiplies them.
        config_file: the file that says what is quantized.
    """

    name: str
    codes: str
    block_scales: str
    outer_scale: str
    input_scale: str
    divides: bool
    config_file: str

    @property
    def weight_parts(self) -> tuple[str, str, str]:
        """The tensors of one weight: codes, block scales, outer scale."""
        return self.codes, self.block_scales, self.outer_scale

    def outer(self, amax: Tensor, numerator: float) -> Tensor:
        """The stored outer scale, FP32 [1], of an operand with outer amax ``amax`` [1].

        It is 1 for an operand of zeros. So is a multiplier that FP32 would round to 0, since all codes are zeros then.
        """
        if self.divides:
            return encode_scale(amax, numerator)
        scale = divide(amax, numerator)
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def factor(self, outer: Tensor) -> Tensor:
        """What ``element * block scale`` is multiplied by, FP32 [1], from a stored outer scale."""
        return divide(1.0, outer) if self.divides else outer


COMPRESSED_TENSORS = ServingFormat(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    divides=True,
    config_file="config.json",
)
MODELOPT = ServingFormat(
    "modelopt",
    "weight",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    divides=False,
    config_file="hf_quant_config.json",
)
FORMATS = {form.name: form for form in (COMPRESSED_TENSORS, MODELOPT)}
"""Both by name."""

WEIGHT_ONLY, STATIC, DYNAMIC = "weight-only", "static", "dynamic"
"""How a layer's input is cast: not at all; with a calibrated outer amax; without an outer scale."""

PACKED = "nvfp4-pack-quantized"
_ALGORITHMS = {STATIC: "NVFP4", WEIGHT_ONLY: "W4A16_NVFP4"}


def serving_format(name: str) -> ServingFormat:
    """The format called ``name``.

    Raises:
        ValueError: there is none.
    """
    require_one_of("format", name, FORMATS)
    return FORMATS[name]


def compressed_tensors_config(schemes: Mapping[str, str], ignore: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a ``config.json``.

    Args:
        schemes: ``layer -> weight-only, static or dynamic``.
        ignore: names of the linear modules that stayed as they were.
    """
    kinds = sorted(set(schemes.values()))
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if len(kinds) == 1 else [name for name in schemes if schemes[name] == kind],
            "weights": _arguments(dynamic=False),
            "input_activations": None if kind == WEIGHT_ONLY else _arguments("local" if kind == STATIC else True),
            "output_activations": None,
            "format": PACKED,
        }
        for index, kind in enumerate(kinds)
    }
    return {
        "quant_method": COMPRESSED_TENSORS.name,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def modelopt_config(schemes: Mapping[str, str], ignore: Sequence[str], version: str) -> dict[str, Any]:
    """Contents of ``hf_quant_config.json``; arguments as in :func:`compressed_tensors_config`.

    Raises:
        ValueError: inputs without an outer scale, or of several kinds: the file names one algorithm.
    """
    kinds = set(schemes.values())
    if DYNAMIC in kinds:
        raise ValueError(
            "inputs='dynamic' has no place in a ModelOpt checkpoint, which stores an input scale for each layer; "
            "pass inputs=calibrate(model, batches) or inputs='high_precision'"
        )
    if len(kinds) > 1:
        layers = {kind: next(name for name in schemes if schemes[name] == kind) for kind in sorted(kinds)}
        raise ValueError(
            f"a ModelOpt checkpoint names one algorithm for all layers, and the recipe asks for several: {layers}; "
            "pass inputs='high_precision', or format='compressed-tensors'"
        )
    return {
        "producer": {"name": "fp4engine", "version": version},
        "quantization": {
            "quant_algo": _ALGORITHMS[kinds.pop()],
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(ignore),
        },
    }


def described_scheme(settings: Mapping[str, Any], form: ServingFormat, layer: str) -> str:
    """How servers cast the inputs of ``layer`` by a configuration, which has to describe its weight as NVFP4.

    Args:
        settings: section of the format's configuration file.

    Raises:
        ValueError: it describes no such weight, or an input that is cast otherwise.
    """
    if form is not COMPRESSED_TENSORS:
        if settings.get("group_size", BLOCK_SIZE) != BLOCK_SIZE:
            raise ValueError(f"group_size must be {BLOCK_SIZE}, got {settings['group_size']!r}")
        schemes = {name: scheme for scheme, name in _ALGORITHMS.items()}
        return schemes[settings["quant_algo"]]
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        names = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
        if not ("Linear" in names or is_ignored(layer, names)):
            continue
        if not _casts_as(group.get("weights"), _arguments(dynamic=False)):
            raise ValueError(
                f"it describes the weight of {layer!r} as {group.get('weights')!r:.160}, which is not NVFP4"
            )
        inputs = group.get("input_activations")
        kinds = {STATIC: _arguments("local"), DYNAMIC: _arguments(dynamic=True)}
        found = [kind for kind, arguments in kinds.items() if _casts_as(inputs, arguments)]
        if inputs is not None and not found:
            raise ValueError(f"it describes the input of {layer!r} as {inputs!r:.160}, which is not NVFP4")
        return found[0] if found else WEIGHT_ONLY
    raise ValueError(f"none of its config_groups has {layer!r} among its targets")


def _casts_as(given: Any, wanted: Mapping[str, Any]) -> bool:
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
    return isinstance(given, dict) and all(given.get(key) == wanted[key] for key in keys)


def _arguments(dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``patterns``, a configuration's list of modules, has the module ``name``; ``re:`` begins an expression.

    Raises:
        ValueError: what follows is no expression.
    """
    for pattern in patterns:
        try:
            if re.match(pattern[3:], name) if pattern.startswith("re:") else pattern == name:
                return True
        except re.error as error:
            raise ValueError(f"{pattern!r:.80} is no regular expression: {error}") from error
    return False
