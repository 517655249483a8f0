"""Make the cases of the conformance pack anew: python tests/conformance/make.py [--check]

Every case is a checkpoint of a few kilobytes whose codes and scales are drawn or chosen here, and not those of any
exporter, and `expected.safetensors`: the weights that they mean (float64 arithmetic, rounded once to FP32), tokens, and
the logits of transformers in FP32 with these weights and uncast inputs. `--check` compares instead of writing.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
import judge

LLAMA = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "norm_topk_prob": True}
DIALECTS = ("compressed-tensors", "modelopt")
NVFP4, FP8, MXFP4 = "NVFP4", "FP8", "MXFP4"


@dataclass
class Layer:
    """A weight in codes: uint8 [N, K/2] or E4M3 [N, K], block scales, and what their products are multiplied by."""

    form: str
    codes: torch.Tensor
    scales: torch.Tensor | None
    factor: float
    input_amax: float | None = None


@dataclass
class Case:
    """What is drawn and what is chosen."""

    about: str
    dialects: tuple[str, ...] = DIALECTS
    kind: str = "Llama"
    config: dict[str, Any] = field(default_factory=dict)
    form: Callable[[str], str] = lambda name: NVFP4
    keep: tuple[str, ...] = ("lm_head",)
    static: bool = False
    kv_cache: bool = False
    edit: Callable[[dict[str, Layer]], None] = lambda layers: None


def draw(form: str, rows: int, cols: int, random: torch.Generator) -> Layer:
    if form == FP8:
        codes = (torch.randn(rows, cols, generator=random) * 100).to(torch.float8_e4m3fn)
        return Layer(form, codes, None, 0.25 / 448)
    codes = torch.randint(256, (rows, cols // 2), generator=random, dtype=torch.uint8)
    if form == MXFP4:
        scales = torch.randint(118, 124, (rows, cols // 32), generator=random, dtype=torch.uint8)
        return Layer(form, codes, scales, 1.0)
    scales = torch.rand(rows, cols // 16, generator=random) * 440 + 8
    return Layer(form, codes, scales.to(torch.float8_e4m3fn), 1e-4 * (1 + float(torch.rand(1, generator=random))))


def least_scales(layers: dict[str, Layer]) -> None:
    """Zeros, the least and the largest numbers that scales can be."""
    down, up, out = (layers[f"model.layers.0.{name}"] for name in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"))
    for row, byte in enumerate((0x00, 0x01, 0x07, 0x08, 0x7E)):  # 0, 2^-9, 7 * 2^-9, 2^-6, 448
        down.scales.view(torch.uint8)[row] = byte
    up.codes.zero_()
    up.scales.view(torch.uint8).zero_()
    up.factor = 1.0  # what exporters write of a weight of zeros
    out.codes.fill_(0x88)  # minus zero
    layers["model.layers.0.mlp.gate_proj"].factor = layers["model.layers.0.mlp.up_proj"].factor
    layers["model.layers.0.mlp.gate_proj"].scales = torch.full_like(
        layers["model.layers.0.mlp.gate_proj"].scales.float(), 2.0**-9
    ).to(torch.float8_e4m3fn)


def experts_alike(layers: dict[str, Layer]) -> None:
    """The last expert saw no token: it has the input scale of the others, as all experts of a projection have."""
    for name, layer in layers.items():
        layer.input_amax = 3.0 if "down" in name else 5.0


CASES = {
    "plain": Case("a Llama whose q, k and v, and gate and up, have one outer scale each"),
    "static-inputs": Case("the same with scales of inputs, which do not change what weights mean", static=True),
    "least-scales": Case("zero blocks, a weight of zeros, minus zero, block scales 2^-9 and 448", edit=least_scales),
    "odd-shapes": Case(
        "rows that are no multiples of 8: 17 words, 3 heads of 6",
        config={"vocab_size": 17, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6}
        | {"intermediate_size": 16},
        keep=("lm_head", "model.layers.0.self_attn.o_proj"),  # whose 18 columns are no whole blocks
    ),
    "tied-head": Case("a head that is the embedding, and in no file", config={"tie_word_embeddings": True}),
    "head-in-codes": Case("an untied head in NVFP4", keep=(), config={"tie_word_embeddings": False}),
    "kept-layers": Case(
        "an MLP in high precision", keep=("lm_head", *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")))
    ),
    "kv-scales": Case("scales of cached keys and values", kv_cache=True),
    "experts": Case(
        "experts one by one, the last of which saw no token in calibration",
        kind="Qwen3Moe",
        config=MOE,
        keep=("lm_head", "model.layers.0.mlp.gate"),
        static=True,
        edit=experts_alike,
    ),
    "mixed-fp8": Case(
        "attention in FP8 by tensor, the MLP in NVFP4, with scales of inputs",
        form=lambda name: FP8 if "self_attn" in name else NVFP4,
        static=True,
    ),
    "mixed-mxfp4": Case(
        "q, k and v in MXFP4, all others in NVFP4",
        dialects=("compressed-tensors",),
        form=lambda name: MXFP4 if name.endswith(("q_proj", "k_proj", "v_proj")) else NVFP4,
    ),
}
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def make(name: str, dialect: str, folder: Path) -> None:
    """Write one case into ``folder``."""
    case, random = CASES[name], torch.Generator().manual_seed(sorted(CASES).index(name))
    config = getattr(transformers, f"{case.kind}Config")(**LLAMA | case.config)
    kind = getattr(transformers, f"{case.kind}ForCausalLM")
    with torch.device("meta"):
        model = kind(config)
    linears = list(names_and_shapes(model, config))
    layers = {n: draw(case.form(n), *shape, random) for n, shape in linears if n not in case.keep}
    for n, layer in layers.items():
        parent, _, last = n.rpartition(".")
        first = next((f"{parent}.{group[0]}" for group in SIBLINGS if last in group), n)
        layer.factor = layers[first].factor
        layer.input_amax = layers[first].input_amax = 4.0 if case.static else None
    case.edit(layers)
    others = {
        n: (torch.randn(shape, generator=random) * 0.3 + ("norm" in n)).bfloat16()
        for n, shape in others_and_shapes(model, config, layers, case.keep, dict(linears))
    }
    tensors: dict[str, torch.Tensor] = dict(others)
    for n, layer in layers.items():
        tensors |= {f"{n}.{part}": tensor for part, tensor in stored(layer, dialect).items()}
    if case.kv_cache:
        parts = ("k_scale", "v_scale") if dialect == DIALECTS[0] else ("k_proj.k_scale", "v_proj.v_scale")
        tensors |= {f"model.layers.0.self_attn.{part}": torch.tensor([0.02]) for part in parts}
    save_file({n: tensors[n].contiguous() for n in sorted(tensors)}, folder / "model.safetensors", {"format": "pt"})
    write_configuration(case, dialect, config, kind, layers, folder)
    write_expected(folder, kind, config, layers, others)
    (folder / "ABOUT").write_text(f"{case.about}\n")


def names_and_shapes(model: Any, config: Any) -> Any:
    """Linear layers by the names of checkpoints, experts one by one."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, tuple(module.weight.shape)
        elif name.endswith(".experts"):
            size = (config.moe_intermediate_size, config.hidden_size)
            for index in range(config.num_experts):
                yield from ((f"{name}.{index}.{part}_proj", size) for part in ("gate", "up"))
                yield f"{name}.{index}.down_proj", size[::-1]


def others_and_shapes(model: Any, config: Any, layers: Any, keep: Any, linears: dict[str, Any]) -> Any:
    """Tensors in high precision."""
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in layers or ".experts." in name or (layer == "lm_head" and config.tie_word_embeddings):
            continue
        yield name, tuple(tensor.shape)


def stored(layer: Layer, dialect: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer by the last parts of their names."""
    multiplier = torch.tensor([layer.factor], dtype=torch.float32)
    amax = None if layer.input_amax is None else torch.tensor([layer.input_amax], dtype=torch.float32)
    if layer.form == MXFP4:
        return {"weight_packed": layer.codes, "weight_scale": layer.scales}
    if layer.form == FP8:
        return {"weight": layer.codes, "weight_scale": multiplier} | (
            {} if amax is None else {"input_scale": amax / 448}
        )
    if dialect == "modelopt":
        made = {"weight": layer.codes, "weight_scale": layer.scales, "weight_scale_2": multiplier}
        return made | ({} if amax is None else {"input_scale": amax / 2688})
    made = {"weight_packed": layer.codes, "weight_scale": layer.scales, "weight_global_scale": 1 / multiplier}
    return made | ({} if amax is None else {"input_global_scale": 2688 / amax})


def arguments(form: str, is_input: bool) -> dict[str, Any]:
    """What compressed-tensors says of weights and inputs."""
    common = {"type": "float", "symmetric": True, "dynamic": False}
    if form == FP8:
        return {"num_bits": 8, "strategy": "tensor", **common}
    if form == MXFP4:
        return {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", **common}
    made = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", **common}
    return made | {"dynamic": "local"} if is_input else made


FORMATS = {NVFP4: "nvfp4-pack-quantized", MXFP4: "mxfp4-pack-quantized", FP8: "float-quantized"}


def write_configuration(
    case: Case, dialect: str, config: Any, kind: Any, layers: dict[str, Layer], folder: Path
) -> None:
    described = {**config.to_dict(), "architectures": [kind.__name__], "dtype": "bfloat16"}
    described.pop("transformers_version", None)
    forms = list(dict.fromkeys(layer.form for layer in layers.values()))
    if dialect == "compressed-tensors":
        groups = {
            f"group_{index}": {
                "targets": [n for n in layers if layers[n].form == form]
                if len(forms) > 1
                else ["Linear", *(["lm_head"] if "lm_head" in layers else [])],
                "weights": arguments(form, False),
                "input_activations": arguments(form, True) if case.static else None,
                "output_activations": None,
                "format": FORMATS[form],
            }
            for index, form in enumerate(forms)
        }
        described["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": FORMATS[forms[0]] if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(case.keep),
            "kv_cache_scheme": arguments(FP8, False) if case.kv_cache else None,
        }
    else:
        names = {NVFP4: "NVFP4" if case.static else "W4A16_NVFP4", FP8: "FP8"}
        settings: dict[str, Any] = {
            "quant_algo": names[forms[0]],
            "kv_cache_quant_algo": "FP8" if case.kv_cache else None,
        }
        if len(forms) > 1:
            settings["quant_algo"] = "MIXED_PRECISION"
            settings["quantized_layers"] = {
                n: {"quant_algo": names[layer.form]} | ({"group_size": 16} if layer.form == NVFP4 else {})
                for n, layer in layers.items()
            }
        else:
            settings["group_size"] = 16
        settings["exclude_modules"] = list(case.keep)
        data = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")


def write_expected(folder: Path, kind: Any, config: Any, layers: dict[str, Layer], others: dict[str, Any]) -> None:
    raw = judge.read(folder / "model.safetensors")
    means = {f"{n}.weight": torch.tensor(judge.decode(raw, n).astype(np.float32)) for n in layers}
    model = kind.from_pretrained(None, config=config, state_dict=means | others, dtype=torch.float32).eval()
    tokens = torch.arange(14).view(2, 7) * 5 % config.vocab_size
    with torch.no_grad():
        logits = model(tokens).logits
    save_file(means | {"tokens": tokens, "logits": logits}, folder / judge.EXPECTED)


def make_all(target: Path) -> None:
    for name, case in CASES.items():
        for dialect in case.dialects:
            folder = target / f"{name}-{dialect}"
            folder.mkdir(parents=True)
            make(name, dialect, folder)


def differences(made: Path) -> list[str]:
    """Files that are not those of the pack; logits may differ in their last bits between machines."""
    found = []
    names = {path.relative_to(root) for root in (made, judge.CASES) for path in root.rglob("*") if path.is_file()}
    for name in sorted(names):
        ours, theirs = made / name, judge.CASES / name
        if not ours.exists() or not theirs.exists():
            found.append(f"{name} is in one of them only")
        elif name.name == judge.EXPECTED:
            new, old = (judge.read(path) for path in (ours, theirs))
            for tensor in new.keys() | old.keys():
                same = (
                    tensor in new
                    and tensor in old
                    and np.allclose(new[tensor][1], old[tensor][1], rtol=1e-4, atol=1e-6)
                )
                found += [] if same else [f"{name}: {tensor}"]
        elif ours.read_bytes() != theirs.read_bytes():
            found.append(str(name))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, and write nothing")
    check = parser.parse_args(argv).check
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "cases"
        make_all(made)
        if check:
            found = differences(made)
            print("\n".join(found) or "all files are those that this script makes")
            return int(bool(found))
        shutil.rmtree(judge.CASES, ignore_errors=True)
        shutil.copytree(made, judge.CASES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
