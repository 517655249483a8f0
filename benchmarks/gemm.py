"""GEMM alone: FP4 values with the two-level epilogue beside cuBLAS BF16, in one run.

    python benchmarks/gemm.py [--quick] [--out benchmarks/results]

Every problem is checked before it is timed; a wrong one stops the run. Rows:

    cublas       torch.mm on BF16 Gaussian data: what a BF16 layer runs, the denominator of every ratio
    same data    torch.mm on the decoded values, without alpha: shows that data changes the clock, not the kernel
    gemm         fp4engine.kernels.gemm on decoded values, alpha in the epilogue
    decode+gemm  both operands decoded from codes first
    accumulate   gemm added into an FP32 buffer (wgrad only)

The variants of one problem take turns, so that a GPU at its power limit treats them alike.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from timing import argument_parser, environment, repeats_for, time_in_turn, write_json

from fp4engine import reference
from fp4engine.formats import CastSpec
from fp4engine.kernels.dequantize import decode
from fp4engine.kernels.gemm import gemm

TOKENS = 8192
MODELS = {
    "Llama-3-8B": [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 6144)],
    "Llama-3-70B": [(8192, 8192), (8192, 28672), (28672, 8192), (8192, 10240)],
}
"""(in_features, out_features) of the linear layers."""
SMALL_WGRADS = [(384, 384, 65536), (2048, 384, 65536), (768, 768, 32768), (4096, 768, 32768), (768, 768, 8192)]
"""M, N, K of weight gradients of small models: few tiles, long sums."""
SPEC = CastSpec()
NUMERATOR = SPEC.numerator**2


def problems(quick: bool) -> list[dict]:
    """M, N, K of the three GEMMs of each layer; all contract the last axis of both operands."""
    rows = []
    for model, layers in MODELS.items():
        for fan_in, fan_out in layers[:1] if quick else layers:
            sizes = {
                "fprop": (TOKENS, fan_out, fan_in),
                "dgrad": (TOKENS, fan_in, fan_out),
                "wgrad": (fan_out, fan_in, TOKENS),
            }
            rows += [dict(model=model, layer=f"{fan_in}x{fan_out}", gemm=name, mnk=mnk) for name, mnk in sizes.items()]
    return rows


def operand(rows: int, cols: int):
    """Codes of Gaussian data and the BF16 values that they mean."""
    cast = reference.quantize(torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16), SPEC)
    return cast, reference.decode(cast.codes, cast.scale_inv, SPEC).bfloat16()


def check(left, right, left_amax, right_amax) -> float:
    """Relative Frobenius error of 256 rows of the product against float64; must be at most twice torch's own."""
    one = torch.ones(1, device="cuda")
    product = gemm(left, right, one, one, 1.0, out_dtype=torch.float32)
    rows = torch.randperm(left.shape[0], device="cuda")[:256]
    exact = left[rows].double() @ right.double().T
    theirs = torch.mm(left, right.T, out_dtype=torch.float32)[rows]
    error = float((product[rows] - exact).norm() / exact.norm())
    torch_error = float((theirs - exact).norm() / exact.norm())
    if not error <= 2 * torch_error + 1e-8:
        raise SystemExit(f"wrong product: error {error:.2e}, torch's {torch_error:.2e}")
    rounded = gemm(left, right, left_amax, right_amax, NUMERATOR)
    if not torch.equal(rounded, (product * reference.gemm_factor(left_amax, right_amax, NUMERATOR)).bfloat16()):
        raise SystemExit("BF16 output is not the scaled FP32 product rounded once")
    return error


def measure(problem: dict) -> dict:
    m, n, k = problem["mnk"]
    (left_cast, left), (right_cast, right) = operand(m, k), operand(n, k)
    scales = (left_cast.amax.view(1), right_cast.amax.view(1))
    error = check(left, right, *scales)
    dense_left = torch.randn(m, k, device="cuda").bfloat16()
    dense_right = torch.randn(n, k, device="cuda").bfloat16()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    codes = (left_cast.codes, left_cast.scale_inv, right_cast.codes, right_cast.scale_inv)
    if not all(map(torch.equal, decode(*codes), (left, right))):
        raise SystemExit("decode differs from the reference")
    variants: dict[str, Callable] = {
        "cublas": lambda: torch.mm(dense_left, dense_right.T, out=out),
        "same data": lambda: torch.mm(left, right.T, out=out),
        "gemm": lambda: gemm(left, right, *scales, NUMERATOR),
        "decode": lambda: decode(*codes),
        "decode+gemm": lambda: gemm(*decode(*codes), *scales, NUMERATOR),
    }
    if problem["gemm"] == "wgrad":
        buffer = torch.zeros(m, n, device="cuda")
        variants["accumulate"] = lambda: gemm(left, right, *scales, NUMERATOR, out=buffer)
    flops = 2.0 * m * n * k
    milliseconds = time_in_turn(variants, repeats_for(flops))
    ratios = {name: milliseconds["cublas"] / ms for name, ms in milliseconds.items() if name != "decode"}
    rates = {name: flops / ms / 1e9 for name, ms in milliseconds.items() if name != "decode"}
    return dict(**problem, error=error, milliseconds=milliseconds, tflops=rates, ratio=ratios)


def table(results: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in results for name in row["ratio"]))
    lines = [f"{'layer':16s} {'gemm':6s} {'cublas':>9s}  " + "  ".join(f"{name:>12s}" for name in names[1:])]
    for row in results:
        cells = [f"{row['ratio'][name]:12.3f}" if name in row["ratio"] else " " * 12 for name in names[1:]]
        lines.append(f"{row['layer']:16s} {row['gemm']:6s} {row['tflops']['cublas']:6.0f} TF  " + "  ".join(cells))
    for name in names[1:]:
        ratios = [row["ratio"][name] for row in results if name in row["ratio"]]
        lines.append(f"{name}: lowest {min(ratios):.3f}, median {statistics.median(ratios):.3f} of cuBLAS BF16")
    return "\n".join(lines)


def plot(results: list[dict], facts: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in ("cublas", "gemm", "decode+gemm") if name in results[0]["tflops"]]
    figure, axis = pyplot.subplots(figsize=(13, 4.5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(results))]
        label = {"cublas": "cuBLAS BF16", "gemm": "FP4 values, GEMM alone"}.get(name, "decode both operands + GEMM")
        axis.bar(places, [row["tflops"][name] for row in results], width, label=label)
    # The layer's name stands once, under the middle of its three GEMMs.
    ticks = [row["gemm"] + (f"\n{row['layer']}" if row["gemm"] == "dgrad" else "") for row in results]
    axis.set_xticks(range(len(results)), ticks, fontsize=7)
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{facts['gpu']}, {TOKENS:,} tokens, torch {facts['torch']}, triton {facts['triton']}", pad=24)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer per model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts = environment()
    results = []
    for problem in problems(arguments.quick):
        results.append(measure(problem))
        print(problem["layer"], problem["gemm"], {k: round(v, 3) for k, v in results[-1]["ratio"].items()}, flush=True)
    small = [
        measure(dict(model="small", layer=f"{n}x{m}, {k}", gemm="wgrad", mnk=(m, n, k)))
        for m, n, k in SMALL_WGRADS[:: 4 if arguments.quick else 1]
    ]
    write_json(arguments.out / "gemm.json", dict(environment=facts, results=results, small=small))
    plot(results, facts, arguments.out / "gemm.png")
    print(facts)
    print(table(results))
    print("weight gradients of small layers, in_features x out_features, tokens")
    print(table(small))


if __name__ == "__main__":
    main()
