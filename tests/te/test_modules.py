"""Modules with TransformerEngine's arguments, against PyTorch's and against fp4engine's own."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine.te.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

MAKE = {
    "Linear": lambda **arguments: te.Linear(32, 48, **arguments),
    "LayerNormLinear": lambda **arguments: te.LayerNormLinear(32, 48, **arguments),
    "LayerNormMLP": lambda **arguments: te.LayerNormMLP(32, 64, **arguments),
    "GroupedLinear": lambda **arguments: te.GroupedLinear(2, 32, 48, **arguments),
}


def forward(module, x):
    return module(x, [x.shape[0] // 2] * 2) if isinstance(module, te.GroupedLinear) else module(x)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    "recipe", [None, Float8CurrentScaling(), NVFP4BlockScaling()], ids=["high", "fp8", "stochastic"]
)
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("trained", [True, False], ids=["", "plain input"])
def test_delayed_weight_gradients_are_those_at_once(name, recipe, fused, trained) -> None:
    x = torch.randn(16, 32)
    found = []
    for delayed in (False, True):
        torch.manual_seed(1)
        fp4engine.manual_seed(1)
        module = MAKE[name](delay_wgrad_compute=delayed, fuse_wgrad_accumulation=fused)
        if fused:
            for key, weight in module.named_parameters():
                if weight.ndim == 2:
                    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
                assert weight.ndim == 1 or "weight" in key
        inp = x.clone().requires_grad_(trained)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(module, inp)
        y.square().sum().backward()
        if delayed:
            assert all(weight.grad is None for weight in module.parameters() if weight.ndim == 2)
            assert not fused or all((w.main_grad == 1).all() for w in module.parameters() if w.ndim == 2)
            assert module.need_backward_dw()
            module.backward_dw()
        if recipe is not None:
            ran = [part.executed.counts for part in module.modules() if getattr(part, "executed", None)]
            assert all(set(counts.values()) <= {1, 2} for counts in ran) and ran
        grads = [weight.main_grad if fused and weight.ndim == 2 else weight.grad for weight in module.parameters()]
        assert not fused or all(w.grad_added_to_main_grad for w in module.parameters() if w.ndim == 2)
        found.append([y.detach(), *([inp.grad] if trained else []), *grads])
    assert all(map(torch.equal, *found))


def test_additions_of_a_backward_pass_that_failed_are_dropped() -> None:
    module, x = te.LayerNormMLP(32, 64, delay_wgrad_compute=True, fuse_wgrad_accumulation=True), torch.randn(16, 32)
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.zeros_like(weight)
    y = module(x)
    module._additions.append(lambda: pytest.fail("it was of another backward pass"))
    y.sum().backward()
    module.backward_dw()
    assert module.fc1_weight.main_grad.any() and not module._additions


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("trained", [False, True], ids=["plain", "trained"])
def test_nothing_waits_where_weights_are_frozen(name, trained) -> None:
    module = MAKE[name](delay_wgrad_compute=True).requires_grad_(False)
    x = torch.randn(16, 32, requires_grad=trained)
    y = forward(module, x)
    assert y.requires_grad == trained
    if trained:
        y.sum().backward()
        assert x.grad is not None
    module.backward_dw()


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("frozen", ["before backward", "before backward_dw"])
def test_weights_that_are_frozen_meanwhile_get_no_gradient(name, fused, frozen) -> None:
    module = MAKE[name](delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    weights = [weight for weight in module.parameters() if weight.ndim == 2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(16, 32, requires_grad=True)
    loss = forward(module, x).square().sum()
    if frozen == "before backward":
        weights[0].requires_grad_(False)
    loss.backward()
    weights[0].requires_grad_(False)
    module.backward_dw()
    assert x.grad.any() and weights[0].grad is None and not weights[0].main_grad.any()
    assert all((weight.main_grad if fused else weight.grad).any() for weight in weights[1:])


@pytest.mark.parametrize("name", MAKE)
def test_gradients_that_wait_call_the_hooks_of_their_weights(name) -> None:
    """As a plain backward pass does: once for each gradient, without gradients of their own, and after it is there."""
    x, found = torch.randn(16, 32), []
    for delayed in (False, True):
        torch.manual_seed(1)
        module, called = MAKE[name](delay_wgrad_compute=delayed), {}

        def step(weight: torch.Tensor, called=called) -> None:
            called[weight] = called.get(weight, 0) + 1
            weight.add_(weight.grad, alpha=-0.1)
            weight.grad = None

        for weight in module.parameters():
            weight.register_post_accumulate_grad_hook(step)
        forward(module, x).square().sum().backward()
        module.backward_dw()
        assert [called.get(weight) for weight in module.parameters()] == [1] * len(list(module.parameters()))
        found.append([weight.detach() for weight in module.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", MAKE)
def test_gradients_that_wait_have_no_gradients(name) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    y = forward(MAKE[name](delay_wgrad_compute=True), x)
    with pytest.raises(RuntimeError, match="leave delay_wgrad_compute at False"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("name", MAKE)
def test_two_backward_passes_of_one_graph_wait_both(name) -> None:
    x, found = torch.randn(16, 32), []
    for delayed in (False, True):
        torch.manual_seed(1)
        module = MAKE[name](delay_wgrad_compute=delayed)
        loss = forward(module, x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        module.backward_dw()
        module.backward_dw()
        found.append([weight.grad for weight in module.parameters()])
    assert all(map(torch.equal, *found))
    with pytest.raises(RuntimeError, match=r"call it after the last backward pass"):
        loss.backward()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_gradients_that_wait_are_not_copied(name, copied) -> None:
    module = MAKE[name](delay_wgrad_compute=True)
    forward(module, torch.randn(16, 32)).sum().backward()
    twin = copied(module)
    twin.backward_dw()
    assert all(weight.grad is None for weight in module.parameters() if weight.ndim == 2)
    module.backward_dw()
    assert all(weight.grad is not None for weight in module.parameters() if weight.ndim == 2)


def test_gradients_of_weights_that_fsdp_has_resharded_are_refused(group_of_one) -> None:
    for make in MAKE.values():
        module = make(delay_wgrad_compute=True)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        forward(module, torch.randn(16, 32)).sum().backward()
        with pytest.raises(RuntimeError, match=r"resharded it; leave delay_wgrad_compute at False"):
            module.backward_dw()


def tracker_of_seed_five() -> te.CudaRNGStatesTracker:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("mine", 5)
    return tracker


def test_a_module_with_a_tracker_is_pickled() -> None:
    layer = te.Linear(16, 16, get_rng_state_tracker=tracker_of_seed_five, rng_tracker_name="mine")
    drawn = layer.weight.detach().clone()
    layer = pickle.loads(pickle.dumps(layer))
    layer.reset_parameters()
    assert torch.equal(layer.weight, drawn)


def test_half_precision_main_grad() -> None:
    layer = te.Linear(32, 32, params_dtype=torch.float16, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = torch.randn(16, 32, dtype=torch.float16)
    with te.autocast(recipe=MXFP8BlockScaling()):
        layer(x).sum().backward()
    assert layer.weight.grad is None and layer.weight.main_grad.any()


@pytest.mark.parametrize("name", MAKE)
def test_reset_gives_memory_to_meta(name) -> None:
    module = MAKE[name](device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    module.reset_parameters(defer_init=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.reset_parameters()
    assert not any(parameter.is_meta for parameter in module.parameters())
    forward(module, torch.randn(16, 32, device=next(module.parameters()).device))


@pytest.mark.parametrize("name", MAKE)
def test_on_meta_it_tells_the_shape_of_its_output(name) -> None:
    """PyTorch has no autocast for meta, and was asked whether it is on."""
    output = forward(MAKE[name](device="meta"), torch.empty(16, 32, device="meta"))
    assert output.is_meta and output.shape == (16, 32 if name == "LayerNormMLP" else 48)


def test_weights_are_drawn_from_the_tracker() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("mine", 5)
    before = torch.get_rng_state()
    layer = te.Linear(16, 16, get_rng_state_tracker=lambda: tracker, rng_tracker_name="mine")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(layer.weight, torch.empty(16, 16).normal_(0, 0.023))
    with tracker.fork("mine"):
        drawn = torch.rand(3)
    assert not torch.equal(drawn, torch.empty(3).uniform_(generator=torch.Generator().manual_seed(5)))
    with pytest.raises(KeyError, match="yours"), tracker.fork("yours"):
        pass
    with pytest.raises(RuntimeError, match="seed 5 already exists"):
        tracker.add("yours", 5)


def test_checkpoints_repeat_the_trackers_states() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("mine", 5)
    drawn = []

    def function(x):
        with tracker.fork("mine"):
            drawn.append(torch.rand(4))
        return x * drawn[-1]

    x = torch.ones(4, requires_grad=True)
    te.checkpoint(function, x, use_reentrant=False, get_rng_state_tracker=lambda: tracker).sum().backward()
    assert len(drawn) == 2 and torch.equal(*drawn) and torch.equal(x.grad, drawn[0])


def test_mlp_that_recomputes_is_the_same() -> None:
    x, found = torch.randn(16, 32), []
    for again in (False, True):
        torch.manual_seed(1)
        mlp, inp = te.LayerNormMLP(32, 64, checkpoint=again), x.clone().requires_grad_()
        with te.autocast(recipe=MXFP8BlockScaling()):
            y = mlp(inp)
        y.sum().backward()
        found.append([y, inp.grad, mlp.fc1_weight.grad, mlp.layer_norm_weight.grad])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    "make", [lambda: te.LayerNorm(32), lambda: te.RMSNorm(32), lambda: te.TransformerLayer(32, 64, 2)]
)
def test_torch_autocast_gives_its_dtype(make) -> None:
    module = make()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(8, 2, 32, requires_grad=True))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_norms_sum_their_gradients_in_fp32() -> None:
    norm = te.LayerNorm(16, params_dtype=torch.bfloat16)
    x = torch.randn(4096, 16).bfloat16()
    norm(x).sum().backward()
    exact = F.layer_norm(x.double(), (16,)).sum(0)
    assert torch.equal(norm.weight.grad, exact.float().bfloat16()) or torch.allclose(
        norm.weight.grad.double(), exact, rtol=2**-8, atol=1e-3
    )
    assert torch.equal(norm.bias.grad, torch.full((16,), 4096.0).bfloat16())


def test_a_change_of_recipe_is_said_and_shown() -> None:
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling()):
        layer(x)
    assert layer.fp8_meta["recipe"].delayed() and len(layer.quantizers["scaling_bwd"]) == 2
    with te.autocast(recipe=MXFP8BlockScaling()), pytest.warns(UserWarning, match="Recipe type changed from Delayed"):
        layer(x)
    assert [type(q).__name__ for q in layer.quantizers["scaling_fwd"]] == ["MXFP8Quantizer"] * 3


def test_positions_are_transformer_engines() -> None:
    layer = te.Linear(16, 16, True, False)  # sequence_parallel and fuse_wgrad_accumulation, which ask for nothing alone
    assert layer.bias is not None
    layer = te.LayerNormLinear(16, 16, 1e-3, False, False, None, 1, None, torch.nn.init.zeros_, False)
    assert layer.bias is None and layer.norm.eps == 1e-3 and not layer.weight.any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: te.Linear(16, 16, tp_size=2), "tp_size=2"),
        (lambda: te.Linear(16, 16, symmetric_ar_type="two_shot"), "symmetric_ar_type"),
        (lambda: te.Linear(16, 16)(torch.ones(4, 16), fp8_output=True), "fp8_output"),
        (lambda: te.TransformerLayer(16, 16, 2, softmax_type="off-by-one"), "softmax_type"),
    ],
)
def test_what_is_not_there_is_refused_by_name(make, said) -> None:
    with pytest.raises(NotImplementedError, match=said):
        make()


def test_graphs_need_cuda() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA device"):
            te.make_graphed_callables(te.Linear(16, 16), (torch.ones(16, 16),))


def test_padding_and_back() -> None:
    x = torch.randn(10, 4, requires_grad=True)
    padded, counts = te.Fp8Padding(3)(x, [3, 0, 7])
    assert counts == [16, 0, 16] and padded.shape == (32, 4) and not padded[3:16].any()
    back = te.Fp8Unpadding(3)(padded, [3, 0, 7])
    assert torch.equal(back, x)
    with te.autocast(recipe=MXFP8BlockScaling()):
        assert te.Fp8Padding(1)(x, [10])[1] == [32]


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_experts_get_their_rows_and_give_them_back(map_type) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    mask = torch.zeros(6, 4).scatter_(1, chosen, 1.0)
    routing = mask if map_type == "mask" else chosen
    rows, row_map = te.moe_permute(x, routing, 12, map_type=map_type)
    experts = torch.cat([torch.full((int(n),), e) for e, n in enumerate(mask.sum(0))])
    expected = torch.cat([x[mask[:, e].bool()] for e in range(4)])
    assert torch.equal(rows, expected) and len(experts) == 12
    weights = torch.rand(6, 4) * mask if map_type == "mask" else torch.rand(6, 2)
    merged = te.moe_unpermute(rows, row_map, weights, x.shape, map_type)
    assert torch.allclose(merged, x * weights.sum(1, keepdim=True), atol=1e-6)
    merged.sum().backward()
    assert torch.allclose(x.grad, weights.sum(1, keepdim=True).expand(-1, 8), atol=1e-6)
    with pytest.raises(ValueError, match="row_id_map must be what moe_permute"):
        te.moe_unpermute(rows, row_map, weights, x.shape, {"mask": "index", "index": "mask"}[map_type])
    with pytest.raises(ValueError, match="an older name of merging_probs"):
        te.moe_unpermute(rows, row_map, weights, x.shape, map_type, weights)


def test_probabilities_are_read_where_a_token_goes_zeros_too() -> None:
    x, mask = torch.randn(6, 8).bfloat16(), torch.rand(6, 4).argsort() < 2
    rows, row_map = te.moe_permute(x, mask)
    everywhere = torch.rand(6, 4).bfloat16()
    everywhere[mask.nonzero()[0].tolist()] = 0.0
    merged = te.moe_unpermute(rows, row_map, everywhere, x.shape)
    assert torch.equal(merged, (x.float() * (everywhere * mask).float().sum(1, keepdim=True)).bfloat16())
    with pytest.raises(ValueError, match=r"merging_probs must be \[6, E\]"):
        te.moe_unpermute(rows, row_map, everywhere[:5], x.shape)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_rows_that_were_not_kept_add_nothing(map_type, weighted) -> None:
    chosen = torch.tensor([[0], [1], [1], [0]])
    routing = chosen if map_type == "index" else torch.zeros(4, 2).scatter_(1, chosen, 1.0)
    x, weights = torch.randn(4, 8), torch.full((4, routing.shape[1]), 0.5) if weighted else None
    rows, row_map = te.moe_permute(x, routing, 3, map_type=map_type)
    merged = te.moe_unpermute(rows, row_map, weights, x.shape, map_type)
    kept = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    assert torch.equal(merged, x * kept / (2 if weighted else 1))


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_a_rank_without_tokens_gives_experts_no_rows(map_type) -> None:
    x, routing = torch.empty(0, 8, requires_grad=True), torch.empty(0, 3, dtype=torch.int32)
    rows, row_map = te.moe_permute(x, routing, map_type=map_type)
    back = te.moe_unpermute(rows, row_map, torch.empty(0, 3), map_type=map_type)
    back.sum().backward()
    assert rows.shape == back.shape == x.grad.shape == (0, 8)


def test_padded_experts() -> None:
    x, mask = torch.randn(5, 3), torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0], [0, 1]])
    probs = torch.rand(5, 2) * mask
    rows, row_probs, row_map, offsets, counts = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4)
    assert counts.tolist() == [4, 4] and offsets.tolist() == [0, 1]
    plain, plain_probs, _ = te.moe_permute_with_probs(x, probs, mask)
    keep = [0, 1, 2, 4, 5, 6]
    assert torch.equal(rows[keep], plain) and torch.equal(row_probs[keep], plain_probs) and not rows[[3, 7]].any()
    merged = te.moe_unpermute(rows, row_map, probs, x.shape, pad_offsets=offsets)
    assert torch.allclose(merged, x * probs.sum(1, keepdim=True))
    sizes, order = torch.tensor([2, 3]), torch.tensor([1, 0])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, order), torch.cat([x[2:], x[:2]]))


def test_cross_entropy_is_pytorchs() -> None:
    scores, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    labels[0, 1] = 9
    mean = te.parallel_cross_entropy(scores, labels, 0.1, True, ignore_idx=9)
    want = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=9, label_smoothing=0.1)
    assert torch.allclose(mean, want) and te.parallel_cross_entropy(scores, labels * 0 + 9, 0.0, True, None, 9) == 0
    labels[0, 1] = 0
    losses = te.parallel_cross_entropy(scores, labels)
    assert torch.allclose(losses, F.cross_entropy(scores.transpose(1, 2), labels, reduction="none"))
    assert torch.equal(te.parallel_cross_entropy(scores, labels.int()), losses)
    wide, bytes_ = torch.randn(1, 2, 200), torch.tensor([[156, 3]], dtype=torch.uint8)  # 156 is -100 in a byte
    mean = F.cross_entropy(wide[0], bytes_[0].long())
    assert torch.allclose(te.parallel_cross_entropy(wide, bytes_, reduce_loss=True), mean)
    with pytest.raises(ValueError, match=r"target must hold integers, got torch\.float32"):
        te.parallel_cross_entropy(scores, labels.float())


def test_linear_is_fp4engines() -> None:
    mine, theirs = te.Linear(32, 32), fp4engine.Linear(32, 32)
    theirs.load_state_dict({key: value for key, value in mine.state_dict().items() if key != "_extra_state"})
    x, recipe = torch.randn(16, 32), fp4engine.recipe.NVFP4BlockScaling()
    with fp4engine.autocast(recipe=recipe):
        assert torch.equal(mine(x), theirs(x))


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_norms_do_not_depend_on_how_the_input_lies_in_memory(norm) -> None:
    x = torch.randn(128, 256).T
    grads = []
    for values in (x, x.contiguous()):
        module = norm(128)
        module(values).square().sum().backward()
        grads.append(module.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_the_first_microbatch_overwrites_main_grad(name, delayed) -> None:
    torch.manual_seed(1)
    x, recipe = torch.randn(16, 32), Float8CurrentScaling()
    module = MAKE[name](fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    weights = [weight for weight in module.parameters() if weight.ndim == 2]

    def step(is_first: bool | None, start: float) -> list[torch.Tensor]:
        for weight in weights:
            weight.main_grad = torch.full_like(weight, start)
        splits = ([8, 8],) if isinstance(module, te.GroupedLinear) else ()
        with te.autocast(recipe=recipe):
            output = module(x, *splits, is_first_microbatch=is_first)
        output.sum().backward()
        module.backward_dw()
        return [weight.main_grad for weight in weights]

    alone = step(None, 0.0)
    assert all(map(torch.equal, step(True, 7.0), alone))
    assert all(torch.equal(grad, other + 7.0) for grad, other in zip(step(False, 7.0), alone, strict=True))
    for weight in weights:
        weight.overwrite_main_grad = True
    assert all(map(torch.equal, step(None, 7.0), alone))


@pytest.mark.parametrize("first", [(True, False), (True, True)], ids=["told once", "told twice"])
@pytest.mark.parametrize("way", ["plain", "delayed", "checkpoint", "reentrant"])
def test_a_layer_at_two_depths_gets_both_gradients_of_main_grad(way: str, first) -> None:
    torch.manual_seed(1)
    x, recipe = torch.randn(16, 32), Float8CurrentScaling()
    layer = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=way == "delayed")
    weight = layer.weight

    def run(first, start: float, microbatches: int = 1) -> torch.Tensor:
        weight.main_grad = torch.full_like(weight, start)
        for microbatch in range(microbatches):
            hidden = x.clone().requires_grad_()
            for is_first in first:
                told = is_first if microbatch == 0 else False if is_first is not None else None
                with te.autocast(recipe=recipe):
                    run_one = partial(layer, is_first_microbatch=told)
                    if way in ("checkpoint", "reentrant"):
                        hidden = te.checkpoint(run_one, hidden, use_reentrant=way == "reentrant")
                    else:
                        hidden = run_one(hidden)
            hidden.square().sum().backward()
            while way == "delayed" and layer._delayed:
                layer.backward_dw()
        return weight.main_grad

    both = run((None, None), 0.0)
    alone = run((None,), 0.0)
    assert both.any() and not torch.equal(both, alone)
    assert torch.equal(run(first, 7.0), both)
    assert torch.equal(run(first, 7.0, microbatches=3), run((None, None), 0.0, microbatches=3))


def test_the_first_gradient_overwrites_whichever_microbatch_it_is_of() -> None:
    """A pipeline runs two microbatches forward before the first one backward."""
    torch.manual_seed(1)
    layer = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, 7.0)
    inputs = [torch.randn(16, 32) for _ in range(2)]
    losses = [layer(x, is_first_microbatch=index == 0).sum() for index, x in enumerate(inputs)]
    losses[1].backward()
    losses[0].backward()
    assert torch.allclose(layer.weight.main_grad, torch.stack(inputs).sum((0, 1)).expand(32, 32), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: te.Linear(32, 48, parallel_mode="diagonal"), "parallel_mode must be one of 'row', 'column', None"),
        (
            lambda: te.Linear(32, 48, tp_group="x"),
            "tp_group must be a process group that this rank belongs to, got 'x'",
        ),
        (lambda: te.Linear(32, 48, tp_size="1"), "tp_size must be an integer of at least 1, got '1'"),
        (
            lambda: te.Linear(32, 48, get_rng_state_tracker=te.CudaRNGStatesTracker()),
            "get_rng_state_tracker must be a func",
        ),
        (lambda: te.Linear("32", 48), "in_features must be an integer of at least 0, got '32'"),
        (lambda: te.Linear(32, 48, parameters_split=(16, 32)), "parameters_split must be .* got (16, 32)"),
        (lambda: te.Linear(32, 48, parameters_split=("q", "q")), "parameters_split must be .* got ('q', 'q')"),
        (lambda: te.Linear(32, 48, parameters_split={"q": -1, "k": 49}), "rows of parameters_split must be .* got -1"),
        (lambda: te.Linear(32, 48)("x"), "Linear.forward(inp=) must be a tensor, got 'x'"),
        (lambda: te.LayerNorm(8, hidden_size=16), "normalized_shape or hidden_size, not both; got 8 and 16"),
        (lambda: te.RMSNorm(8, params_dtype=torch.half, dtype=torch.bfloat16), "dtype and params_dtype are the same"),
        (lambda: te.TransformerLayer(32, 64, 4, layer_number=0), "layer_number must be an integer of at least 1"),
        (lambda: te.MultiheadAttention(32, 4, layer_number="1"), "layer_number must be an integer of at least 1"),
        (
            lambda: te.MultiheadAttention(32, 4)(torch.ones(2, 1, 32), encoder_output=torch.ones(3, 1, 32)),
            "encoder_output goes with attention_type='cross', this is 'self'; got [3, 1, 32]",
        ),
        (lambda: te.LayerNormLinear(32, 48, parallel_mode="x"), "parallel_mode must be one of"),
        (lambda: te.LayerNormMLP(32, 64.0), "ffn_hidden_size must be an integer of at least 0, got 64.0"),
        (
            lambda: te.LayerNormMLP(32, 64, activation="clamped_swiglu", activation_params={"limit": "7"}),
            "activation_params must be numbers by their names, got {'limit': '7'}",
        ),
        (lambda: te.GroupedLinear(2, 32, 48, parallel_mode="x"), "parallel_mode must be one of"),
        (lambda: te.GroupedLinear(2, 32, 48, use_grouped_tensor="x"), "use_grouped_tensor must be one of"),
        (lambda: te.Linear(32, 48).set_extra_state(torch.ones(3)), "_extra_state must be bytes .* got torch.float32"),
        (
            lambda: te.moe_permute(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2], [2, 0]])),
            'routing_map must be of zeros and ones under map_type="mask"; experts need map_type="index"',
        ),
        (
            lambda: te.parallel_cross_entropy(torch.ones(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64), -1.0),
            "label_smoothing must be a number from 0 to 1, got -1.0",
        ),
        (lambda: te.Fp8Padding(2, 16)(torch.ones(8, 4), [3, 3]), "m_splits must be counts of slices that have 8 rows"),
        (lambda: te.Fp8Padding(2, 16)(torch.ones(8, 4), [-1, 9]), "m_splits must be counts .* got [-1, 9]"),
        (lambda: te.Fp8Unpadding(2, 16)(torch.ones(8, 4), [3, 5]), "m_splits must be counts .* got [3, 5]"),
        (lambda: te.Fp8Padding(2, align_size=0), "align_size must be an integer of at least 1, got 0"),
        (lambda: te.checkpoint("x", torch.ones(2)), "function must be a function, got 'x'"),
        (
            lambda: te.parallel_cross_entropy(torch.ones(1, 1, 2), torch.zeros(1, 1), 0.0, False, "x"),
            "dist_process_group",
        ),
    ],
)
def test_what_is_given_wrong_is_named(make, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        make()


def test_a_recipe_of_either_kind_is_a_modules_own() -> None:
    x, recipe = torch.randn(16, 32), MXFP8BlockScaling()
    layer = te.Linear(32, 48, recipe=recipe)
    alone = layer(x)
    with te.autocast(recipe=recipe):
        assert torch.equal(layer(x), alone)
    assert layer.recipe == recipe.frozen


@pytest.mark.parametrize("name", MAKE)
def test_a_bias_that_is_returned_is_of_the_outputs_dtype(name) -> None:
    module, x = MAKE[name](return_bias=True), torch.randn(16, 32)
    assert forward(module, x)[1] is not None
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
        output, bias = forward(module, x)
    biases = bias if isinstance(bias, list) else [bias]
    assert {output.dtype, *(one.dtype for one in biases)} == {torch.bfloat16}
    sum(one.sum() for one in biases).backward()
    returned = [
        p for key, p in module.named_parameters() if "bias" in key and key not in ("fc1_bias", "layer_norm_bias")
    ]
    assert all(parameter.grad is not None for parameter in returned)
    without = forward(MAKE[name](return_bias=True, bias=False), x)[1]
    assert without in (None, [None, None])


@pytest.mark.parametrize("value", [1, "no", torch.tensor(False), None], ids=repr)
@pytest.mark.parametrize("name", [*MAKE, "MultiheadAttention"])
def test_flags_are_booleans(name, value) -> None:
    make = MAKE.get(name, lambda **arguments: te.MultiheadAttention(32, 2, **arguments))
    flags = ["return_bias"] if name in ("Linear", "GroupedLinear") else ["return_bias", "return_layernorm_output"]
    for flag in flags:
        with pytest.raises(ValueError, match=re.escape(f"{flag} must be True or False, got {value!r}")):
            make(**{flag: value})


@pytest.mark.parametrize("value", [1, "no", torch.tensor(False)], ids=repr)
@pytest.mark.parametrize("name", [*MAKE, "grouped on the device", "TransformerLayer"])
@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()], ids=["high", "mxfp8"])
def test_the_first_microbatch_is_told_by_a_boolean(name, value, recipe) -> None:
    counts = {"GroupedLinear": ([2, 2],), "grouped on the device": (torch.tensor([2, 2]),)}.get(name, ())
    if name == "TransformerLayer":
        module, x = te.TransformerLayer(32, 64, 2), torch.randn(4, 1, 32)
    else:
        module, x = MAKE["GroupedLinear" if counts else name](), torch.randn(4, 32)
    refusal = rf"is_first_microbatch must be one of None, False, True, got {re.escape(repr(value))}"
    with te.autocast(enabled=recipe is not None, recipe=recipe), pytest.raises(ValueError, match=refusal):
        module(x, *counts, is_first_microbatch=value)
