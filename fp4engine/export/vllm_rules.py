"""What vLLM's loader would make of a checkpoint, by its rules alone: nothing of vLLM is imported or run.

1. Modules that it multiplies as one matrix are one module: q, k and v; gate and up; projections of linear attention;
   the experts of a layer.
2. Its scheme comes from the configuration. compressed-tensors: unless the name is in ``ignore``, the first target that
   is the module's name, or ``re:`` and an expression of its beginning; or is a part of its class's name, as ``Linear``
   is but of the head's; or one for each of its parts. Experts are asked for as ``.0.gate_proj``, ``.0.up_proj`` and
   ``.0.down_proj``, whatever they are called. ModelOpt: ``exclude_modules`` also holds for names that contain one.
   Gates of experts and heads of encoders are in high precision, whatever it says.
3. The scheme says which tensors there are, of which dtypes. One that is missing keeps what memory held, and one that
   the scheme does not know stops the loader. A module in high precision without any is tied.
4. The parts of one module keep one outer scale, the largest number among those stored, and their block scales stay as
   they are. FP8 is cast again by the larger scale.

Source: vllm-project/vllm, September 2026, ``layers/quantization/compressed_tensors`` and ``modelopt.py`` beside it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from fp4engine.export.reader import ServedCheckpoint
from fp4engine.export.serving_format import COMPRESSED_TENSORS, expert_stack

Verdict = tuple[Literal["agrees", "differs", "cannot load"], str]

_FUSED: dict[tuple[str, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("query", "key", "value"): "qkv_proj",
    ("q_lin", "k_lin", "v_lin"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("w1", "w3"): "w13",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
    ("in_proj_b", "in_proj_a"): "in_proj_ba",
}
_UPPER = ("gate_proj", "up_proj", "w1", "w3")
"""Experts' projections that are multiplied as one."""
_PLAIN = {"gate", "shared_expert_gate", "pooler", "classifier"}
"""Names of modules, or of what they are in, that have a plain weight: gates of experts, and heads of encoders."""
_OUTER = ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale")


class _Refused(Exception):
    """vLLM would raise."""


@dataclass(frozen=True)
class _Module:
    """A module of vLLM's: its name, the modules in checkpoints that are its parts, and its class."""

    name: str
    parts: tuple[str, ...]
    kind: Literal["Linear", "ParallelLMHead", "RoutedExperts"]

    def together(self) -> Iterable[list[str]]:
        """The parts that have one outer scale."""
        if self.kind != "RoutedExperts":
            return [list(self.parts)]
        groups: dict[tuple[str, bool], list[str]] = {}
        for part in self.parts:
            parent, _, last = part.rpartition(".")
            groups.setdefault((parent, last in _UPPER), []).append(part)
        return groups.values()


def read(checkpoint: ServedCheckpoint, left_alone: Collection[str]) -> Verdict:
    """Whether vLLM would load what the files hold.

    Args:
        left_alone: names of modules that multiply and are in high precision.
    """
    schemes = _compressed_tensors if checkpoint.form is COMPRESSED_TENSORS else _modelopt
    found: Verdict = "agrees", ""
    try:
        for module in _modules([*checkpoint.layers, *left_alone]):
            is_plain = not _PLAIN.isdisjoint(module.name.split("."))
            scheme = {"weight": ""} if is_plain else schemes(checkpoint.settings, module)
            verdict = _loaded(checkpoint, module, scheme)
            found = verdict if found[0] == "agrees" else found
    except _Refused as error:
        return "cannot load", str(error)
    return found


def _modules(names: Collection[str]) -> list[_Module]:
    known, made = set(names), dict[str, _Module]()
    stacks: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        if stack := expert_stack(name):
            stacks.setdefault(stack[0], []).append(name)
            continue
        siblings = next((parts for parts in _FUSED if last in parts and f"{parent}.{parts[0]}" in known), ())
        parts = tuple(sibling for part in siblings if (sibling := f"{parent}.{part}") in known)
        if len(parts) < 2:
            made[name] = _Module(name, (name,), "ParallelLMHead" if last == "lm_head" else "Linear")
        else:
            fused = f"{parent}.{_FUSED[siblings]}"
            made[fused] = _Module(fused, parts, "Linear")
    return [*made.values(), *(_Module(stack, tuple(parts), "RoutedExperts") for stack, parts in stacks.items())]


def _compressed_tensors(settings: Mapping[str, Any], module: _Module) -> dict[str, str]:
    """``last part of a tensor's name -> dtype``; unquantized modules have a ``weight`` of no particular one."""
    groups = list(settings.get("config_groups", {}).values())
    targets = {target: group for group in groups for target in group["targets"]}
    ignore = settings.get("ignore") or []
    if module.kind == "RoutedExperts":
        if "Linear" in targets:
            targets["RoutedExperts"] = targets["Linear"]
        asked = [f"{module.name}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        found = [_scheme(name, (name,), module.kind, targets, ignore) for name in asked]
        if any(scheme != found[0] for scheme in found):
            raise _Refused(f"the projections of {module.name!r} have several schemes")
        group = found[0]
    else:
        group = _scheme(module.name, module.parts, module.kind, targets, ignore)
    return {"weight": ""} if group is None else _tensors(module.name, group)


def _scheme(
    name: str, parts: tuple[str, ...], kind: str, targets: Mapping[str, Any], ignore: Collection[str]
) -> Mapping[str, Any] | None:
    ignored = {_matches(part, ignore) is not None for part in ((name,) if name in ignore else parts)}
    if len(ignored) > 1:
        raise _Refused(f"only some of {', '.join(parts)}, which are one module, are to be left alone")
    if True in ignored:
        return None
    found = _matches(name, targets) or next((t for t in targets if t.lower() in kind.lower()), None)
    if found is None:
        each = [_matches(part, targets) for part in parts]
        found = each[0] if all(each) else None
    return None if found is None else targets[found]


def _matches(name: str, targets: Iterable[str]) -> str | None:
    return next((t for t in targets if (re.match(t[3:], name) if t.startswith("re:") else t == name)), None)


def _tensors(name: str, group: Mapping[str, Any]) -> dict[str, str]:
    weights, inputs = group["weights"], group.get("input_activations")
    asked = (weights["num_bits"], weights["strategy"], weights.get("group_size"))
    if asked == (4, "tensor_group", 16):
        made = {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"}
        return made | ({"input_global_scale": "F32"} if inputs else {})
    if asked == (4, "group", 32):
        return {"weight_packed": "U8", "weight_scale": "U8"}
    if asked == (8, "group", 32):
        return {"weight": "F8_E4M3", "weight_scale": "U8"}
    if weights["num_bits"] == 8 and weights["strategy"] in ("tensor", "block"):
        return {"weight": "F8_E4M3", "weight_scale": "F32"} | (
            {"input_scale": "F32"} if inputs and not inputs["dynamic"] else {}
        )
    raise _Refused(f"{name!r} has weights of {asked}, for which there is no scheme")


def _modelopt(settings: Mapping[str, Any], module: _Module) -> dict[str, str]:
    excluded = settings.get("exclude_modules") or []
    whole = {part in excluded for part in module.parts}
    if len(module.parts) > 1 and len(whole) > 1:
        raise _Refused(f"only some of {', '.join(module.parts)}, which are one module, are to be left alone")
    if True in whole or any(name in module.name or fnmatch(module.name, name) for name in excluded):
        return {"weight": ""}
    algorithm = settings["quant_algo"]
    if algorithm == "MIXED_PRECISION":
        layers = settings["quantized_layers"]
        found = {layers[part]["quant_algo"] for part in module.parts if part in layers}
        if len(found) > 1:
            raise _Refused(f"{module.name!r} has parts of {' and '.join(sorted(found))}")
        algorithm = next(iter(found), None)
    nvfp4 = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
    made = {
        None: {"weight": ""},
        "NVFP4": nvfp4 | {"input_scale": "F32"},
        "W4A16_NVFP4": nvfp4,
        "FP8": {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
        "MXFP8": {"weight": "F8_E4M3", "weight_scale": "U8"},
    }
    if algorithm not in made:
        raise _Refused(f"{algorithm!r} of {module.name!r} is none of its algorithms")
    return made[algorithm]


def _loaded(checkpoint: ServedCheckpoint, module: _Module, scheme: Mapping[str, str]) -> Verdict:
    """What becomes of the tensors of one module."""
    tensors, known = checkpoint.tensors, {*scheme, *_OUTER, "weight", "weight_packed", "weight_scale"}
    found = {part: {last for last in known if f"{part}.{last}" in tensors} for part in module.parts}
    if not any(found.values()) and scheme == {"weight": ""}:
        return "agrees", ""
    for part, there in found.items():
        if odd := sorted(there - set(scheme)):
            raise _Refused(f"'{part}.{odd[0]}' is in the files, and {module.name!r} has no such parameter")
        for last, dtype in scheme.items():
            name = f"{part}.{last}"
            if last not in there:
                return "differs", f"{name!r} is not in the files, and would be whatever memory held"
            got = tensors.described(name)[0]
            if got != dtype if dtype else got in ("U8", "F8_E4M3"):
                raise _Refused(f"{name!r} is {got}, and by the configuration {dtype or 'in high precision'}")
    for together in module.together():
        for last in (*_OUTER, "weight_scale"):
            if last not in scheme or scheme[last] != "F32":
                continue
            stored = [tensors[f"{part}.{last}"] for part in together]
            if stored[0].numel() > 1:  # blocks of 128 rows
                ragged = next((p for p in together[:-1] if tensors.described(f"{p}.weight")[1][0] % 128), None)
                if ragged is not None:
                    raise _Refused(f"{ragged!r} ends within a block of 128 rows, and others follow in {module.name!r}")
            elif len({float(scale) for scale in stored}) > 1:
                return "differs", f"{', '.join(together)} have {last} of their own, and one module keeps one"
    return "agrees", ""
