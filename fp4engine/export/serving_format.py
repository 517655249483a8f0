"""The two checkpoint formats that servers read, as data: forms of weights, tensor names, the configuration.

| | compressed-tensors | ModelOpt |
|---|---|---|
| NVFP4: codes uint8 [N, K/2], even column in the low nibble | `weight_packed` | `weight` |
| block scales E4M3 [N, K/16] | `weight_scale` | `weight_scale` |
| outer scale of the weight, FP32 [1] | `weight_global_scale = numerator / amax` | `weight_scale_2 = amax / numerator` |
| outer scale of the input, FP32 [1] | `input_global_scale = numerator / amax` | `input_scale = amax / numerator` |
| MXFP4: codes uint8 [N, K/2], E8M0 scales uint8 [N, K/32] | `weight_packed`, `weight_scale` | - |
| MXFP8: E4M3 [N, K], E8M0 scales uint8 [N, K/32] | `weight`, `weight_scale` | the same |
| FP8: E4M3 [N, K], `amax / numerator` FP32 [1]; of the input | `weight`, `weight_scale`; `input_scale` | the same |
| FP8 in 128x128 blocks: E4M3 [N, K], FP32 [N/128, K/128] | `weight`, `weight_scale` | - |
| configuration | `quantization_config` in `config.json` | `hf_quant_config.json` |

Legend: N out_features, K in_features.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.arguments import require_one_of
from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import E2M1, E4M3, E8M0, FP32, CastSpec, Correction, Outer, ScaleRule, fp8, fp8_block, mx
from fp4engine.reference.scaling import divide, encode_scale

WEIGHT_ONLY, STATIC, DYNAMIC = "weight-only", "static", "dynamic"
"""How a layer's input is cast: not at all; by a stored outer scale; by what it holds alone."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One way to store a weight [N, K].

    Attributes:
        name: what users read.
        spec: decodes what is stored, and says how inputs are cast beside it.
        arguments: how weights are quantized, in compressed-tensors' words.
        inputs: ``how inputs are cast -> arguments`` of the input; those that are never stored have none.
        algorithms: ``how inputs are cast -> name of that in ModelOpt``; empty where ModelOpt has no such form.
    """

    name: str
    spec: CastSpec
    arguments: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    algorithms: dict[str, str]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def has_outer_scale(self) -> bool:
        return self.spec.outer is Outer.TENSOR

    @property
    def has_block_scales(self) -> bool:
        return self.spec.block[1] > 0

    @property
    def col_multiple(self) -> int:
        """K is a multiple of this."""
        return max(self.spec.block[1], 1)

    def described(self, rows: int, cols: int) -> list[tuple[str, tuple[int, ...]]]:
        """Safetensors' dtype and the shape of codes and block scales."""
        packed = self.spec.element.storage_bits == 4
        found: list[tuple[str, tuple[int, ...]]] = [("U8", (rows, cols // 2)) if packed else ("F8_E4M3", (rows, cols))]
        if self.has_block_scales:
            dtype = {E4M3: "F8_E4M3", E8M0: "U8", FP32: "F32"}[self.spec.scale]
            found.append((dtype, (-(-rows // self.spec.block[0]), cols // self.spec.block[1])))
        return found

    def stored(self, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, ...]:
        """Codes and block scales as files have them, of an operand, which repeats block scales in each row."""
        if self.spec.element.storage_bits == 8:
            codes = codes.view(torch.float8_e4m3fn)
        if not self.has_block_scales:
            return (codes,)
        if self.spec.scale == FP32:
            return codes, scale_inv[:: self.spec.block[0]].float()
        return codes, scale_inv.view(torch.uint8) if self.spec.scale == E8M0 else scale_inv

    def operand(self, codes: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and block scales of an operand, of what files have: the inverse of :meth:`stored`."""
        if scales is None:
            scales = torch.empty((codes.shape[0], 0), dtype=torch.float32)
        elif self.spec.scale == FP32:
            scales = scales.repeat_interleave(self.spec.block[0], dim=0)[: codes.shape[0]]
        elif self.spec.scale == E8M0:
            scales = scales.view(torch.float8_e8m0fnu)
        return codes.view(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor | None = None) -> Tensor:
        """``element * block scale`` FP32 [N, K] of what files have."""
        return reference.decode(*self.operand(codes, scales), self.spec)

    def cols(self, codes: Tensor) -> int:
        """K of codes [N, ...]."""
        return codes.shape[1] * 8 // self.spec.element.storage_bits


def _arguments(num_bits: int, strategy: str, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        **{key: value for key, value in more.items() if value is not None},
    }


def _blocks(num_bits: int, size: int, dynamic: bool | str = False) -> dict[str, Any]:
    dtype = "torch.float8_e4m3fn" if size == BLOCK_SIZE else "torch.uint8"
    strategy = "tensor_group" if size == BLOCK_SIZE else "group"
    return _arguments(num_bits, strategy, dynamic, group_size=size, scale_dtype=dtype, zp_dtype=dtype)


NVFP4 = WeightForm(
    "NVFP4",
    CastSpec(),
    _blocks(4, BLOCK_SIZE),
    {STATIC: _blocks(4, BLOCK_SIZE, "local"), DYNAMIC: _blocks(4, BLOCK_SIZE, True)},
    {STATIC: "NVFP4", WEIGHT_ONLY: "W4A16_NVFP4"},
)
MXFP4 = WeightForm("MXFP4", mx(E2M1), _blocks(4, 32), {DYNAMIC: _blocks(4, 32, True)}, {})
MXFP8 = WeightForm(
    "MXFP8", mx(E4M3, ScaleRule.TOPBINADE), _blocks(8, 32), {DYNAMIC: _blocks(8, 32, True)}, {DYNAMIC: "MXFP8"}
)
FP8 = WeightForm(
    "FP8",
    fp8(E4M3),
    _arguments(8, "tensor"),
    {STATIC: _arguments(8, "tensor"), DYNAMIC: _arguments(8, "token", True)},
    {STATIC: "FP8"},
)
FP8_BLOCKS = WeightForm(
    "FP8 128x128",
    fp8_block(E4M3, 128, power_of_two=False),
    _arguments(8, "block", block_structure=[128, 128]),
    {DYNAMIC: _arguments(8, "group", True, group_size=128)},
    {},
)
FORMS = (NVFP4, MXFP4, MXFP8, FP8, FP8_BLOCKS)


def form_of(spec: CastSpec) -> WeightForm | str:
    """The form that holds the operands of ``spec``, or why none does."""
    rows, cols = spec.block
    form: WeightForm | None = None
    if spec.element == E2M1 and spec.scale == E4M3 and cols == BLOCK_SIZE:
        form = NVFP4
    elif spec.element in (E2M1, E4M3) and spec.scale == E8M0 and cols == 32:
        form = MXFP4 if spec.element == E2M1 else MXFP8
    elif spec.element == E4M3 and spec.scale in (FP32, E8M0) and spec.block in ((0, 0), (128, 128)):
        form = FP8_BLOCKS if rows else FP8
    if form is None:
        return "its elements, scales or blocks are none that servers read"
    if spec.outer is not form.spec.outer:
        return f"its outer scale is by {spec.outer.value}, and {form.name}'s is by {form.spec.outer.value}"
    if spec.outer is Outer.NONE and spec.constant_amax != spec.numerator:
        return "its elements are decoded by a factor of their own"
    if spec.rotation is not None:
        return "it is rotated"
    if spec.is_stochastic:
        return "its codes are drawn anew in each forward pass"
    if spec.correction is not Correction.NONE:
        return "its scales are corrected for shrinkage"
    return form


@dataclass(frozen=True, slots=True)
class ServingFormat:
    """The names under which a format stores the tensors of an operand.

    Attributes:
        name: what users call it.
        names: ``form -> last parts of the names`` of codes, block scales, outer scale and the input's outer scale;
            None for what the form does not have.
        config_file: the file that says what is quantized.
        caches: names of the scales of cached keys and values, FP32 [1], ``amax / 448``, after the attention's.
        cache_formats: formats in which keys and values are cached.
    """

    name: str
    names: dict[WeightForm, tuple[str | None, ...]]
    config_file: str
    caches: tuple[str, str]
    cache_formats: tuple[str, ...]

    def parts(self, form: WeightForm) -> tuple[str, ...]:
        """The tensors of one weight: codes, block scales, outer scale, as far as the form has them."""
        return tuple(name for name in self.names[form][:3] if name is not None)

    def input_scale(self, form: WeightForm) -> str | None:
        """The tensor by which inputs are scaled."""
        return self.names[form][3]

    def divides(self, form: WeightForm) -> bool:
        """True if a stored outer scale is a divisor of decoded values, False if it multiplies them."""
        return self is COMPRESSED_TENSORS and form is NVFP4

    def outer(self, form: WeightForm, amax: Tensor, numerator: float) -> Tensor:
        """The stored outer scale, FP32 [1], of an operand with outer amax ``amax`` [1].

        It is 1 for an operand of zeros. So is a multiplier that FP32 would round to 0, since all codes are zeros then.
        """
        if self.divides(form):
            return encode_scale(amax, numerator)
        scale = divide(amax, numerator)
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def factor(self, form: WeightForm, outer: Tensor) -> Tensor:
        """What ``element * block scale`` is multiplied by, FP32 [1], from a stored outer scale."""
        return divide(1.0, outer) if self.divides(form) else outer


_EIGHT_BITS = {MXFP8: ("weight", "weight_scale", None, None), FP8: ("weight", None, "weight_scale", "input_scale")}
COMPRESSED_TENSORS = ServingFormat(
    "compressed-tensors",
    {
        NVFP4: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
        MXFP4: ("weight_packed", "weight_scale", None, None),
        FP8_BLOCKS: ("weight", "weight_scale", None, None),
        **_EIGHT_BITS,
    },
    "config.json",
    ("k_scale", "v_scale"),
    ("fp8",),
)
MODELOPT = ServingFormat(
    "modelopt",
    {NVFP4: ("weight", "weight_scale", "weight_scale_2", "input_scale"), **_EIGHT_BITS},
    "hf_quant_config.json",
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("fp8", "nvfp4"),
)
FORMATS = {form.name: form for form in (COMPRESSED_TENSORS, MODELOPT)}
"""Both by name."""

_PACKED = {NVFP4: "nvfp4-pack-quantized", MXFP4: "mxfp4-pack-quantized", MXFP8: "mxfp8-quantized"}
_MIXED = "mixed-precision"

Kind = tuple[WeightForm, str]
"""The form of a weight, and how its inputs are cast."""


def serving_format(name: str) -> ServingFormat:
    """The format called ``name``.

    Raises:
        ValueError: there is none.
    """
    require_one_of("format", name, FORMATS)
    return FORMATS[name]


def compression_format(kind: Kind) -> str:
    """What compressed-tensors calls the way in which weights of that kind are stored."""
    form, inputs = kind
    return _PACKED.get(form) or ("naive-quantized" if inputs == WEIGHT_ONLY else "float-quantized")


def compressed_tensors_config(
    kinds: Mapping[str, Kind], ignore: Sequence[str], kv_cache: str | None, dequantize: bool
) -> dict[str, Any]:
    """``quantization_config`` of a ``config.json``.

    Args:
        kinds: by the names of layers.
        ignore: names of the linear modules that stayed as they were.
        kv_cache: what keys and values are cached in, by stored scales; None leaves that to servers.
        dequantize: whether transformers has to decode weights as it loads them.
    """
    found = list(dict.fromkeys(kinds.values()))
    several, formats = len(found) > 1, {compression_format(kind) for kind in found}
    heads = [name for name in kinds if name.rpartition(".")[2] == "lm_head"]  # of vLLM's modules alone no Linear
    groups = {
        f"group_{index}": {
            "targets": _patterns([name for name in kinds if kinds[name] == kind], [*kinds, *ignore])
            if several
            else ["Linear", *heads],
            "weights": kind[0].arguments,
            "input_activations": kind[0].inputs.get(kind[1]),
            "output_activations": None,
            "format": compression_format(kind),
        }
        for index, kind in enumerate(found)
    }
    return {
        "quant_method": COMPRESSED_TENSORS.name,
        "format": _MIXED if len(formats) > 1 else formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns(ignore, [*kinds, *ignore]),
        "kv_cache_scheme": _arguments(8, "tensor") if kv_cache else None,
        **({"dequantize": True} if dequantize else {}),
    }


def modelopt_config(
    kinds: Mapping[str, Kind], ignore: Sequence[str], kv_cache: str | None, version: str
) -> dict[str, Any]:
    """Contents of ``hf_quant_config.json``; arguments as in :func:`compressed_tensors_config`.

    Raises:
        ValueError: a layer of a form, or with inputs, that ModelOpt has no algorithm for.
    """
    algorithms: dict[str, str] = {}
    for name, (form, inputs) in kinds.items():
        if inputs not in form.algorithms:
            allowed = ", ".join(f"{form.name} with inputs {how}" for form in FORMS for how in form.algorithms)
            raise ValueError(
                f"{name!r} would be {form.name} with inputs {inputs}, which ModelOpt has no name for; it has "
                f"{allowed}: pass other inputs (--inputs), or format='compressed-tensors'"
            )
        algorithms[name] = form.algorithms[inputs]
    settings: dict[str, Any] = {
        "quant_algo": next(iter(algorithms.values())),
        "kv_cache_quant_algo": kv_cache and kv_cache.upper(),
    }
    if len(set(algorithms.values())) > 1:
        settings["quant_algo"] = "MIXED_PRECISION"
        settings["quantized_layers"] = {
            name: {"quant_algo": algorithm, **_group_size(algorithm)} for name, algorithm in algorithms.items()
        }
    else:
        settings |= _group_size(settings["quant_algo"])
    settings["exclude_modules"] = _patterns(ignore, [*kinds, *ignore], is_expression=False)
    return {"producer": {"name": "fp4engine", "version": version}, "quantization": settings}


def _group_size(algorithm: str) -> dict[str, int]:
    form = next(form for form in FORMS if algorithm in form.algorithms.values())
    return {"group_size": form.spec.block[1]} if form.has_block_scales else {}


_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.\d+\.(?P<part>\w+)")


def expert_stack(name: str) -> tuple[str, str] | None:
    """``(name of the stack, last part)`` of an expert's module; None if it is none."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else (found["stack"], found["part"])


def _patterns(names: Sequence[str], everything: Iterable[str], is_expression: bool = True) -> list[str]:
    """``names``, where one pattern stands for a stack of experts: servers look for experts by names of their own.

    Args:
        everything: all modules that multiply; a pattern covers none of them that is not in ``names``.
    """
    chosen = set(names)
    parts: dict[str, dict[str, bool]] = {}
    for name in everything:
        if stack := expert_stack(name):
            parts.setdefault(stack[0], {})[stack[1]] = name in chosen
    patterns: dict[str, None] = {}
    for name in names:
        stack = expert_stack(name)
        if stack is None:
            patterns[name] = None
            continue
        path, some = stack[0], [part for part, inside in parts[stack[0]].items() if inside]
        if is_expression:
            whole = len(some) == len(parts[path])
            ending = r"\w+" if whole else f"(?:{'|'.join(some)})"
            patterns[rf"re:{re.escape(path)}\.\d+\.{ending}$"] = None
        else:
            patterns |= dict.fromkeys(
                [f"{path}*"] if len(some) == len(parts[path]) else [f"{path}.*.{p}" for p in some]
            )
    return list(patterns)


def described_cache(settings: Mapping[str, Any], form: ServingFormat) -> str | None:
    """What keys and values are cached in, by a configuration; None if it does not say.

    Raises:
        ValueError: something else than :attr:`ServingFormat.cache_formats`.
    """
    if form is COMPRESSED_TENSORS:
        scheme = settings.get("kv_cache_scheme")
        found = None if scheme is None else "fp8" if _casts_as(scheme, _arguments(8, "tensor")) else repr(scheme)
    else:
        found = settings.get("kv_cache_quant_algo")
        found = found.lower() if isinstance(found, str) else found
    if found is not None and found not in form.cache_formats:
        raise ValueError(f"keys and values must be cached in {' or '.join(form.cache_formats)}, got {found!s:.80}")
    return found


def described_kind(settings: Mapping[str, Any], form: ServingFormat, layer: str) -> Kind:
    """The form of ``layer`` and how servers cast its inputs, by a configuration.

    Args:
        settings: section of the format's configuration file.

    Raises:
        ValueError: it describes no weight of any known form, or an input that is cast otherwise.
    """
    if form is not COMPRESSED_TENSORS:
        algorithm = settings.get("quant_algo")
        if algorithm == "MIXED_PRECISION":
            layers = settings.get("quantized_layers")
            settings = layers.get(layer) if isinstance(layers, dict) else None  # pyright: ignore[reportAssignmentType]
            if not isinstance(settings, dict):
                raise ValueError(f"its quantized_layers have no {layer!r}")
            algorithm = settings.get("quant_algo")
        kinds = {name: (found, inputs) for found in FORMS for inputs, name in found.algorithms.items()}
        if algorithm not in kinds:
            raise ValueError(f"quant_algo of {layer!r} must be one of {', '.join(kinds)}, got {algorithm!r:.80}")
        size = _group_size(algorithm).get("group_size")
        if size is not None and settings.get("group_size", size) != size:
            raise ValueError(f"group_size must be {size}, got {settings['group_size']!r:.80}")
        return kinds[algorithm]
    groups = settings.get("config_groups")
    listed = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    targets = [_strings(group.get("targets")) for group in listed]
    # A name comes before an expression, and both before the class, in whatever order the groups are.
    ranks = [(layer in names, is_named(layer, names), "Linear" in names) for names in targets]
    best = max(ranks, default=(False, False, False))
    if not any(best):
        raise ValueError(f"none of its config_groups has {layer!r} among its targets")
    group = listed[ranks.index(best)]
    weights, inputs = group.get("weights"), group.get("input_activations")
    found = next((form for form in FORMS if _casts_as(weights, form.arguments)), None)
    if found is None:
        raise ValueError(f"it describes the weight of {layer!r} as {weights!r:.160}, which is of no known form")
    ways = [how for how, arguments in found.inputs.items() if _casts_as(inputs, arguments)]
    if inputs is not None and not ways:
        raise ValueError(
            f"it describes the input of {layer!r} as {inputs!r:.160}, which is no input beside {found.name}"
        )
    return found, ways[0] if ways else WEIGHT_ONLY


def _strings(value: Any) -> list[str]:
    """The strings in a list; none if it is none."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _casts_as(given: Any, wanted: Mapping[str, Any]) -> bool:
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic")
    return isinstance(given, dict) and all(given.get(key) == wanted.get(key) for key in keys)


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a configuration's list has the module ``name``: itself, an expression after ``re:``, or with ``*``.

    Raises:
        ValueError: what follows ``re:`` is no expression.
    """
    for pattern in patterns:
        try:
            if re.match(pattern[3:], name) if pattern.startswith("re:") else fnmatch(name, pattern):
                return True
        except re.error as error:
            raise ValueError(f"{pattern!r:.80} is no regular expression: {error}") from error
    return False
