"""Tokens sent to other ranks as codes and scales, on one, two and four processes (gloo, CPU)."""

import importlib
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fp4engine
from fp4engine import IdentityQuantizer, NVFP4Quantizer, Quantizer, QuantizerRole, make_quantizer, ops
from fp4engine.distributed import all_to_all_tokens
from fp4engine.distributed import tokens as dispatching
from fp4engine.formats import (
    E2M1,
    E4M3,
    FP32,
    UE5M3,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    Signs,
    fp8_block,
    mx,
)
from fp4engine.recipe import DelayedScaling, zoo
from tests.ranks import process_group, spawn

WIDTH = 40
NAN, INF = float("nan"), float("inf")
NVFP4 = NVFP4Quantizer(row_scaled_nvfp4=True)
STOCHASTIC = NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True)
ROWS = CastSpec(outer=Outer.ROW)
TOKENWISE = {  # and the bytes of a token, of 40 features that most pad
    "nvfp4": (NVFP4, 24 + 3 + 4),
    "rotated": (Quantizer(ROWS.replace(rotation=Rotation(32))), 32 + 4 + 4),
    "corrected": (Quantizer(ROWS.replace(correction=Correction.EDEN16, scale_bound=256.0)), 24 + 3 + 4),
    "1x128": (Quantizer(CastSpec(outer=Outer.BLOCK128)), 64 + 8 + 4),
    "ue5m3": (Quantizer(CastSpec(scale=UE5M3, outer=Outer.NONE)), 24 + 3),
    "mxfp4": (Quantizer(mx(E2M1)), 32 + 2),
    "mxfp8": (Quantizer(mx(E4M3)), 64 + 2),
    "fp8_block": (Quantizer(fp8_block(E4M3, 1, power_of_two=False)), 128 + 4),
    "fp8": (Quantizer(CastSpec(E4M3, (0, 0), FP32, scale_bound=1.0, target=448.0, outer=Outer.ROW)), 48 + 4),
    "high precision": (IdentityQuantizer(), 2 * WIDTH),
    "none": (None, 2 * WIDTH),
}


# What ranks send, all of which each of them can compute


def sent_by(rank: int, world: int) -> list[int]:
    """Rows for each rank; the last rank sends none, and the first of four receives none."""
    to = [(rank + 2 * other) % 4 + 1 for other in range(world)]
    if world == 4:
        to[0] = 0
    return [0] * world if rank == world - 1 else to


def tokens_of(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return (torch.randn(sum(sent_by(rank, world)), WIDTH) * torch.logspace(-2, 2, WIDTH)).bfloat16()


def cast(quantizer: Quantizer | None, tokens: torch.Tensor, **draw) -> torch.Tensor:
    return tokens if quantizer is None else quantizer.quantize(tokens, columnwise=False, **draw).dequantize()


def arriving(rank: int, world: int, of) -> torch.Tensor:
    """The rows for ``rank`` of ``of(sender)``, sender after sender."""
    parts = [of(sender).split(sent_by(sender, world))[rank] for sender in range(world)]
    return torch.cat(parts)


def dispatch(rank: int, world: int, quantizer=None, grad_quantizer=None, group=None, tokens=None):
    """What arrives, and this rank's tokens as a leaf."""
    received = [sent_by(sender, world)[rank] for sender in range(world)]
    x = tokens_of(rank, world) if tokens is None else tokens
    x = x.requires_grad_()
    y = all_to_all_tokens(x, received, sent_by(rank, world), group, quantizer=quantizer, grad_quantizer=grad_quantizer)
    return y, x


def arrive(rank: int, world: int):
    """Casts whose tokens do not arrive as they were cast, or whose gradients do not come back as they are."""
    wrong = []
    for name, (quantizer, _) in TOKENWISE.items():
        fp4engine.manual_seed(5)
        y, x = dispatch(rank, world, quantizer)
        fp4engine.manual_seed(5)
        draw = {"rng": ops.next_draw(y.device)} if name == "corrected" else {}

        def of(sender, quantizer=quantizer, draw=draw):
            own = {"rank": sender} if draw else {}
            return cast(quantizer, tokens_of(sender, world), **draw, **own)

        if y.dtype != torch.bfloat16 or not torch.equal(y, arriving(rank, world, of)):
            wrong.append(name)
        torch.manual_seed(20 + rank)
        y.backward(torch.randn_like(y))
        if not torch.equal(x.grad, returning(rank, world, lambda grad, receiver: grad)):
            wrong.append(f"gradient of {name}")
    return wrong


def returning(rank: int, world: int, cast_by) -> torch.Tensor:
    """The gradients of this rank's tokens, each receiver's of which ``cast_by(gradient, receiver)`` has cast."""
    parts = []
    for receiver in range(world):
        counts = [sent_by(sender, world)[receiver] for sender in range(world)]
        torch.manual_seed(20 + receiver)
        grad = torch.randn(sum(counts), WIDTH, dtype=torch.bfloat16)
        parts.append(cast_by(grad, receiver).split(counts)[rank])
    return torch.cat(parts)


def gradients(rank: int, world: int):
    """Whether gradients are cast by their sender's own random bits."""
    y, x = dispatch(rank, world, NVFP4, STOCHASTIC)
    fp4engine.manual_seed(7)
    torch.manual_seed(20 + rank)
    y.backward(torch.randn_like(y))
    fp4engine.manual_seed(7)
    rng = ops.next_draw(y.device)
    expected = returning(rank, world, lambda grad, receiver: cast(STOCHASTIC, grad, rng=rng, rank=receiver))
    return torch.equal(x.grad, expected)


def wire(rank: int, world: int):
    """``{cast: bytes handed to collectives, per row, there and back}``."""
    found, run = {}, dist.all_to_all_single
    for name, (quantizer, _) in TOKENWISE.items():
        handed = []

        def watched(output, rows, *arguments, handed=handed, **options):
            handed.append(rows.nbytes // max(len(rows), 1))
            return run(output, rows, *arguments, **options)

        with mock.patch.object(dist, "all_to_all_single", watched):
            y, _ = dispatch(rank, world, quantizer, quantizer)
            y.backward(torch.ones_like(y))
        found[name] = handed, bool(len(tokens_of(rank, world))), bool(len(y))
    return found


def not_finite(rank: int, world: int):
    """Whether a NaN, or an Inf, arrives with the tokens that have one, and all others arrive as ever."""
    found = []
    for value in (NAN, INF, -INF):
        spoilt = [tokens_of(sender, world) for sender in range(world)]
        for tokens in spoilt:
            tokens[::3, 5] = value
        y, _ = dispatch(rank, world, NVFP4, tokens=spoilt[rank].clone())
        clean, _ = dispatch(rank, world, NVFP4)
        whole = arriving(rank, world, lambda sender, spoilt=spoilt: spoilt[sender].isfinite().all(1))
        found.append(not y[~whole].isfinite().any() and torch.equal(y[whole], clean[whole]))
    return found


def groups(rank: int, world: int):
    """Whether the first two ranks exchange tokens by themselves, and what the others are told who try."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        y, _ = dispatch(rank, 2, NVFP4, group=pair)
        return torch.equal(y, arriving(rank, 2, lambda sender: cast(NVFP4, tokens_of(sender, 2))))
    with pytest.raises(ValueError, match="this process is not in group"):
        all_to_all_tokens(torch.randn(4, WIDTH), [2, 2], [2, 2], pair)
    return True


def compiled(rank: int, world: int):
    """Whether compiled code sends and returns what eager code does."""
    received = [sent_by(sender, world)[rank] for sender in range(world)]

    def send(x):
        y = all_to_all_tokens(x * 2, received, sent_by(rank, world), quantizer=NVFP4, grad_quantizer=STOCHASTIC)
        return y * 3

    results = []
    for run in (torch.compile(send, fullgraph=True, backend="aot_eager"), send):
        dispatching._known.clear()  # as if the group were new
        fp4engine.manual_seed(7)
        x = tokens_of(rank, world).requires_grad_()
        y = run(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
        results.append((y.detach(), x.grad))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


UNLIKE = {
    "dtype": ({}, {"tokens": torch.ones(4, WIDTH, dtype=torch.float32)}),
    "dtype and width": ({}, {"tokens": torch.ones(4, WIDTH // 2, dtype=torch.float32)}),
    "width": ({}, {"tokens": torch.ones(4, 64, dtype=torch.bfloat16)}),
    "quantizer": ({"quantizer": NVFP4}, {}),
    "grad_quantizer": ({"grad_quantizer": NVFP4}, {"grad_quantizer": STOCHASTIC}),
}
"""What the first rank gives, and the others; the rest is tokens in BF16."""


def unlike(rank: int, world: int):
    """What a rank is told if the first one sends other rows than all others, and nothing once they are alike."""
    said = {}
    for name, given in UNLIKE.items():
        dispatching._known.clear()
        sends = {"tokens": torch.ones(4, WIDTH, dtype=torch.bfloat16)} | given[min(rank, 1)]
        splits = [4] + [0] * (world - 1)
        received = [4] * world if rank == 0 else [0] * world
        with pytest.raises(ValueError) as error:
            all_to_all_tokens(sends.pop("tokens"), received, splits, **sends)
        said[name] = str(error.value)
        y = all_to_all_tokens(torch.ones(4, WIDTH), received, splits)
        assert torch.equal(y, torch.ones(sum(received), WIDTH))
    return said


CHECKS = {
    "unlike": unlike,
    "arrive": arrive,
    "gradients": gradients,
    "wire": wire,
    "not finite": not_finite,
    "groups": groups,
    "compiled": compiled,
}


def run(rank: int, folder: str, world: int) -> None:
    with process_group(rank, world, f"{folder}/store"):
        results = {name: check(rank, world) for name, check in CHECKS.items()}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What each rank found."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    spawn(run, (str(folder), world), world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def test_tokens_arrive_as_they_were_cast_and_gradients_as_they_are(ranks):
    assert [rank["arrive"] for rank in ranks] == [[]] * len(ranks)


def test_gradients_are_cast_by_the_bits_of_who_sends_them(ranks):
    assert all(rank["gradients"] for rank in ranks)


@pytest.mark.parametrize("name", TOKENWISE)
def test_the_wire_has_codes_and_scales_of_a_token_in_one_collective(ranks, name):
    for rank in ranks:
        handed, sends, receives = rank["wire"][name]
        assert handed == [TOKENWISE[name][1] * sends, TOKENWISE[name][1] * receives]


def test_what_is_not_finite_arrives_so_and_spoils_no_other_token(ranks):
    assert all(rank["not finite"] == [True] * 3 for rank in ranks)


def test_some_ranks_exchange_tokens_and_others_are_refused(ranks):
    assert all(rank["groups"] for rank in ranks)


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_would_send_unlike_rows_all_raise(ranks, name):
    """Two widths made gloo abort a process, and half as many numbers of twice the size arrived as others."""
    everybody = re.escape(str(list(range(len(ranks)))))
    for rank in ranks:
        assert re.match(
            rf"the ranks {everybody} exchange tokens, and not all of them give the same {name}\. Here: dtype torch\.",
            rank["unlike"][name],
        )


def test_compiled_code_sends_what_eager_code_does(ranks):
    assert all(rank["compiled"] for rank in ranks)


# Whose cast the experts repeat


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = fp4engine.GroupedLinear(2, 64, 96), fp4engine.GroupedLinear(2, 96, 64)

    def forward(self, x, quantizer):
        rows = all_to_all_tokens(x, [len(x)], [len(x)], quantizer=quantizer)
        hidden = torch.nn.functional.gelu(self.up(rows, [20, 29]))
        return all_to_all_tokens(self.down(hidden, [20, 29]), [len(x)], [len(x)])


def step(recipe, quantizer):
    """Output, and gradients of tokens and parameters."""
    torch.manual_seed(0)
    fp4engine.manual_seed(1)
    layer = Experts().bfloat16()
    x, direction = torch.randn(2, 49, 64).mul(torch.logspace(-2, 1, 64)).bfloat16().unbind()
    x.requires_grad_()
    with fp4engine.autocast(recipe=recipe):
        y = layer(x, quantizer)
    y.backward(direction)
    return y.detach(), x.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize(
    "name", ["nvfp4_forward_mxfp8_backward", "nvfp4_forward_high_precision_backward", "mxfp8_from_forward", "mxfp8"]
)
def test_experts_that_repeat_the_cast_have_the_bytes_of_dispatch_in_high_precision(group_of_one, name):
    """Gradients too, where they are made of what the forward pass multiplied."""
    recipe = zoo.make("mxfp8_forward_high_precision_backward" if name == "mxfp8_from_forward" else name)
    own = make_quantizer(recipe, QuantizerRole("grouped_linear", "input"))
    sent, as_it_is = step(recipe, Quantizer(own.rowwise_spec)), step(recipe, None)
    same = [torch.equal(one, other) for one, other in zip(sent, as_it_is, strict=True)]
    assert all(same) if name != "mxfp8" else same[0]


def test_the_gradient_of_a_gradient_is_sent_too(group_of_one):
    """As by PyTorch's own all-to-all: sending is linear."""
    x = torch.randn(6, 32, requires_grad=True)
    y = all_to_all_tokens(x * x, [6], [6])
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(grad, 2 * x) and torch.equal(second, torch.full_like(x, 2.0))


def test_the_example_prints_what_is_lost(capsys):
    importlib.import_module("dispatch_errors").main(["--tokens=64", "--width=64"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    same = {(recipe.strip("| `"), dispatch) for recipe, dispatch, *_, away in rows if away == "the same |"}
    assert len(rows) == 16
    assert {("nvfp4_row_scaled", "NVFP4"), ("nvfp4_forward_mxfp8_backward", "NVFP4")} <= same
    assert ("nvfp4", "NVFP4") not in same
    assert {bytes_ for _, _, bytes_, *_ in rows} == {"128", "66", "40"}


# What is refused

FRESH = Rotation(16, Signs.DGRAD)
TENSOR = make_quantizer(DelayedScaling(), QuantizerRole("linear", "input"))
REFUSED = [
    ({"quantizer": NVFP4Quantizer()}, "quantizer must cast every token by itself: its outer scale"),
    ({"grad_quantizer": NVFP4Quantizer()}, "grad_quantizer must cast every token by itself"),
    ({"quantizer": Quantizer(ROWS.replace(block=(16, 16)))}, "blocks of 16x16 are of several tokens"),
    ({"quantizer": Quantizer(ROWS.replace(rotation=FRESH))}, "draws signs, which do not travel"),
    (
        {"quantizer": Quantizer(ROWS.replace(correction=Correction.SCALAR))},
        "its correction is that of all rows",
    ),
    ({"quantizer": TENSOR}, "DelayedQuantizer needs more than its values"),
    (
        {"quantizer": Quantizer(ROWS, ROWS, "rowwise_dequantized", clipped_gradient=True)},
        "clipped_gradient=True needs to know what saturated",
    ),
    ({"quantizer": zoo.make("nvfp4")}, "quantizer must be a Quantizer or None, got NVFP4BlockScaling"),
    ({"tokens": torch.randn(32)}, r"matrix \[M, K\] of float16, .*got torch.float32 of shape \(32,\)"),
    ({"tokens": torch.ones(4, 32, dtype=torch.int32)}, "got torch.int32 of shape"),
    ({"tokens": [[1.0]]}, r"got \[\[1.0\]\]"),
    ({"input_splits": [3]}, r"input_splits must add up to the 4 rows of tokens, got \[3\]"),
    ({"input_splits": [True]}, r"counts, one for each rank of group, got \[True\]"),
    ({"input_splits": None}, "counts, one for each rank of group, got None"),
    ({"input_splits": [2, 2]}, "input_splits must be 1 counts, one for each rank of group, got"),
    ({"output_splits": [-1]}, "output_splits must be 1 counts"),
    ({"output_splits": [4.0]}, "output_splits must be 1 counts"),
    ({"input_splits": torch.tensor([4])}, "input_splits must be a list, .*call tolist"),
    ({"group": "dp"}, "group must be a ProcessGroup or None, got 'dp'; of a mesh, mesh.get_group()"),
]


def test_what_cannot_be_sent_is_refused_by_name(group_of_one):
    for changed, message in REFUSED:
        arguments = {"tokens": torch.randn(4, 32), "output_splits": [4], "input_splits": [4]} | changed
        with pytest.raises(ValueError, match=message):
            all_to_all_tokens(**arguments)


def test_counts_are_whatever_is_an_integer(group_of_one):
    tokens = torch.randn(4, 32)
    for four in (np.int64(4), torch.tensor(4)):
        assert torch.equal(all_to_all_tokens(tokens, [four], (four,)), tokens)
    with pytest.raises(ValueError, match="output_splits must be 1 counts"):
        all_to_all_tokens(tokens, [np.float32(4)], [4])


def test_shards_of_a_tensor_are_refused(group_of_one):
    tokens = distribute_tensor(torch.randn(4, 32), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"got a DTensor; its rows on this rank are tokens\.to_local"):
        all_to_all_tokens(tokens, [4], [4])


def test_without_a_process_group_there_is_nobody_to_send_to():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        all_to_all_tokens(torch.randn(4, 32), [4], [4])
