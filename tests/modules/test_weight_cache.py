"""Caching a weight's operands changes no byte, and fused accumulation adds what autograd would."""

import contextlib
import copy
import sys
import threading

import pytest
import torch

import fp4engine
from fp4engine.export import share_amax
from fp4engine.formats import CastSpec, RoundingMode
from fp4engine.functional import make_linear_plan, weight_cache
from fp4engine.recipe import Casts, DelayedScaling, LinearRecipe, NVFP4BlockScaling
from tests.same import assert_same

RECIPE = NVFP4BlockScaling()


def run_microbatches(layer, batches, *, cached=False, flags=False):
    """Outputs and gradients of one accumulation window."""
    fp4engine.manual_seed(3)
    layer.zero_grad()
    outputs, grads = [], []
    scope = fp4engine.weight_cache(layer) if cached else torch.enable_grad()
    with scope, fp4engine.autocast(recipe=RECIPE):
        for index, batch in enumerate(batches):
            inp = batch.clone().requires_grad_()
            out = layer(inp, is_first_microbatch=index == 0) if flags else layer(inp)
            out.square().sum().backward()
            outputs.append(out.detach())
            grads.append(inp.grad)
    return [*outputs, *grads, layer.weight.grad.clone(), layer.bias.grad.clone()]


@pytest.fixture
def layer():
    return fp4engine.Linear(48, 33)


@pytest.fixture
def batches():
    return torch.randn(3, 20, 48).unbind()


def count_weight_casts(monkeypatch, layer):
    """How often the weight is quantized from here on."""
    from fp4engine.quantizers import Quantizer

    calls = []
    original = Quantizer.quantize

    def counting(self, x, **arguments):
        if x.shape == layer.weight.shape and x.data_ptr() == layer.weight.data_ptr():
            calls.append(x)
        return original(self, x, **arguments)

    monkeypatch.setattr(Quantizer, "quantize", counting)
    return calls


@pytest.mark.parametrize("how", [{"cached": True}, {"flags": True}])
def test_cached_equals_uncached_and_quantizes_once(layer, batches, how, monkeypatch):
    expected = run_microbatches(layer, batches)
    calls = count_weight_casts(monkeypatch, layer)
    assert_same(run_microbatches(layer, batches, **how), expected)
    assert len(calls) == 1


def test_a_cache_within_another_leaves_the_outer_one_open(layer, batches, monkeypatch):
    calls = count_weight_casts(monkeypatch, layer)
    with fp4engine.autocast(recipe=RECIPE), fp4engine.weight_cache(layer):
        with fp4engine.weight_cache(layer):
            layer(batches[0])
        layer(batches[1]), layer(batches[2])
    assert len(calls) == 2


def test_regions_that_end_in_another_order_leave_nothing_open(layer, batches):
    """As generators' and threads' may; an entry that outlives its region is not told of optimizers' steps."""
    first, second = fp4engine.weight_cache(layer), fp4engine.weight_cache(layer)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None), second.__exit__(None, None, None)
    with fp4engine.autocast(recipe=RECIPE):
        before = layer(batches[0])
        layer.weight.data.zero_()  # unseen by a cache
        after = layer(batches[0])
    assert not torch.equal(before, after)
    assert torch.equal(after, layer.bias.expand_as(after))


def test_a_thread_that_comes_between_neither_gives_nor_gets_anothers_operands():
    """What another thread may do while operands are made is done by what makes them."""
    cache, weight = weight_cache.WeightCache(), torch.randn(16, 16)
    first, second = (make_linear_plan(recipe, "linear") for recipe in (RECIPE, NVFP4BlockScaling(disable_rht=True)))

    def after(act, made):
        return lambda: (act(), made)[1]

    def rowwise(plan, make):
        (operand, _), _ = cache.get(weight, plan, False, make)
        return operand

    def of_second():
        return rowwise(second, lambda: ("second", None))

    assert rowwise(first, after(of_second, ("first", None))) == "first"
    assert of_second() == "second"
    rowwise(first, after(cache.clear, ("before the step", None)))
    assert rowwise(first, lambda: ("after it", None)) == "after it"


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=2),
        LinearRecipe(weight=Casts(CastSpec(rounding=RoundingMode.STOCHASTIC), CastSpec(), "rowwise_dequantized")),
    ],
    ids=["delayed", "drawn and kept"],
)
def test_what_changes_from_call_to_call_is_not_cached(layer, batches, recipe):
    outputs = []
    for cached in (False, True):
        module = copy.deepcopy(layer)
        fp4engine.manual_seed(0)
        with fp4engine.weight_cache(module) if cached else contextlib.nullcontext():
            for batch in batches:
                with fp4engine.autocast(recipe=recipe):
                    outputs.append(module(batch).detach())
    assert_same(outputs[:3], outputs[3:])


def test_weights_that_share_an_amax_are_quantized_every_time():
    """A write to one of the siblings moves no version of the others', whose scales it changes."""
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(48, 32), "k_proj": torch.nn.Linear(48, 32)})
    fp4engine.convert(model, share_amax(model, NVFP4BlockScaling()))
    inp = torch.randn(8, 48)
    with fp4engine.weight_cache(model):
        before = model["q_proj"](inp)
        with torch.no_grad():
            model["k_proj"].weight.mul_(37)
        cached = model["q_proj"](inp)
    assert not torch.equal(before, cached)
    assert torch.equal(cached, model["q_proj"](inp))


def test_weights_made_in_inference_mode_are_quantized_every_time(batches):
    with torch.inference_mode(), fp4engine.autocast(recipe=RECIPE):
        layer = fp4engine.Linear(48, 33)
        with fp4engine.weight_cache(layer):
            before = layer(batches[0])
            layer.weight.mul_(2)
            assert not torch.equal(layer(batches[0]), before)


def test_load_state_dict_and_other_recipe_invalidate(layer, batches):
    other = fp4engine.Linear(48, 33)
    with fp4engine.weight_cache(layer):
        with fp4engine.autocast(recipe=RECIPE):
            layer(batches[0])
        layer.load_state_dict(other.state_dict())
        with fp4engine.autocast(recipe=RECIPE):
            assert torch.equal(layer(batches[0]), other(batches[0]))
        plain = NVFP4BlockScaling(disable_2d_quantization=True)
        with fp4engine.autocast(recipe=plain):
            assert torch.equal(layer(batches[0]), other(batches[0]))


def test_a_weight_that_was_cached_can_be_swapped():
    linear = torch.nn.Sequential(fp4engine.Linear(64, 32, recipe=RECIPE))
    x = torch.randn(8, 64)
    twin = copy.deepcopy(linear).double()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        linear[0](x, is_first_microbatch=True)
        linear.load_state_dict({name: 2 * value for name, value in linear.state_dict().items()})
        assert torch.equal(linear[0](x, is_first_microbatch=False), linear(x))
        with fp4engine.weight_cache(linear):
            linear(x)
            linear.double()
            linear.load_state_dict(twin.state_dict())
            assert torch.equal(linear(x.double()), twin(x.double()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_no_grad_call_first(layer, batches):
    expected = run_microbatches(layer, batches)
    with fp4engine.weight_cache(layer):
        with torch.no_grad(), fp4engine.autocast(recipe=RECIPE):
            layer(batches[0])
        fp4engine.manual_seed(3)
        layer.zero_grad()
        outputs = []
        with fp4engine.autocast(recipe=RECIPE):
            for batch in batches:
                out = layer(batch)
                out.square().sum().backward()
                outputs.append(out.detach())
    assert_same([*outputs, layer.weight.grad], [*expected[:3], expected[-2]])


def test_cache_ends_with_its_scope_and_on_exceptions(layer, batches):
    with pytest.raises(KeyError), fp4engine.weight_cache(layer):
        raise KeyError
    assert layer._weight_caches == ()


def test_a_main_grad_that_is_replaced_between_forward_and_backward_is_refused():
    layer = fp4engine.Linear(16, 16, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 16)
    with fp4engine.autocast(recipe=RECIPE):
        output = layer(torch.randn(4, 16))
    layer.weight.main_grad = layer.weight.main_grad.view(16, 16)  # the same memory
    output.sum().backward(retain_graph=True)
    layer.weight.main_grad = torch.zeros(16, 16)
    with pytest.raises(RuntimeError, match="main_grad is another tensor in the backward pass"):
        output.sum().backward()


def test_fused_accumulation_without_buffer_says_so(batches):
    layer = fp4engine.Linear(48, 33, fuse_wgrad_accumulation=True)
    for buffer in (None, torch.zeros(33, 47), torch.zeros(33, 48, dtype=torch.int32)):
        layer.weight.main_grad = buffer
        with fp4engine.autocast(recipe=RECIPE), pytest.raises(ValueError, match="main_grad, an FP32, BF16 or FP16"):
            layer(batches[0])


def test_what_a_forward_saves_does_not_depend_on_what_the_cache_holds():
    """A frozen input asks for no operand of dgrad, be one cached or not."""
    layer, saved = fp4engine.Linear(32, 32, bias=False), []

    def forward(needs_dgrad):
        saved.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t)
        with hooks, fp4engine.autocast(recipe=RECIPE):
            layer(torch.randn(16, 32, requires_grad=needs_dgrad))
        return len(saved)

    alone = forward(False)
    with fp4engine.weight_cache(layer):
        assert forward(True) > alone
        assert forward(False) == alone


def test_threads_that_step_and_threads_that_begin_to_cache():
    """An optimizer's step clears all caches of microbatches while another thread makes more of them."""
    interval = sys.getswitchinterval()
    errors, stop = [], threading.Event()

    def begin():
        caches = [weight_cache.microbatch_cache() for _ in range(3000)]
        while not stop.is_set():
            caches = [*caches[1:], weight_cache.microbatch_cache()]

    def step():
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        try:
            for _ in range(100):
                torch.optim.SGD([weight], lr=0.1).step()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=begin), threading.Thread(target=step)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        threads[1].join()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        threads[0].join()
    assert not errors


def test_a_cached_weight_still_lets_go_of_its_memory() -> None:
    """As FSDP2 resizes the storage of a gathered weight; NumPy, which looked at its bytes, forbids that."""
    layer = fp4engine.Linear(32, 32)
    with fp4engine.autocast():
        layer(torch.randn(16, 32), is_first_microbatch=True)
    assert layer.weight.untyped_storage().resizable()
