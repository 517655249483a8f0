"""Two thousand random steps have the bytes of the step by hand; and a fault that is planted is found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp4engine import ops
from fp4engine.functional import weight_cache
from fp4engine.modules import identity, linear
from fp4engine.ops import cast, checksum, rng
from fp4engine.recipe import NVFP4BlockScaling
from fp4engine.recipe.zoo import ZOO
from tests.fuzz import __main__ as command
from tests.fuzz import cases, ranks, verdict

SEED, CASES, PART = 14, 2000, 100


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("first", range(0, CASES, PART))
def test_bytes_are_those_of_the_step_by_hand(first: int) -> None:
    failures = [text for index in range(first, first + PART) if (text := verdict.failure(SEED, index))]
    assert not failures, "\n".join(failures)


@pytest.fixture
def nobody_waits(monkeypatch) -> None:
    """The CPU as a device that compares a weight with what was cached when the host has gone on."""
    monkeypatch.setattr(checksum, "is_known_at_once", lambda x: False)


@pytest.mark.parametrize("first", range(0, 200, PART))
def test_bytes_are_those_of_a_plain_step_on_a_device_that_nobody_waits_for(first: int, nobody_waits) -> None:
    failures = [text for index in range(first, first + PART) if (text := verdict.failure(SEED, index, "cpu"))]
    assert not failures, "\n".join(failures)


def test_ranks_that_share_amaxes(tmp_path: Path) -> None:
    assert ranks.run(tmp_path, SEED, 0, 60) == []


PLAIN = replace(
    cases.draw(0, 0), module="Linear", recipe=NVFP4BlockScaling(), rows=(16,), sizes=(32, 16), dtype=torch.float32,
    weight_dtype=torch.float32, bias=True, x_layout="negated", dy_layout="contiguous", weight_layout="contiguous",
    values="normal", frozen=frozenset(), wanted=frozenset(), how="backward", main_grad=None, microbatches=1,
    caching="none", writes="none", checkpoint="none", amp=None, elsewhere=False, threads=1, options=(),
)  # fmt: skip


EXPERTS = replace(PLAIN, module="GroupedLinear", recipe=ZOO["fp4_all_the_way"].build(), options=(9, 7))


@pytest.mark.parametrize(
    ("frozen", "wanted", "refused"),
    [
        ({"x", "weight0"}, {"bias0"}, False),
        ({"x", "weight0", "weight1"}, {"bias0", "bias1"}, False),
        ({"x", "weight0"}, {"bias0", "bias1"}, True),
        ({"weight0"}, {"bias0"}, True),
        ({"x", "bias1"}, {"bias0"}, True),
    ],
)
def test_a_bias_alone_repeats_no_forward(frozen: set[str], wanted: set[str], refused: bool) -> None:
    """A checkpoint whose kept tensors nobody asks for is not recomputed, and so nothing has to be refused."""
    case = replace(EXPERTS, frozen=frozenset(frozen), wanted=frozenset(wanted), how="grad", checkpoint="torch")
    assert bool(verdict.refusal(case)) == refused and verdict.run(case) == []


def other_stream(plant):
    plant.setattr(ops, "rank_bits", lambda rank=None: 1 << 8)


def lost_sign(plant):
    plant.setattr(cast, "as_it_is", lambda x: torch._neg_view(x).detach() if x.is_neg() else x.detach())


def one_draw_more(plant):
    take = ops.next_draw
    plant.setattr(ops, "next_draw", lambda *device, **named: (take(*device, **named), take(*device, **named))[1])


def stale_weight(plant):
    plant.setattr(weight_cache, "digest", lambda weight: 0)


def stale_name(plant):
    plant.setattr(identity.Identity, "checked", lambda own, layer: own)
    plant.setattr(identity.Root, "require_rules", lambda root, recipe, layer: None)


def seed_of_the_first_look(plant):
    plant.setattr(rng, "_follow", lambda seed: None)


def rounded_twice(plant):
    product = ops.gemm
    plant.setattr(ops, "gemm", lambda *operands, **options: product(*operands, **options).bfloat16().float())


FAULTS = {
    "other stream": (other_stream, PLAIN, "gradient of x"),
    "lost sign": (lost_sign, PLAIN, "y of batch 0"),
    "one draw more": (one_draw_more, PLAIN, "draws: 2 instead of 1"),
    "rounded twice": (rounded_twice, PLAIN, "gradient of weight"),
    "stale weight": (stale_weight, replace(PLAIN, microbatches=2, caching="scope", writes="data"), "y of batch 1"),
    "stale name": (stale_name, replace(PLAIN, moves=("convert", "cut")), "'1' follows a rule"),
    "seed": (seed_of_the_first_look, replace(PLAIN, seeding="torch after draws"), "gradient of x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch) -> None:
    plant, case, where = FAULTS[fault]
    assert verdict.run(case) == []
    plant(monkeypatch)
    try:
        found = verdict.run(case)
    except AssertionError as error:
        found = [str(error)]
    assert any(difference.startswith(where) for difference in found), found


@pytest.mark.parametrize("caching", ["scope", "flag"])
def test_stale_codes_that_look_right_are_found(caching: str, nobody_waits, monkeypatch) -> None:
    case = replace(PLAIN, microbatches=2, caching=caching, writes="data")
    assert verdict.run(case, "cpu") == []
    in_bytes = checksum.in_bytes
    monkeypatch.setattr(weight_cache, "in_bytes", lambda x: in_bytes(x).clone())
    assert {"y of batch 1 looks right", "gradient of x in batch 1 looks right"} <= set(verdict.run(case, "cpu"))
    monkeypatch.setattr(weight_cache, "require_sealed", lambda caches: None)
    monkeypatch.setattr(linear, "require_sealed", lambda caches: None)
    assert any(found.startswith("y of batch 1: ") for found in verdict.run(case, "cpu"))


def test_a_failure_says_how_to_run_it_again(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verdict, "run", lambda case, device: ["y: all numbers differ"])
    assert command.main(["--cases", "2", "--seed", "5", "--first", "9"]) == 1
    printed = capsys.readouterr().out
    assert "again: python -m tests.fuzz --seed 5 --first 10 --cases 1" in printed and "2 failed" in printed
