"""What one GPU sends in a training step, by collective, as a Markdown table: a prediction, nothing is run.

    python benchmarks/wire.py

Needs no GPU. BF16 parameters, one sequence of 8,192 tokens on each group of eight GPUs that share every layer (TP), and
FSDP over the groups, whose weights are gathered in BF16 or as FP4 codes.
"""

from fp4engine.estimate import MODELS, estimate
from fp4engine.recipe import zoo

TP, TOKENS = 8, 8192
HEADER = """| model | GPUs | FSDP x TP | weights, BF16 | weights, FP4 codes | gradients, FP32 | activations, BF16 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    print(HEADER)
    for model in ("Llama-3-70B", "Llama-3.1-405B"):
        for fsdp in (8, 64, 512):
            step = {"parameters": "bf16", "sequence": TOKENS, "checkpointing": True, "fsdp": fsdp, "tp": TP}
            whole, codes = (
                estimate(MODELS[model], recipe=zoo.make("nvfp4"), fp4_all_gather=as_codes, **step).wire
                for as_codes in (False, True)
            )
            sizes = (whole["weights"], codes["weights"], whole["gradients"], whole["activations"])
            columns = " | ".join(f"{size / 2**30:.1f} GiB" for size in sizes)
            print(f"| {model} | {fsdp * TP:,} | {fsdp} x {TP} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
