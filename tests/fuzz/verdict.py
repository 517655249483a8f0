"""Whether a case has the right bytes, or is refused by name where it has to be."""

import threading
import traceback
import warnings
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fp4engine
from tests.fuzz import moves
from tests.fuzz.cases import Case, Results, by_engine, by_hand, draw, elsewhere, make_batches, make_module, seen_write

STALE = "was written to while its codes were cached"
"""What a device that nobody waits for says of a write that moves neither a weight's version nor its memory."""


def differences(got: Results, want: Results) -> list[str]:
    """What is not the same bytes; all NaN are one."""
    wrong = [f"{name} is missing" for name in want.keys() - got.keys()]
    wrong += [f"{name} is there" for name in got.keys() - want.keys() if not name.startswith("main_grad")]
    for name in sorted(got.keys() & want.keys()):
        left, right = got[name], want[name]
        if not isinstance(left, Tensor):
            wrong += [] if left == right else [f"{name}: {left} instead of {right}"]
        elif left.shape != right.shape or left.dtype != right.dtype:
            wrong.append(f"{name}: {left.dtype} {tuple(left.shape)} instead of {right.dtype} {tuple(right.shape)}")
        elif not torch.equal(bits(left), bits(right)):
            count = int((bits(left) != bits(right)).sum())
            wrong.append(f"{name}: {count} of {left.numel()} numbers differ")
    return wrong


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor's numbers, in which every NaN is the same one."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    plain[plain.isnan()] = float("nan")
    return plain.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])


def refusal(case: Case) -> str:
    """What the engine says where it refuses a case by name; empty where it has to compute it."""
    if case.checkpoint in ("torch", "torch told") and draws_in_forward(case) and repeats(case):
        return "which torch.utils.checkpoint does not repeat"
    return ""


def repeats(case: Case) -> bool:
    """Whether backward asks for anything that forward kept: where only biases want gradients, nothing is."""
    if case.how == "none":
        return False
    experts = [f"{index}" for index in range(len(case.options))] if case.module == "GroupedLinear" else [""]
    if case.module not in ("Linear", "Linear twice", "GroupedLinear"):
        return True
    for expert in experts:
        own = {"x", f"weight{expert}", f"bias{expert}"}
        runs = case.how not in ("grad", "inputs") or own & case.wanted
        if runs and not own - {f"bias{expert}"} <= case.frozen:
            return True
    return False


def draws_in_forward(case: Case) -> bool:
    specs = []
    for role in ("input", "weight"):
        casts = case.recipe.casts(role)
        specs += [casts.rowwise, casts.columnwise if casts.columnwise_source == "original" else None]
    return any(spec is not None and spec.is_stochastic for spec in specs)


def plain(case: Case) -> Case:
    """The same step without all that must not change a byte."""
    writes = "none" if case.writes == "none" else seen_write(case.writes)
    return replace(
        case, moves=(), seeding="told", caching="none", checkpoint="none", writes=writes, elsewhere=False, threads=1
    )


def is_stale(case: Case) -> bool:
    """Whether a weight may be written to, while it is cached, in a way that only its bytes show."""
    return case.caching != "none" and case.writes in moves.WRITES and case.microbatches > 1


def run(case: Case, device: str | None = None) -> list[str]:
    """What is wrong: empty if every output, gradient and buffer has the bytes of the step by hand.

    Args:
        device: where to run the case, against :func:`plain` there: kernels add in an order of their own.
    """

    def prepared() -> tuple[torch.nn.Module, list[tuple[Tensor, Tensor]]]:
        rng = torch.Generator().manual_seed(case.seed)
        return make_module(case, rng, device or "cpu"), make_batches(case, rng, device or "cpu")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if device is None:
            want = by_hand(case, *prepared())
        else:
            case = replace(case, threads=1) if is_stale(case) else case
            moves.seed("told", case.seed, device)
            want = by_engine(plain(case), *prepared()) | {"draws": _draws(device)}
        moves.seed(case.seeding, case.seed, device or "cpu")
        found: list[Results] = [{} for _ in range(case.threads)]
        cores = torch.get_num_threads()

        def work(index: int) -> None:
            torch.set_num_threads(cores)  # a new thread has PyTorch's default, by which sums in FP64 differ
            found[index] = by_engine(case, *prepared(), results=found[index])

        message = refusal(case)
        try:
            if case.threads == 1:
                work(0)
            else:
                threads = [threading.Thread(target=elsewhere, args=(partial(work, i),)) for i in range(case.threads)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        except RuntimeError as error:
            if message and message in str(error):
                return []
            if device is not None and is_stale(case) and STALE in str(error):
                return [
                    f"{name} looks right" for name, value in found[0].items() if _looks_right(value, want.get(name))
                ]
            raise
        if message:
            return [f"it is computed, and has to be refused: {message}"]
        for results in found:
            results["draws"] = _draws(device or "cpu")
    return [difference for results in found for difference in differences(results, want)]


def failure(seed: int, index: int, device: str | None = None) -> str:
    """What is wrong with a case, and how to run it again; empty if nothing is."""
    case = draw(seed, index)
    try:
        wrong = run(case, device)
    except Exception:
        wrong = [traceback.format_exc()]
    if not wrong:
        return ""
    where = f" --device {device}" if device else ""
    again = f"python -m tests.fuzz --seed {seed} --first {index} --cases 1{where}"
    return "\n  ".join([f"case {index}: {case}", *wrong, f"again: {again}"])


def _draws(device: str) -> int:
    drawn = fp4engine.get_rng_state()["draws"]
    return max((count for key, count in drawn.items() if key.partition(":")[0] == device.partition(":")[0]), default=0)


def _looks_right(value: Tensor | None, want: Tensor | None) -> bool:
    """Whether a number is finite and not what it has to be."""
    if value is None or want is None or value.shape != want.shape:
        return value is not want
    return bool(((bits(value) != bits(want)) & value.detach().cpu().isfinite()).any())
