"""Beside what a user would otherwise run: ModelOpt's fake quantize, torchao's and microxcaling's emulated linears.

    pip install --no-deps --target .peers nvidia-modelopt torchao git+https://github.com/microsoft/microxcaling
    python benchmarks/peers.py [--peers .peers] [--quick] [--out benchmarks/results]

Our bytes are held to the reference before anything is timed. A peer that cannot be imported or does not run on this GPU
is a row that says why. Two tables:

    linear          one layer at Llama-3-8B shapes, 8,192 tokens, BF16, forward alone and with backward, beside BF16
                    nn.Linear in the same run; and how far output and weight gradient are from BF16's, which shows what
                    is quantized: ||theirs - bf16|| / ||bf16||
    fake quantize   BF16 values to the BF16 values of their NVFP4 codes, rowwise, with the outer amax given: time in a
                    CUDA graph, share of the device's copy bandwidth (bytes in and out, nothing between), and how many
                    elements differ from the reference with the same amax
"""

import importlib
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import RECIPE, check, make, problem
from timing import argument_parser, environment, graph_seconds, repeats_for, time_in_turn, write_json
from torch import Tensor

import fp4engine
from fp4engine import reference
from fp4engine.formats import CastSpec
from fp4engine.ops import dequantize, quantize

SPEC = CastSpec()
CAST_SHAPES = [(8192, 4096), (8192, 14336)]
COUNTED_SHAPE = (1024, 14336)
LAYERS = [(4096, 4096), (4096, 14336)]
"""(in_features, out_features)."""
DISTRIBUTIONS = ("nvidia-modelopt", "torchao", "mx")
"""The peers by the names that pip knows; mx is microxcaling."""

Run = Callable[[Tensor, Tensor], Any]
Forward = Callable[[Tensor], Tensor]


def import_alone(distribution: str, *modules: str) -> types.ModuleType:
    """The last of ``modules``, whose packages are entered without running their ``__init__``.

    ModelOpt's would import dozens of packages that its kernels have no use for.
    """
    root = metadata.distribution(distribution)
    for module in modules:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:depth]))
            package.__path__ = [str(root.locate_file("/".join(parts[:depth])))]
            sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(modules[-1])


# Fake quantize: loaders of functions (x, amax) -> values.


def our_codes_and_back() -> Run:
    def run(x: Tensor, amax: Tensor) -> Tensor:
        operand, _ = quantize(x, SPEC, None, rowwise_amax=amax, backend="triton")
        assert operand is not None and operand.scale_inv is not None
        return dequantize(operand.data, operand.scale_inv, amax, SPEC, x.shape[1], x.dtype, backend="triton")

    return run


def our_values() -> Run:
    def run(x: Tensor, amax: Tensor) -> Tensor:
        operand, _ = quantize(x, SPEC, None, rowwise_amax=amax, rowwise_form="values", backend="triton")
        assert operand is not None
        return operand.data

    return run


def modelopt_fake_quantize() -> Run:
    kernel = import_alone(
        "nvidia-modelopt",
        "modelopt.torch.quantization.utils.numeric_utils",  # the kernel's module takes a constant from it
        "modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper",
    )
    return kernel.fp4_fake_quant_block


def torchao_fake_quantize() -> Run:
    from torchao.prototype.mx_formats import nvfp4_tensor as ao

    def run(x: Tensor, amax: Tensor) -> Tensor:
        return ao.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=ao.per_tensor_amax_to_scale(amax[0])).dequantize()

    return run


def dequantized(cast: reference.Cast) -> Tensor:
    return reference.dequantize(*cast, SPEC, 2 * cast.codes.shape[1], torch.bfloat16)


def decoded(cast: reference.Cast) -> Tensor:
    """The values without the outer factor, which the product's epilogue applies."""
    return reference.decode(cast.codes, cast.scale_inv, SPEC).bfloat16()


class FakeQuantize(NamedTuple):
    load: Callable[[], Run]
    meant: Callable[[reference.Cast], Tensor] = dequantized
    bytes_per_element: float = 4.0


FAKE_QUANTIZERS = {
    "fp4engine, codes and back": FakeQuantize(our_codes_and_back),
    "fp4engine, values for a product": FakeQuantize(our_values, decoded, 4.0625),
    "ModelOpt": FakeQuantize(modelopt_fake_quantize),
    "torchao, compiled": FakeQuantize(lambda: torch.compile(torchao_fake_quantize(), dynamic=False)),
    "torchao": FakeQuantize(torchao_fake_quantize),
}


def elements_off(run: Run, meant: Callable[[reference.Cast], Tensor]) -> int:
    """Elements of Gaussian data whose values differ from the reference's with the same amax; -0 equals 0."""
    torch.manual_seed(0)
    x = torch.randn(COUNTED_SHAPE, device="cuda", dtype=torch.bfloat16)
    amax = x.abs().amax().float().view(1)
    return int((run(x, amax) != meant(reference.quantize(x, SPEC, amax=amax))).sum())


def measure_fake_quantize(name: str) -> dict[str, Any]:
    """Elements off and microseconds by shape, or why there are none."""
    entry = FAKE_QUANTIZERS[name]
    try:
        run = entry.load()
        off = elements_off(run, entry.meant)
        times = {str(shape): 1e6 * seconds(run, shape) for shape in CAST_SHAPES}
    except Exception as error:
        if is_ours(name):
            raise
        return {"name": name, "fails": reason(error)}
    return {"name": name, "elements_off": off, "bytes_per_element": entry.bytes_per_element, "us": times}


def seconds(run: Run, shape: tuple[int, int]) -> float:
    """Median per call, over inputs that together exceed L2."""
    count = max(2, -(-(256 << 20) // (2 * shape[0] * shape[1])))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    amax = inputs[0].abs().amax().float().view(1)
    return graph_seconds(lambda x: run(x, amax), inputs)


def fake_quantize_table() -> dict[str, Any]:
    """Every fake quantizer, with its share of the copy bandwidth; a wrong byte of ours ends the run."""
    shapes = {str(shape): shape[0] * shape[1] for shape in CAST_SHAPES}
    copies = {str(shape): 1e6 * seconds(lambda x, amax: x.clone(), shape) for shape in CAST_SHAPES}
    copy_gb_per_s = max(4e-3 * shapes[shape] / us for shape, us in copies.items())
    print(f"\nfake quantize to NVFP4, rowwise; copy {copy_gb_per_s:.0f} GB/s")
    print(f"{'':36}" + "".join(f"{shape:>22}" for shape in shapes) + f"{'elements off':>16}")
    rows = []
    for name in FAKE_QUANTIZERS:
        row = measure_fake_quantize(name)
        rows.append(row)
        if is_ours(name) and row["elements_off"]:
            raise SystemExit(f"{name}: {row['elements_off']} elements differ from the reference")
        if "fails" in row:
            print(f"{name:36}{row['fails']}", flush=True)
            continue
        rate = {shape: 1e-3 * row["bytes_per_element"] * shapes[shape] / us for shape, us in row["us"].items()}
        row["share"] = {shape: gb_per_s / copy_gb_per_s for shape, gb_per_s in rate.items()}
        cells = "".join(f"{row['us'][shape]:12.1f} us {row['share'][shape]:5.0%} " for shape in shapes)
        print(f"{name:36}{cells}{row['elements_off']:>16,}", flush=True)
    return {"copy_gb_per_s": copy_gb_per_s, "counted_shape": COUNTED_SHAPE, "rows": rows}


# Linear layers: builders from the BF16 layer, whose weight they share.


def our_linear(dense: torch.nn.Linear) -> Forward:
    layer = fp4engine.Linear(dense.in_features, dense.out_features, bias=False, device="meta")
    layer.weight = dense.weight

    def forward(inp: Tensor) -> Tensor:
        with fp4engine.autocast(recipe=RECIPE):
            return layer(inp)

    return forward


def torchao_mxfp4(dense: torch.nn.Linear) -> Forward:
    from torchao.prototype.qat import MXFakeQuantizeConfig, MXFakeQuantizedLinear

    return MXFakeQuantizedLinear.from_linear(dense, MXFakeQuantizeConfig(), MXFakeQuantizeConfig())


def torchao_nvfp4_qat(dense: torch.nn.Linear) -> Forward:
    from torchao.prototype.qat import NVFP4FakeQuantizeConfig, NVFP4FakeQuantizedLinear

    return NVFP4FakeQuantizedLinear.from_linear(dense, NVFP4FakeQuantizeConfig(), NVFP4FakeQuantizeConfig())


def torchao_nvfp4_training(dense: torch.nn.Linear) -> Forward:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    return NVFP4Linear.from_linear(dense)


def torchao_nvfp4(dense: torch.nn.Linear) -> Forward:
    """torchao's own product of two NVFP4 tensors where there is no FP4 unit: both decoded, no gradient."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def cast(x: Tensor) -> Tensor:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))

    @torch.no_grad()
    def forward(inp: Tensor) -> Tensor:
        return torch.mm(cast(inp), cast(dense.weight).t())

    return forward


def microxcaling(dense: torch.nn.Linear, custom_cuda: bool = False) -> Forward:
    import mx

    formats = {"w_elem_format": "fp4_e2m1", "a_elem_format": "fp4_e2m1", "scale_bits": 8, "block_size": 32}
    specs = mx.finalize_mx_specs({**formats, "bfloat": 16, "round": "even", "custom_cuda": custom_cuda})
    layer = mx.Linear(dense.in_features, dense.out_features, bias=False, mx_specs=specs)
    layer.weight = dense.weight
    return layer


BASELINE = "nn.Linear, BF16"
LINEARS: dict[str, Callable[[torch.nn.Linear], Forward]] = {
    BASELINE: lambda dense: dense,
    "fp4engine, NVFP4": our_linear,
    "torchao, NVFP4, forward only": torchao_nvfp4,
    "torchao, NVFP4, forward only, compiled": lambda dense: torch.compile(torchao_nvfp4(dense), dynamic=False),
    "torchao, NVFP4 training": torchao_nvfp4_training,
    "torchao, NVFP4 QAT": torchao_nvfp4_qat,
    "torchao, MXFP4 QAT": torchao_mxfp4,
    "torchao, MXFP4 QAT, compiled": lambda dense: torch.compile(torchao_mxfp4(dense), dynamic=False),
    "microxcaling, MXFP4": microxcaling,
    "microxcaling, MXFP4, its CUDA": lambda dense: microxcaling(dense, custom_cuda=True),
}


def run_step(layer: Forward, dense: torch.nn.Linear, inp: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and weight gradient; none where the output carries no gradient. Nothing accumulates."""
    output = layer(inp)
    if output.requires_grad:
        output.backward(grad)
    gradient = dense.weight.grad
    dense.weight.grad = inp.grad = None
    return output.detach(), gradient


def distance(got: Tensor | None, want: Tensor | None) -> float | None:
    if got is None or want is None:
        return None
    return float((got.float() - want.float()).norm() / want.float().norm())


def measure_linears(fan_in: int, fan_out: int) -> list[dict[str, Any]]:
    """Distances from BF16 and milliseconds of every linear that runs."""
    inp, grad = problem(fan_in, fan_out)
    dense = make(torch.nn.Linear, fan_in, fan_out)
    want = run_step(dense, dense, inp, grad)
    layers: dict[str, Forward] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, build in LINEARS.items():
        try:
            layer = build(dense)
            got = run_step(layer, dense, inp, grad)
        except Exception as error:
            if is_ours(name):
                raise
            dense.weight.grad = inp.grad = None
            rows[name] = {"fails": reason(error)}
            continue
        off = [distance(ours, bf16) for ours, bf16 in zip(got, want, strict=True)]
        rows[name] = {"output_off": off[0], "weight_gradient_off": off[1]}
        layers[name] = layer
    flops = 2.0 * inp.shape[0] * fan_in * fan_out
    trained = [name for name in layers if rows[name]["weight_gradient_off"] is not None]
    forwards = {name: partial(layer, inp) for name, layer in layers.items()}
    steps = {name: partial(run_step, layers[name], dense, inp, grad) for name in trained}
    for what, variants, work in (("forward", forwards, flops), ("step", steps, 3 * flops)):
        times = time_in_turn(variants, repeats_for(work))
        for name, ms in times.items():
            rows[name][f"{what}_ms"] = ms
            rows[name][f"{what}_ratio"] = ms / times[BASELINE]
    return [{"name": name, "fan_in": fan_in, "fan_out": fan_out, **row} for name, row in rows.items()]


def is_ours(name: str) -> bool:
    """Whether a failure ends the run; a peer's is its row."""
    return name.startswith(("fp4engine", BASELINE))


def reason(error: Exception) -> str:
    """One line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def print_linears(rows: list[dict[str, Any]]) -> None:
    heads = ("forward ms", "x BF16", "step ms", "x BF16", "y off", "dw off")
    columns = ("forward_ms", "forward_ratio", "step_ms", "step_ratio", "output_off", "weight_gradient_off")
    print(f"\n{'linear {fan_in}x{fan_out}'.format(**rows[0]):40}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        cells = [f"{row[column]:11.3f}" if row.get(column) is not None else f"{'-':>11}" for column in columns]
        print(f"{row['name']:40}" + row.get("fails", "".join(cells)), flush=True)


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--peers", type=Path, help="folder of packages, put before all others")
    parser.add_argument("--quick", action="store_true", help="one layer, and without the rows that compile for minutes")
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.insert(0, str(arguments.peers.resolve()))
    facts = environment() | {"peers": {name: version(name) for name in DISTRIBUTIONS}}
    print(facts, flush=True)
    check()
    if arguments.quick:
        for table in (LINEARS, FAKE_QUANTIZERS):
            for name in [name for name in table if name.endswith(("compiled", "its CUDA"))]:
                del table[name]
    linears = []
    for fan_in, fan_out in LAYERS[:1] if arguments.quick else LAYERS:
        rows = measure_linears(fan_in, fan_out)
        print_linears(rows)
        linears += rows
        torch.cuda.empty_cache()
    fake = fake_quantize_table()
    write_json(arguments.out / "peers.json", {"environment": facts, "linears": linears, "fake_quantize": fake})


if __name__ == "__main__":
    main()
