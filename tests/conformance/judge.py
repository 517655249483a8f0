"""Judge a loader of NVFP4 checkpoints by the pack beside this file: what it decodes and computes, and what is wrong.

    python tests/conformance/judge.py LOADER [--cases PART ...] [--list]

LOADER is `fp4engine`, `transformers`, or a Python file with one or both of these functions:

    weights(directory) -> {"model.layers.0.mlp.up_proj.weight": array [N, K], ...}
    logits(directory, tokens) -> array [sequences, positions, vocabulary]

`directory` is a checkpoint as a user has it; `tokens` are int64 [sequences, positions]. Arrays are NumPy's, or what it
makes arrays of. Weights are in the order [out_features, in_features] and have the names of an unquantized checkpoint.
Inputs stay in high precision for the logits. A case passes if every weight is right to three roundings to BF16, and the
logits to a fiftieth. A function that raises says that it cannot load the case. The exit code is 1 if a case is wrong.

Needs NumPy alone, beside what LOADER imports.
"""

import argparse
import importlib.util
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CASES = Path(__file__).with_name("cases")
EXPECTED = "expected.safetensors"
WEIGHTS_WITHIN, LOGITS_WITHIN = 2.0**-6, 0.02
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Raw = tuple[str, np.ndarray]
"""A tensor: safetensors' name of its dtype, and an array of that dtype, or of its bits where NumPy has none."""


def read(path: Path) -> dict[str, Raw]:
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    known = {"F32": np.float32, "I64": np.int64, "U8": np.uint8, "F8_E4M3": np.uint8, "BF16": np.uint16}
    tensors: dict[str, Raw] = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = (
                entry["dtype"],
                np.frombuffer(data[start:end], known[entry["dtype"]]).reshape(entry["shape"]),
            )
    return tensors


def numbers(raw: Raw) -> np.ndarray:
    """The values of a tensor in float64; bytes of codes are taken for E8M0 scales."""
    dtype, array = raw
    if dtype == "F8_E4M3":
        exponent, fraction = (array >> 3) & 15, array & 7
        normal = np.ldexp(1 + fraction / 8, exponent.astype(int) - 7)
        magnitude = np.where(exponent == 0, fraction * 2.0**-9, normal)
        return np.where((array & 0x7F) == 0x7F, np.nan, np.where(array & 0x80, -magnitude, magnitude))
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ldexp(1.0, array.astype(int) - 127) if dtype == "U8" else array.astype(np.float64)


def decode(tensors: dict[str, Raw], layer: str, fault: str = "") -> np.ndarray:
    """The weight [N, K] that the tensors of a layer mean, in float64; or what a loader with a fault makes of them."""
    part = {name.rpartition(".")[2]: raw for name, raw in tensors.items() if name.rpartition(".")[0] == layer}
    divisor = "weight_global_scale" in part
    codes = part["weight_packed" if "weight_packed" in part else "weight"]
    if codes[0] == "U8":
        pairs = [codes[1] & 15, codes[1] >> 4]
        values = E2M1[np.stack(pairs[::-1] if fault == "nibbles" else pairs, axis=-1).reshape(len(codes[1]), -1)]
    else:
        values = numbers(codes)
    scales = numbers(part["weight_scale"])
    if scales.size > 1 and fault != "blocks":
        down, across = (-(-size // count) for size, count in zip(values.shape, scales.shape, strict=True))
        values = values * scales.repeat(down, 0)[: len(values)].repeat(across, 1)
    outer = (
        part.get("weight_global_scale")
        or part.get("weight_scale_2")
        or (part["weight_scale"] if scales.size == 1 else None)
    )
    if outer is None or fault == "outer":
        return values
    factor = float(numbers(outer).reshape(-1)[0])
    return values / factor if divisor != (fault == "direction") else values * factor


FAULTS = {
    "nibbles": "the two codes of each byte are swapped: the even column is in the low bits",
    "blocks": "block scales are left out",
    "outer": "the outer scale is left out",
    "direction": "the outer scale divides where it should multiply, or the other way round",
}


def close(got: np.ndarray, wanted: np.ndarray, within: float) -> bool:
    """Whether every value is right but for rounding, to a share of itself and of the least that matters."""
    with np.errstate(invalid="ignore"):
        return bool((np.abs(got - wanted) <= within * np.abs(wanted) + 1e-30).all())


def weight_fault(tensors: dict[str, Raw], name: str, got: Any, wanted: np.ndarray) -> str:
    """What is wrong with a weight; empty if nothing is."""
    if got is None:
        return f"{name} is missing"
    array = np.asarray(got, dtype=np.float64)
    if array.shape != wanted.shape:
        return f"{name} has shape {list(array.shape)} and not {list(wanted.shape)}"
    if close(array, wanted, WEIGHTS_WITHIN):
        return ""
    layer = name.removesuffix(".weight")
    if f"{layer}.weight_scale" in tensors:
        for fault, words in FAULTS.items():
            wrong = decode(tensors, layer, fault)
            if (
                wrong.shape == array.shape
                and close(array, wrong, WEIGHTS_WITHIN)
                and not close(wrong, wanted, WEIGHTS_WITHIN)
            ):
                return f"{name}: {words}"
    size = float(np.linalg.norm(array) / max(np.linalg.norm(wanted), 1e-300))
    return f"{name} has other values ({size:.4g} times the norm)"


def judge(case: Path, loader: Any) -> tuple[str, list[str]]:
    """``("passes" or "cannot load" or "WRONG", what is to be said of it)``."""
    expected = {name: raw[1] for name, raw in read(case / EXPECTED).items()}
    tensors = read(case / "model.safetensors")
    tokens, logits = expected.pop("tokens"), expected.pop("logits").astype(np.float64)
    faults: list[str] = []
    try:
        if hasattr(loader, "weights"):
            found = loader.weights(case)
            faults += filter(None, (weight_fault(tensors, name, found.get(name), w) for name, w in expected.items()))
        if hasattr(loader, "logits"):
            got = np.asarray(loader.logits(case, tokens), dtype=np.float64)
            apart = np.linalg.norm(got - logits) / np.linalg.norm(logits) if got.shape == logits.shape else np.inf
            if not apart <= LOGITS_WITHIN:
                faults.append(f"logits {list(got.shape)} differ by {apart:.2g}")
    except Exception as error:  # a loader may raise anything
        return "cannot load", [f"{type(error).__name__}: {' '.join(str(error).split()):.200}"]
    return ("WRONG", faults) if faults else ("passes", [])


class Fp4engine:
    """This project's reader."""

    def weights(self, directory: Path) -> dict[str, Any]:
        from fp4engine.export import ServedCheckpoint

        checkpoint = ServedCheckpoint(directory)
        return {f"{layer}.weight": checkpoint.weight(layer).numpy() for layer in checkpoint.layers}

    def logits(self, directory: Path, tokens: np.ndarray) -> Any:
        import torch
        import transformers

        from fp4engine.export import ServedCheckpoint
        from fp4engine.export.readers import decoded_model, plain_config

        config = transformers.AutoConfig.from_pretrained(directory)
        kind = getattr(transformers, config.architectures[0])
        with torch.device("meta"):
            empty = kind(config)
        model = decoded_model(ServedCheckpoint(directory), kind, plain_config(empty))
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()


class Transformers:
    """`from_pretrained`, with the casts of inputs switched off."""

    def logits(self, directory: Path, tokens: np.ndarray) -> Any:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        for module in model.modules():
            module.quantization_enabled = False
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.float().numpy()


LOADERS: dict[str, Callable[[], Any]] = {"fp4engine": Fp4engine, "transformers": Transformers}


def cases(parts: list[str]) -> Iterator[Path]:
    """The cases whose name contains one of ``parts``, or all."""
    for path in sorted(CASES.iterdir()):
        if path.is_dir() and (not parts or any(part in path.name for part in parts)):
            yield path


def load(name: str) -> Any:
    """The loader that is called ``name``, or the module in a file."""
    if name in LOADERS:
        return LOADERS[name]()
    spec = importlib.util.spec_from_file_location("loader", name) if Path(name).is_file() else None
    if spec is None or spec.loader is None:
        raise SystemExit(f"LOADER must be {', '.join(LOADERS)} or a Python file, got {name!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "weights") and not hasattr(module, "logits"):
        raise SystemExit(f"{name} has neither weights(directory) nor logits(directory, tokens)")
    return module


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loader", nargs="?", default="fp4engine", metavar="LOADER")
    parser.add_argument("--cases", nargs="*", default=[], metavar="PART", help="only those whose name contains a part")
    parser.add_argument("--list", action="store_true", help="say what each case is about, and judge nothing")
    arguments = parser.parse_args(argv)
    chosen = list(cases(arguments.cases))
    if not chosen:
        raise SystemExit(f"no case contains {' or '.join(arguments.cases)}")
    if arguments.list:
        for case in chosen:
            print(f"{case.name:32} {(case / 'ABOUT').read_text().strip()}")
        return 0
    loader, verdicts = load(arguments.loader), []
    for case in chosen:
        verdict, said = judge(case, loader)
        verdicts.append(verdict)
        print(f"{case.name:32} {verdict}{': ' if said else ''}{'; '.join(said[:3])}{' ...' if len(said) > 3 else ''}")
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)))
    return int("WRONG" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
