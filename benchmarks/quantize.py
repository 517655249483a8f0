"""Quantize, amax and dequantize kernels as a share of the device's own copy bandwidth.

    python benchmarks/quantize.py [--quick]
    python benchmarks/quantize.py --small        # calls on a small tensor alone, in eager code and in compiled graphs

Parity comes first: every kernel that is timed is held to the reference, byte for byte, and one difference ends the run
before a speed is printed. Times are medians over replays of a CUDA graph that walks through inputs larger than L2;
bytes are what the operation must move (input once, outputs once). Results go to benchmarks/results/ as JSON and PNG.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from timing import argument_parser, environment, graph_seconds, host_microseconds, write_json
from torch import Tensor

from fp4engine import ops, reference
from fp4engine.formats import CastSpec, Rotation, RoundingMode
from fp4engine.kernels.amax import amax
from fp4engine.kernels.casts import resolve_cast
from fp4engine.kernels.dequantize import decode, dequantize
from fp4engine.kernels.launch import meta_of
from fp4engine.kernels.source import Asked

STREAM = 32
PLAIN = CastSpec()
ROTATED = CastSpec(rotation=Rotation())
SR = CastSpec(rounding=RoundingMode.STOCHASTIC)
SR_ROTATED = SR.replace(rotation=Rotation())
TILE = CastSpec(block=(16, 16))
CASTS = {
    "rowwise": (PLAIN, None),
    "rowwise SR": (SR, None),
    "row+col RHT": (PLAIN, ROTATED),
    "row+col RHT SR": (SR, SR_ROTATED),
    "row+col 16x16": (TILE, TILE),
}
SHAPES = [(tokens, width) for width in (4096, 14336, 8192, 28672) for tokens in (2048, 8192, 16384)]
"""Activations of Llama-3-8B (4096, 14336) and 70B (8192, 28672)."""
AIMS = {
    "amax rowwise": 0.8, "amax row+col RHT": 0.8, "rowwise": 0.75, "row+col RHT": 0.45, "row+col RHT SR": 0.35,
    "row+col 16x16": 0.45, "dequantize": 0.8, "amax + row+col RHT": 0.5,
}  # fmt: skip
"""Required shares of the copy bandwidth from [8192, 4096] up."""


def check_parity(rng: Tensor) -> list[str]:
    """Names of casts whose bytes differ from the reference's, on a shape that the timed kernels are compiled for."""
    wrong = []
    x = torch.randn(512, 2048, device="cuda").bfloat16()
    for (name, (row, col)), form in itertools.product(CASTS.items(), ("codes", "values")):
        amaxes = amax(x, row, col)
        for given in (amaxes, (None, None)):
            got = cast(x, row, col, given, rng, form)
            for side, (spec, operand) in enumerate(((row, x), (col, x.T))):
                if spec is None:
                    continue
                want = reference.quantize(operand, spec, rng=rng, stream=STREAM | side)
                values = reference.decode(want.codes, want.scale_inv, spec).bfloat16()
                pairs = [
                    (amaxes[side], want.amax),
                    (got[side].amax, want.amax),
                    (got[side].data, want.codes if form == "codes" else values),
                    (decode(want.codes, want.scale_inv)[0], values),
                ]
                if form == "codes":
                    pairs.append((got[side].scale_inv, want.scale_inv))
                if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                    wrong.append(f"{name}, {form}, amax {'taken' if given[0] is None else 'given'}, side {side}")
    return wrong


def cast(x, row, col, amaxes, rng=None, form="codes"):
    """The operands of x by the kernels; an amax that is None is taken on the way."""
    return ops.quantize(
        x, row, col, rowwise_amax=amaxes[0], columnwise_amax=amaxes[1], rng=rng, stream=STREAM,
        rowwise_form=form, columnwise_form=form, backend="triton",
    )  # fmt: skip


def operations(x: Tensor, rng: Tensor) -> dict[str, tuple[Callable[[Tensor], object], float]]:
    """Operation and bytes per element, by name."""
    amaxes = amax(x, PLAIN, ROTATED)
    operand, _ = cast(x, PLAIN, None, amaxes)
    codes, scale = operand.data, operand.scale_inv
    read, code, value = 2.0, 0.5625, 2.0625

    table: dict[str, tuple[Callable[[Tensor], object], float]] = {
        "amax rowwise": (lambda y: amax(y, PLAIN, None), read),
        "amax row+col RHT": (lambda y: amax(y, PLAIN, ROTATED), read),
        "row+col RHT, values": (lambda y: cast(y, PLAIN, ROTATED, amaxes, rng, "values"), read + 2 * value),
        "amax + row+col RHT": (lambda y: cast(y, PLAIN, ROTATED, (None, None)), 2 * read + 2 * code),
        "dequantize": (
            lambda y: dequantize(codes, scale, amaxes[0], PLAIN.key, x.shape[1], torch.bfloat16),
            code + 2.0,
        ),
        "decode": (lambda y: decode(codes, scale), code + 2.0),
    }
    for name, (row, col) in CASTS.items():
        table[name] = (
            lambda y, row=row, col=col: cast(y, row, col, amaxes, rng),
            read + code * ((row is not None) + (col is not None)),
        )
    return table


def measure(shape: tuple[int, int], rng: Tensor) -> dict[str, float]:
    """GB/s by operation, "copy" among them."""
    elements = shape[0] * shape[1]
    count = max(2, -(-(256 << 20) // (2 * elements)))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    out = torch.empty_like(inputs[0])
    rates = {"copy": 4 * elements / graph_seconds(out.copy_, inputs) / 1e9}
    for name, (run, per_element) in operations(inputs[0], rng).items():
        rates[name] = per_element * elements / graph_seconds(run, inputs) / 1e9
    return rates


def parts_of_a_call(x: Tensor, one: Tensor) -> dict[str, Callable[[], object]]:
    """What a rowwise quantize cannot do without: two outputs, and the launch, resolved before, that allocates them."""
    inputs = (x, one, None, None)
    asked = Asked(PLAIN.key, "", "codes", "codes", "triton", "", False, x.dtype)
    launch = resolve_cast(tuple(map(meta_of, inputs)), x.device, asked, False, STREAM)
    return {
        "two torch.empty": lambda: [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in launch.outputs],
        "launch": lambda: launch(*inputs),
    }


def casts_in_a_graph(x: Tensor, one: Tensor, count: int) -> Callable[[], object]:
    """A compiled graph of ``count`` rowwise casts. No two of them are one, since each is of a stream of its own."""

    def casts(y: Tensor, amax: Tensor) -> list[Tensor]:
        made = [
            ops.quantize(y, PLAIN, None, rowwise_amax=amax, stream=2 * index, backend="triton")[0]
            for index in range(count)
        ]
        return [tensor for operand in made for tensor in (operand.data, operand.scale_inv)]

    return partial(torch.compile(casts, fullgraph=True), x, one)


def overhead() -> dict[str, float]:
    """Microseconds per call on [128, 1024]: on the host in a loop or a compiled graph, and on the device in a graph."""
    x = torch.randn(128, 1024, device="cuda").bfloat16()
    one, two = torch.ones(1, device="cuda"), torch.ones(1, device="cuda")
    calls: dict[str, Callable[[Tensor], object]] = {
        "relu": torch.relu,
        "quantize rowwise": lambda y: cast(y, PLAIN, None, (one, None)),
        "quantize row+col RHT": lambda y: cast(y, PLAIN, ROTATED, (one, two)),
        "amax + quantize row+col RHT": lambda y: cast(y, PLAIN, ROTATED, (None, None)),
        "amax rowwise": lambda y: amax(y, PLAIN, None),
    }
    graphs = {f"graph of {count}": casts_in_a_graph(x, one, count) for count in (1, 9)}
    host = host_microseconds(
        {name: partial(call, x) for name, call in calls.items()} | parts_of_a_call(x, one) | graphs
    )
    host["quantize rowwise, compiled"] = (host.pop("graph of 9") - host.pop("graph of 1")) / 8
    device = {name: graph_seconds(call, [x], 200) * 1e6 for name, call in calls.items()}
    return {f"{name}, host": t for name, t in host.items()} | {f"{name}, device": t for name, t in device.items()}


def report(small: dict[str, float]) -> None:
    """Print what :func:`overhead` found."""
    print("us per call on [128, 1024]:", "  ".join(f"{name} {t:.1f}" for name, t in small.items()))


def draw(rows: list[dict], path: Path) -> None:
    """Shares of the copy bandwidth by operation, one mark per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in rows[0]["share"] if name != "copy"]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    colors = plt.colormaps["turbo"].resampled(len(rows) + 1)  # one per shape; the default cycle has ten
    for place, row in enumerate(sorted(rows, key=lambda row: row["shape"][0] * row["shape"][1])):
        label = "{} x {}".format(*row["shape"])
        axes.plot([row["share"][n] for n in names], range(len(names)), "o", color=colors(place), label=label)
    for y, name in enumerate(names):
        if name in AIMS:
            axes.plot([AIMS[name]] * 2, [y - 0.35, y + 0.35], "k-")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("share of copy bandwidth (bar: required from 8192 x 4096 up)")
    figure.legend(loc="outside right upper", fontsize=8, title="shape, small to large", title_fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes instead of twelve")
    parser.add_argument("--small", action="store_true", help="time only calls on a small tensor, and write nothing")
    arguments = parser.parse_args()
    rng = torch.tensor([1234, 5], device="cuda")
    wrong = check_parity(rng)
    if wrong:
        sys.exit("parity is red, no speeds: " + "; ".join(wrong))
    print("parity: every timed cast equals the reference")
    if arguments.small:
        report(overhead())
        return
    rows = []
    for shape in [(2048, 4096), (8192, 4096), (16384, 8192)] if arguments.quick else SHAPES:
        rates = measure(shape, rng)
        rows.append({"shape": shape, "gb_per_s": rates})
        torch.cuda.empty_cache()
    best_copy = max(row["gb_per_s"]["copy"] for row in rows)
    for row in rows:
        row["share"] = {name: rate / best_copy for name, rate in row["gb_per_s"].items()}
        print(row["shape"], "  ".join(f"{name} {share:.2f}" for name, share in row["share"].items()))
    small = overhead()
    report(small)
    record = {"environment": environment(), "copy_gb_per_s": best_copy, "rows": rows, "us_per_call": small}
    write_json(arguments.out / "quantize.json", record)
    draw(rows, arguments.out / "quantize.png")


if __name__ == "__main__":
    main()
