"""Routing functions against their formulas, token by token; and the flags of recomputation."""

import pytest
import torch

from fp4engine.te.common.recipe import DelayedScaling, NVFP4BlockScaling
from fp4engine.te.pytorch import Linear, autocast, checkpoint
from fp4engine.te.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from fp4engine.te.pytorch.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)


def probability(row: torch.Tensor, chosen: list[int], kind: str, pre: bool) -> torch.Tensor:
    if kind == "softmax":
        return row.softmax(0)[chosen] if pre else row[chosen].softmax(0)
    scores = torch.sigmoid(row) if kind == "sigmoid" else torch.log1p(row.exp()).sqrt()
    return scores[chosen] / scores[chosen].sum()


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_best_experts_and_their_probabilities(kind, pre) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 8, requires_grad=True)
    bias = None if kind == "softmax" else torch.randn(8)
    gates, routes = fused_topk_with_score_function(logits, 3, pre, None, None, 2.0, kind, bias)
    for token, row in enumerate(logits):
        scores = (
            row if kind == "softmax" else torch.sigmoid(row) if kind == "sigmoid" else torch.log1p(row.exp()).sqrt()
        )
        order = scores if bias is None else scores + bias
        chosen = sorted(order.topk(3).indices.tolist())
        assert routes[token].nonzero().flatten().tolist() == chosen
        torch.testing.assert_close(gates[token][chosen], 2 * probability(row, chosen, kind, pre))
    assert torch.equal(gates != 0, routes)
    gates.square().sum().backward()
    assert logits.grad.isfinite().all()
    indices = torch.empty(7, 3, dtype=torch.int16)
    _, written = fused_topk_with_score_function(logits, 3, pre, None, None, 2.0, kind, bias, topk_indices=indices)
    assert written is indices and routes.gather(1, indices.long()).all()


def test_groups_are_chosen_by_the_sum_of_their_best() -> None:
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.0, 1.0, 1.0]])
    _, routes = fused_topk_with_score_function(logits, 2, True, 3, 1, None, "softmax", None)
    assert routes.tolist() == [[True, True, False, False, False, False]]  # 5 alone outweighs 3 and 3 in a softmax
    _, routes = fused_topk_with_score_function(logits, 2, False, 3, 1, None, "softmax", None)
    assert routes.tolist() == [[False, False, True, True, False, False]]


@pytest.mark.parametrize(
    ("num_groups", "group_topk", "said"),
    [
        (3, None, "num_groups and group_topk go together, got num_groups=3, group_topk=None"),
        (None, 1, "num_groups and group_topk go together, got num_groups=None, group_topk=1"),
        (4, 1, "num_groups must divide the 6 experts and be at least group_topk=1, got 4"),
        (2, 3, "num_groups must divide the 6 experts and be at least group_topk=3, got 2"),
        (3, 3, "topk must be at least group_topk=3, got 2"),
        (-3, 1, "num_groups must be an integer of at least 1, got -3"),
        (3, 1.5, "group_topk must be an integer of at least 1, got 1.5"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(num_groups, group_topk, said) -> None:
    with pytest.raises(ValueError, match=said):
        fused_topk_with_score_function(torch.randn(4, 6), 2, True, num_groups, group_topk, None, "softmax", None)
    _, routes = fused_topk_with_score_function(torch.randn(4, 6), 2, True, 0, 0, None, "softmax", None)
    assert routes.sum() == 8


def test_the_auxiliary_loss() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, requires_grad=True)
    routes, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    torch.testing.assert_close(scores, torch.sigmoid(logits) / torch.sigmoid(logits).sum(1, keepdim=True))
    loss = fused_moe_aux_loss(scores, routes.sum(0), 6, 4, 2, 0.1)
    by_hand = sum(float(routes[:, e].sum() * scores[:, e].sum()) for e in range(4)) * 0.1 * 4 / (2 * 36)
    assert float(loss) == pytest.approx(by_hand, rel=1e-5)
    loss.backward()
    assert logits.grad.abs().sum() > 0
    as_bytes = fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid", RoutingMapFormat.BYTEMAP)
    assert all(map(torch.equal, as_bytes, (routes, scores)))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((1, True, 4, 2, None, "sigmoid", None), ValueError, "topk must be at least group_topk=2, got 1"),
        ((1, False, None, None, None, "softmax", torch.zeros(4)), ValueError, "got score_function='softmax'"),
        ((1, "softmax", "bitmap_u8"), NotImplementedError, "bitmap_u8"),
        ((1, "softmax", RoutingMapFormat.BITMAP_U8), NotImplementedError, "BITMAP_U8"),
        ((1, "tanh"), ValueError, "score_function"),
    ],
)
def test_what_is_not_there_is_refused(arguments, error, said) -> None:
    function = fused_topk_with_score_function if len(arguments) > 3 else fused_compute_score_for_moe_aux_loss
    with pytest.raises(error, match=said):
        function(torch.randn(2, 8), *arguments)


@pytest.mark.parametrize(
    "unused", [{"qb_histogram": torch.zeros(4, 2)}, {"qb_bin_bounds": torch.zeros(2)}, {"qb_histogram_mode": "x"}]
)
def test_histograms_are_not_made(unused) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(unused))):
        fused_topk_with_score_function(torch.randn(2, 4), 1, False, None, None, None, "sigmoid", None, **unused)


def test_recomputation_is_told_within_its_regions() -> None:
    assert not is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
    with autocast(recipe=NVFP4BlockScaling()), activation_recompute_forward(True, recompute_phase=True):
        assert is_fp8_activation_recompute_enabled() and in_fp8_activation_recompute_phase()
        with activation_recompute_forward():
            assert not in_fp8_activation_recompute_phase()
    with activation_recompute_forward(True):
        assert not is_fp8_activation_recompute_enabled()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_tells_of_its_two_runs(use_reentrant) -> None:
    told = []
    layer = Linear(16, 16)

    def body(x):
        outside = is_fp8_activation_recompute_enabled()
        with autocast(recipe=DelayedScaling()):
            told.append((outside, is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()))
            return layer(x)

    checkpoint(body, torch.randn(16, 16, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert told == [(False, True, False), (False, True, True)]
    assert layer.weight.grad is not None


def test_a_scaling_factor_of_zero_is_one() -> None:
    """And no lack of one."""
    gates, chosen = fused_topk_with_score_function(torch.randn(2, 4), 2, False, None, None, 0.0, "softmax", None)
    assert not gates.any() and chosen.sum() == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topk": 9}, "topk must be an integer from 1 to 8, got 9"),
        ({"topk": 0}, "topk must be an integer from 1 to 8, got 0"),
        ({"expert_bias": torch.ones(3)}, r"expert_bias must be \[8\], got \[3\]"),
        (
            {"topk_indices": torch.zeros(4, 3).long()},
            r"topk_indices must be integers \[4, 2\], got torch.int64 \[4, 3\]",
        ),
        ({"topk_indices": torch.zeros(4, 2)}, r"topk_indices must be integers \[4, 2\], got torch.float32 \[4, 2\]"),
    ],
)
def test_what_does_not_fit_the_experts_is_refused(arguments, said) -> None:
    given = {"topk": 2, "score_function": "sigmoid", "expert_bias": None, **arguments}
    with pytest.raises(ValueError, match=said):
        fused_topk_with_score_function(
            torch.randn(4, 8), use_pre_softmax=False, num_groups=None, group_topk=None, scaling_factor=None, **given
        )
