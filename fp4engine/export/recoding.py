"""MXFP4 as NVFP4 of the same values: of weights that are exported, and of gpt-oss's own checkpoints.

    code * 2^k = code * s * 2^m,   s = 2^(k - m) in E4M3,   m = largest k - 8

Codes stay, and each block of 32 becomes two of 16 with one scale. E4M3 holds 18 powers of two, from 2^-9 to 2^8.

Legend: E experts, N out_features, K in_features.
"""

import os
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_path
from fp4engine.export.reader import CheckpointError, TensorFolder, read_json
from fp4engine.export.serving_format import MODELOPT, MXFP4, NVFP4
from fp4engine.export.slabs import progress_bar
from fp4engine.export.writer import ShardWriter, copy_files, whole_directory, write_json
from fp4engine.version import __version__

LOSSLESS = "lossless"
"""What users call it."""

_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of MXFP4 codes uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32] of gpt-oss."""


def recoded_amax(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The amax by which NVFP4's largest block scale is 2^8, FP32 [1], of MXFP4 [N, K]; 0 if all values are.

    Args:
        codes: uint8 [N, K/2]; scale_inv: E8M0, or its bytes, [N, K/32].
    """
    exponent = torch.where(_holds(codes, scale_inv), scale_inv.view(torch.uint8).int() - 127, -128).amax().reshape(1)
    amax = torch.ldexp(torch.full((1,), NVFP4.spec.numerator, dtype=torch.float32), exponent.cpu() - 8)
    return torch.where(exponent.cpu() > -128, amax, 0)


def recoded(name: str, codes: Tensor, scale_inv: Tensor, amax: Tensor) -> Tensor:
    """Block scales E4M3 [N, K/16] by which MXFP4 codes mean what they do by their own.

    Args:
        name: of the layer, for errors.
        amax: of :func:`recoded_amax`, on the CPU, or a larger one that layers share.

    Raises:
        ValueError: NVFP4 has no such scale.
    """
    _, exponent = torch.frexp(amax / NVFP4.spec.numerator)  # of the factor, a power of two, or 0
    powers = scale_inv.view(torch.uint8).int() - 126 - exponent.to(codes.device)
    holds = _holds(codes, scale_inv)
    wanted = torch.where(holds, torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers), 0)
    scales = wanted.to(torch.float8_e4m3fn)
    if lost := int((scales.float() != wanted).sum()):
        raise ValueError(
            f"{lost} of {holds.sum()} blocks of {name!r} have a scale in MXFP4 that is none in NVFP4: they span more "
            f"than the 18 powers of two that E4M3 holds, so that nothing holds them {LOSSLESS}; write MXFP4, or "
            "keep_high_precision=[the module]"
        )
    return scales.repeat_interleave(2, dim=1)


def _holds(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Which blocks [N, blocks] of packed codes hold something else than zeros."""
    return (codes.view(*scale_inv.shape, -1) & 0x77).amax(-1) > 0


def decoded_names(tensors: TensorFolder) -> dict[str, Tensor]:
    """The names that the tensors of a checkpoint of gpt-oss have in the model, without values."""
    return dict.fromkeys((name.removesuffix(_BLOCKS) for name in tensors), torch.empty(0, dtype=torch.uint8))


def recode_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int = 2 << 30,
    progress: bool = True,
) -> str:
    """Write a checkpoint of gpt-oss, whose experts are MXFP4, as NVFP4 of the same values, and say what was done.

    The files are those that Model-Optimizer writes of gpt-oss: experts of a layer in one tensor, codes uint8
    [E, K/2, N] and block scales E4M3 [E, K/16, N] under ``_weight_scale``, one outer scale under ``_weight_scale_2``.
    All values that they decode to are compared with the source's values. Transformers 5.23 and vLLM (its issue 46641)
    read experts of gpt-oss in MXFP4 only.

    Args:
        source: directory of ``config.json`` with the quantization method ``mxfp4``, and safetensors.
        directory, max_shard_size, progress: as in :func:`~fp4engine.export.export_checkpoint`.

    Raises:
        CheckpointError: ``source`` is none such, or damaged.
        ValueError: powers of two that NVFP4 cannot hold; ``directory`` is not empty. Nothing is left then.

    Source: NVIDIA/Model-Optimizer a2fbac7, ``examples/hf_ptq/cast_mxfp4_to_nvfp4.py`` and ``unified_export_hf.py``.
    """
    path = require_path("source", source)
    config = read_json(path / "config.json")
    settings = config.pop("quantization_config", None)
    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        raise CheckpointError(f"{path / 'config.json'} describes no checkpoint in MXFP4, got {settings!r:.120}")
    tensors = TensorFolder(path)
    experts = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    if not experts:
        raise CheckpointError(f"{path}: no tensor is named ...{_BLOCKS}")
    kept = settings.get("modules_to_not_convert") or []
    described = {
        "producer": {"name": "fp4engine", "version": __version__},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4.spec.block[1],
            "exclude_modules": [f"{name}*" for name in kept if isinstance(name, str)],
        },
    }
    blocks = 0
    with whole_directory(require_path("directory", directory)) as made:
        writer = ShardWriter(made, max_shard_size)
        for name in progress_bar(tensors, "recode", "tensor", progress):
            if name.endswith(_BLOCKS) and (base := name.removesuffix(_BLOCKS)) in experts:
                parts, count = _recode_experts(base, tensors)
                blocks += count
                for last, tensor in parts.items():
                    writer.add(f"{base}{last}", tensor)
            elif name.removesuffix(_SCALES) not in experts:
                writer.add(name, tensors[name])
        writer.finish()
        write_json(made / "config.json", config)
        write_json(made / MODELOPT.config_file, described)
        copy_files(path, made)
    return (
        f"{len(experts)} stacks of experts, {blocks:,} blocks of MXFP4, are NVFP4 of the same values: modelopt in "
        f"{directory}"
    )


def _recode_experts(name: str, tensors: TensorFolder) -> tuple[dict[str, Tensor], int]:
    """The tensors of one stack by the ends of their names, and how many blocks it has."""
    if f"{name}{_SCALES}" not in tensors:
        raise CheckpointError(f"{tensors.directory}: {name + _SCALES!r} is not in it")
    codes, scales = tensors[f"{name}{_BLOCKS}"], tensors[f"{name}{_SCALES}"]
    if {codes.dtype, scales.dtype} != {torch.uint8} or codes.shape != (*scales.shape, 16) or scales.ndim != 3:
        got = f"{codes.dtype} {list(codes.shape)} and {scales.dtype} {list(scales.shape)}"
        raise CheckpointError(f"{tensors.directory}: {name!r} needs uint8 [E, N, K/32, 16] and [E, N, K/32], got {got}")
    experts, rows, _ = scales.shape
    codes, scales = codes.reshape(experts, rows, -1), scales.contiguous()
    each: list[tuple[Any, Any]] = list(zip(codes, scales, strict=True))
    amax = torch.stack([recoded_amax(code, scale) for code, scale in each]).amax(0)
    factor = MODELOPT.outer(NVFP4, amax, NVFP4.spec.numerator)
    made: list[Tensor] = []
    for code, scale in each:
        block_scales = recoded(name, code, scale, amax)
        if not torch.equal(NVFP4.decode(code, block_scales) * factor, MXFP4.decode(code, scale)):
            raise AssertionError(f"{name}: NVFP4 decodes to other values than MXFP4")
        made.append(block_scales)
    return {
        "": codes.transpose(1, 2),
        "_weight_scale": torch.stack(made).transpose(1, 2),
        "_weight_scale_2": factor.reshape(()),
    }, scales.numel()
