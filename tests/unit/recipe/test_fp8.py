"""FP8 recipes: TransformerEngine's switches, formats per role, and scales that come from earlier steps."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp4engine
from fp4engine import reference
from fp4engine.formats import E4M3, E5M2, E8M0, FP32, fp8, fp8_block
from fp4engine.ops import gemm_fp8
from fp4engine.quantizers import make_quantizer
from fp4engine.quantizers.delayed import AmaxHistory
from fp4engine.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    RuledRecipe,
    recipe_from_json,
)
from fp4engine.roles import QuantizerRole
from fp4engine.state import current_state

RECIPES = (Float8CurrentScaling, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling)


@pytest.mark.parametrize("cls", RECIPES)
@pytest.mark.parametrize(
    ("fp8_format", "forward", "gradient"),
    [(Format.HYBRID, E4M3, E5M2), (Format.E4M3, E4M3, E4M3), (Format.E5M2, E5M2, E5M2)],
)
def test_element_per_role(cls, fp8_format: Format, forward, gradient) -> None:
    recipe = cls(fp8_format=fp8_format)
    elements = [recipe.casts(role).rowwise.element for role in ("input", "weight", "grad_output")]
    assert elements == [forward, forward, gradient]
    assert recipe_from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Float8CurrentScaling, {"fp8_format": Format.E2M1}, "fp8_format must be one of .*HYBRID.* got Format.E2M1"),
        (Float8CurrentScaling, {"fp8_dpa": True}, "fp8_dpa must be one of False, got True"),
        (Float8CurrentScaling, {"fp8_gemm_dgrad": True}, "fp8_gemm_dgrad must be one of MMParams"),
        (
            DelayedScaling,
            {"backward_override": "dequantized"},
            r"DelayedScaling's backward_override \(flag NVTE_BACKWARD_OVERRIDE\) must be None, got 'dequantized'",
        ),
        (DelayedScaling, {"amax_compute_algo": "mean"}, "amax_compute_algo must be one of 'max', 'most_recent'"),
        (DelayedScaling, {"amax_history_len": 0}, "amax_history_len must be an integer of at least 1, got 0"),
        (
            DelayedScaling,
            {"amax_history_len": float("nan")},
            "amax_history_len must be an integer of at least 1, got nan",
        ),
        (DelayedScaling, {"margin": -1}, "margin must be an integer from 0 to 7, got -1"),
        (DelayedScaling, {"margin": 2.5}, "margin must be an integer from 0 to 7, got 2.5"),
        (Float8BlockScaling, {"x_block_scaling_dim": 3}, "x_block_scaling_dim must be one of 1, 2, got 3"),
        (Float8BlockScaling, {"x_block_scaling_dim": 2}, "at most one may be 2"),
        (MXFP8BlockScaling, {"margin": 2}, "margin must be one of 0, got 2"),
        (Float8CurrentScaling, {"use_power_2_scales": 1}, "use_power_2_scales must be True or False, got 1"),
        *(
            (QParams, {"amax_epsilon": epsilon}, f"amax_epsilon must be a finite number of at least 0, got {epsilon!r}")
            for epsilon in (-1e-3, float("nan"), float("inf"), "0", None, True)
        ),
        *(
            (partial(fp8, E4M3), {"margin": margin}, f"margin must be an integer from 0 to 126, got {margin!r}")
            for margin in (-1, 2.5, 127, 1100, float("nan"), "1", True)
        ),
        *(
            (preset, {"power_of_two": value}, f"power_of_two must be True or False, got {value!r}")
            for preset in (partial(fp8, E4M3), partial(fp8_block, E4M3, 1))
            for value in (1, None, "yes")
        ),
    ],
)
def test_wrong_arguments(cls, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    assert Float8CurrentScaling().fp8_quant_fwd_inp.power_2_scale
    assert not Float8CurrentScaling(use_power_2_scales=False).use_power_2_scales
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "yes")
    with pytest.raises(ValueError, match="NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES must be '0' or '1', got 'yes'"):
        Float8CurrentScaling()
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert Float8BlockScaling().casts("input").rowwise.scale == FP32


def test_blocks() -> None:
    recipe = Float8BlockScaling()
    assert [recipe.casts(role).rowwise.block for role in ("input", "weight")] == [(1, 128), (128, 128)]
    assert recipe.casts("input").rowwise.scale == E8M0
    assert MXFP8BlockScaling(enable_2d_quantization=True).casts("weight").columnwise.block == (32, 32)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_current_scaling_is_torch_s_own_cast(element) -> None:
    """The codes are ``(x * max / amax).to(float8)``; the product of scale and code is within half a last place."""
    x = torch.randn(64, 64)
    cast = reference.quantize(x, fp8(element))
    own = (x * (torch.tensor(element.max_value) / x.abs().max())).clamp(-element.max_value, element.max_value)
    assert torch.equal(cast.codes, own.to(element.torch_dtype).view(torch.uint8))
    assert cast.scale_inv.shape == (64, 0)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3.7])
def test_power_of_two_scales_round_down(scale: float) -> None:
    x = torch.randn(16, 64) * scale
    spec = fp8(E4M3, power_of_two=True)
    amax = reference.amax(x, spec)
    factor = float(spec.numerator / amax)
    mantissa, _ = torch.frexp(torch.tensor(factor, dtype=torch.float64))
    exact = 448 / float(x.abs().max())
    assert mantissa == 0.5 and factor <= exact * (1 + 1e-6) and 2 * factor > exact


def test_mm_params_reach_the_plan() -> None:
    layer = fp4engine.Linear(32, 32)
    with fp4engine.autocast(recipe=Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False))):
        layer(torch.randn(4, 32))
        plan = layer.plan(current_state())
    assert plan.fast_accumulation == {"fprop", "dgrad"}


def amaxes_used(recipe: DelayedScaling, seen: list[float]) -> list[float]:
    history = AmaxHistory(recipe.amax_history_len, 448.0)
    used = []
    for value in seen:
        history.ended = True
        used.append(float(history.record(torch.tensor([value]), recipe, recipe.casts("input").rowwise)))
    return used


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (DelayedScaling(amax_history_len=3), [448, 4, 9, 9, 9, 3]),
        (DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"), [448, 4, 9, 2, 1, 3]),
        (DelayedScaling(amax_history_len=2, amax_compute_algo=lambda h: h.sum()), [448, 4, 13, 11, 3, 4]),
    ],
)
def test_the_amax_of_a_step_is_chosen_from_those_before(recipe: DelayedScaling, expected: list[float]) -> None:
    assert amaxes_used(recipe, [4, 9, 2, 1, 3, 7]) == expected


def test_an_amax_of_zero_or_infinity_leaves_the_scale_as_it_was() -> None:
    recipe = DelayedScaling(amax_history_len=1)
    assert amaxes_used(recipe, [4, 0, float("inf"), 5, 6]) == [448, 4, float("inf"), 4, 5]


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_nan_leaves_the_largest_amax_to_the_other_steps_and_an_inf_keeps_the_last(lost: float) -> None:
    """As TransformerEngine's fmaxf: otherwise one NaN would keep a scale for as many steps as the history has."""
    values, amax = torch.zeros(4), torch.tensor([448.0])
    scaled_by = []
    for current in (2.0, lost, 6.0, 8.0):
        reference.record_amax(values, amax, torch.tensor([current]), "max", None)
        scaled_by.append(amax.item())
    assert scaled_by == ([448.0, 2.0, 2.0, 6.0] if lost != lost else [448.0, 2.0, 2.0, 2.0])


def test_scales_change_once_per_step_however_often_a_tensor_is_cast() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    recipe = DelayedScaling()
    for step in range(3):
        with fp4engine.autocast(recipe=recipe):
            with fp4engine.autocast(recipe=recipe):
                layer(torch.full((4, 32), 2.0**step))
            layer(torch.full((4, 32), 2.0**step / 2))
    history = layer.amax_histories["input"]
    assert history.values[:4].tolist() == [4, 2, 1, 0]
    assert float(history.amax) == 2


def test_a_step_ends_with_the_outermost_region_whatever_its_recipe() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    for _ in range(2):
        with fp4engine.autocast(), fp4engine.autocast(recipe=DelayedScaling()):
            layer(torch.full((4, 32), 2.0))
    assert float(layer.amax_histories["input"].amax) == 2


@pytest.mark.parametrize("is_used", [False, True])
def test_the_step_of_a_copy_ends_with_the_region_in_which_it_was_made(is_used: bool) -> None:
    """A copy that was not used before the region closed scaled its next step by the amax of the last one."""
    layer = fp4engine.Linear(32, 32, bias=False)
    with fp4engine.autocast(recipe=DelayedScaling()):
        layer(torch.full((4, 32), 2.0))
        copied = copy.deepcopy(layer)
        for each in (layer, copied)[: 1 + is_used]:
            each(torch.full((4, 32), 1.0))
    for each in (layer, copied):
        with fp4engine.autocast(recipe=DelayedScaling()):
            each(torch.full((4, 32), 3.0))
        history = each.amax_histories["input"]
        assert history.values[:3].tolist() == [3, 2, 0] and float(history.amax) == 2


def test_the_step_of_a_copy_of_a_copy_ends_with_the_region_too() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    with fp4engine.autocast(recipe=DelayedScaling()):
        layer(torch.ones(4, 32))
        copied = copy.deepcopy(copy.deepcopy(layer))
    assert fp4engine.get_amax_history(copied) == fp4engine.get_amax_history(layer)


def test_gradients_of_a_copy_are_scaled_as_those_of_the_module() -> None:
    """The history of gradients took part in the step by that of the input alone, and its copy did not."""
    layer, ones = fp4engine.Linear(32, 32, bias=False), torch.ones(4, 32)
    with fp4engine.autocast(recipe=DelayedScaling()):
        output = layer(ones)
    output.backward(2 * ones)
    with fp4engine.autocast(recipe=DelayedScaling()):
        layer(ones)
        copied = copy.deepcopy(layer)
    for each in (layer, copied):
        with fp4engine.autocast(recipe=DelayedScaling()):
            each(ones).backward(3 * ones)
        history = each.amax_histories["grad_output"]
        assert history.values[:3].tolist() == [3, 2, 0] and float(history.amax) == 2


def test_evaluation_leaves_no_trace_in_the_history() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    with fp4engine.autocast(recipe=DelayedScaling()):
        with torch.inference_mode():
            layer(torch.full((4, 32), 9.0))
        layer(torch.full((4, 32), 2.0))
        with torch.no_grad():
            layer.eval()(torch.full((4, 32), 9.0))
    assert layer.amax_histories["input"].values[:2].tolist() == [2, 0]


@pytest.mark.parametrize("sizes", [(6000.0,), (6000.0, 3.0, float("nan"))], ids=["one step", "a NaN"])
def test_evaluation_is_scaled_as_the_next_step_would_be(sizes: tuple[float, ...]) -> None:
    """It was scaled as the last step: after the first one, whatever exceeded 448 saturated."""
    layer, recipe = fp4engine.Linear(32, 32, bias=False), DelayedScaling(amax_history_len=3)
    for size in sizes:
        with fp4engine.autocast(recipe=recipe):
            layer(torch.full((4, 32), size))
    x, before, other = torch.randn(4, 32) * 1000, str(fp4engine.get_amax_history(layer)), copy.deepcopy(layer)
    with fp4engine.autocast(recipe=recipe):
        with torch.no_grad():
            evaluated = layer.eval()(x)
        assert str(fp4engine.get_amax_history(layer)) == before
        trained = other(x)
        assert float(other.amax_histories["input"].amax) == 6000
        with torch.no_grad():
            within = other.eval()(x)
    assert torch.equal(evaluated, trained) and torch.equal(within, trained)


def test_an_evaluation_by_a_recipe_of_another_length_leaves_the_history_alone() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    for size in (9.0, 3.0):
        with fp4engine.autocast(recipe=DelayedScaling(amax_history_len=4)):
            layer(torch.full((4, 32), size))
    before = fp4engine.get_amax_history(layer)
    with torch.inference_mode(), fp4engine.autocast(recipe=DelayedScaling(amax_history_len=1)):
        layer(torch.full((4, 32), 9.0))
    assert fp4engine.get_amax_history(layer) == before


def test_an_evaluation_first_takes_the_history_to_the_tensors_device() -> None:
    history = AmaxHistory(3, 448.0)
    with torch.inference_mode():
        history._fit(torch.device("cpu"), 2)
        assert history.amax_of(history.turn(), torch.device("meta")).device.type == "meta"
    assert history.values.device.type == "meta" and not history.values.is_inference()


def test_where_steps_never_end_or_nothing_is_run_it_is_refused() -> None:
    recipe = DelayedScaling()
    with pytest.raises(ValueError, match="use autocast"):
        fp4engine.Linear(32, 32, recipe=recipe)
    with pytest.raises(ValueError, match="use autocast"):
        fp4engine.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe)
    with pytest.raises(NotImplementedError, match="calibrating=True"):
        fp4engine.autocast(enabled=False, calibrating=True, recipe=recipe)


def test_a_recipe_of_another_length_resizes_the_history() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    for length, expected in ((3, [1, 0, 0]), (5, [2, 1, 0, 0, 0]), (2, [4, 2])):
        with fp4engine.autocast(recipe=DelayedScaling(amax_history_len=length)):
            layer(torch.full((4, 32), float(max(expected))))
        assert layer.amax_histories["input"].values.tolist() == expected


def test_a_function_chooses_the_scale() -> None:
    seen: list[tuple[float, float, float]] = []

    def half(amax, scale, fp8_max, recipe):
        seen.append((float(amax), float(scale), float(fp8_max)))
        return fp8_max / amax / 2

    recipe = DelayedScaling(scaling_factor_compute_algo=half, amax_history_len=4)
    spec = recipe.casts("input").rowwise
    history = AmaxHistory(4, spec.numerator)
    assert float(history.record(torch.tensor([4.0]), recipe, spec)) == 448.0
    history.ended = True
    assert float(history.record(torch.tensor([1.0]), recipe, spec)) == 8.0  # a scale of 448 / 4 / 2
    assert seen == [(4.0, 1.0, 448.0)]
    with pytest.raises(ValueError, match="scaling_factor_compute_algo"):
        DelayedScaling(scaling_factor_compute_algo="half")


def test_recipes_say_which_they_are() -> None:
    names = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    kinds = {
        DelayedScaling: "delayed",
        Float8CurrentScaling: "float8_current_scaling",
        Float8BlockScaling: "float8_block_scaling",
        MXFP8BlockScaling: "mxfp8",
    }
    for cls, kind in kinds.items():
        assert [name for name in names if getattr(cls(), name)()] == [kind]
    assert DelayedScaling().float8_per_tensor_scaling() and not MXFP8BlockScaling().float8_per_tensor_scaling()
    assert Format.HYBRID.value.max_fwd == 448.0 and Format.HYBRID.value.max_bwd == 57344.0
    with pytest.raises(ValueError, match="fp8_gemm_wgrad"):
        Float8BlockScaling(fp8_gemm_wgrad=MMParams(use_split_accumulator=False))


def test_margin_leaves_binades_free() -> None:
    quantizer = make_quantizer(DelayedScaling(margin=2), QuantizerRole("linear", "input"))
    assert quantizer.rowwise_spec.numerator == 448 / 4


def train(layer, steps: int, seed: int) -> list[torch.Tensor]:
    gradients = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with fp4engine.autocast(recipe=DelayedScaling(amax_history_len=2)):
            output = layer(torch.randn(16, 32, generator=generator))
        layer.zero_grad()
        (output * torch.randn(16, 32, generator=generator)).sum().backward()
        gradients.append(layer.weight.grad.clone())
    return gradients


def test_a_factory_s_quantizers_remember_as_those_of_the_recipe_do() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    custom = CustomRecipe(qfactory=partial(make_quantizer, recipe))
    layers = [fp4engine.Linear(32, 16), fp4engine.Linear(32, 16)]
    layers[1].load_state_dict(layers[0].state_dict())
    for scale in (1, 1000, 30):
        inp, outputs = scale * torch.randn(8, 32), []
        for layer, used in zip(layers, (recipe, custom), strict=True):
            with fp4engine.autocast(recipe=used):
                outputs.append(layer(inp))
            outputs[-1].sum().backward()
        assert torch.equal(*outputs)
    assert fp4engine.get_amax_history(layers[0]) == fp4engine.get_amax_history(layers[1])
    layer = fp4engine.Linear(32, 16, recipe=custom)
    with pytest.raises(ValueError, match="a module cannot follow it outside"):
        layer(inp)


@pytest.mark.no_poison
@pytest.mark.parametrize("kind", ["plain", "ruled", "custom"])
@pytest.mark.parametrize("has_run", [False, True])
def test_delayed_scaling_does_not_compile(kind: str, has_run: bool) -> None:
    """Without fullgraph=True too: what a compiler traced, all layers would keep one history, and none its own."""
    delayed = DelayedScaling(amax_history_len=2)
    recipe = {
        "plain": delayed,
        "ruled": RuledRecipe(delayed),
        "custom": CustomRecipe(qfactory=partial(make_quantizer, delayed)),
    }[kind]
    torch._dynamo.reset()
    layer = fp4engine.Linear(32, 16)
    call = torch.compile(layer, backend="aot_eager")
    if has_run:
        with fp4engine.autocast(recipe=recipe):
            layer(torch.randn(8, 32))
    saved = fp4engine.get_amax_history(layer)
    with fp4engine.autocast(recipe=recipe), pytest.raises(Exception, match="DelayedScaling keeps amaxes between steps"):
        call(torch.randn(8, 32))
    assert fp4engine.get_amax_history(layer) == saved


def test_histories_are_saved_and_restored_outside_state_dict() -> None:
    first = torch.nn.ModuleDict({"fc": fp4engine.Linear(32, 32)})
    train(first["fc"], 3, seed=1)
    saved = fp4engine.get_amax_history(first)
    assert set(saved) == {"fc:input", "fc:weight", "fc:grad_output"}
    assert set(first.state_dict()) == {"fc.weight", "fc.bias"}
    second = torch.nn.ModuleDict({"fc": fp4engine.Linear(32, 32)})
    second.load_state_dict(first.state_dict())
    fp4engine.set_amax_history(second, saved)
    for one, other in zip(train(first["fc"], 3, seed=2), train(second["fc"], 3, seed=2), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="the model has no module fc; it has head"):
        fp4engine.set_amax_history(torch.nn.ModuleDict({"head": fp4engine.Linear(32, 32)}), saved)
    with pytest.raises(ValueError, match="roles must be input, weight, grad_output, got inptu"):
        fp4engine.set_amax_history(second, {"fc:inptu": saved["fc:input"]})
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module"):
        fp4engine.get_amax_history(saved)  # pyright: ignore[reportArgumentType]


def test_histories_go_on_in_a_model_that_is_wrapped_otherwise() -> None:
    """As ``state_dict`` does, which leaves out the names of checkpoints: one is turned on when memory runs out."""
    plain = torch.nn.ModuleDict({"fc": fp4engine.Linear(32, 32)})
    train(plain["fc"], 2, seed=1)
    saved = fp4engine.get_amax_history(plain)
    wrapped = torch.nn.ModuleDict({"fc": checkpoint_wrapper(fp4engine.Linear(32, 32))})
    wrapped.load_state_dict(plain.state_dict())
    fp4engine.set_amax_history(wrapped, saved)
    assert fp4engine.get_amax_history(wrapped) == saved == fp4engine.get_amax_history(torch.compile(plain))
    fp4engine.set_amax_history(plain, {f"module.{key}": history for key, history in saved.items()})
    assert fp4engine.get_amax_history(plain) == saved
    with pytest.raises(ValueError, match="several keys of state are for one layer of the model, 'fc"):
        fp4engine.set_amax_history(plain, dict.fromkeys(["fc.original_module:input", "fc:input"], saved["fc:input"]))


@pytest.mark.parametrize("change", [{"values": []}, {"values": [[1.0]]}, {"amax": None}, {"open": 1}, {"more": 1}])
def test_a_state_of_another_form_changes_no_history(change: dict) -> None:
    model = torch.nn.ModuleDict({"fc": fp4engine.Linear(32, 32)})
    train(model["fc"], 2, seed=1)
    saved = fp4engine.get_amax_history(model)
    wrong = {**saved, "fc:input": {**saved["fc:input"], **change}}
    for state in (None, [], {1: saved["fc:input"]}, {"fc:input": {}}, wrong):
        with pytest.raises(ValueError, match=r"state must be .*'module name:role'"):
            fp4engine.set_amax_history(model, state)  # pyright: ignore[reportArgumentType]
    assert fp4engine.get_amax_history(model) == saved


@pytest.mark.parametrize(
    ("sizes", "backend", "multiprocessors", "expected"),
    [
        ((256, 256, 256), "auto", 0, True),
        ((256, 256, 256), "native", 132, False),
        ((257, 256, 256), "auto", 132, False),  # not a multiple of 16
        ((272, 256, 256), "auto", 0, False),
        ((272, 256, 256), "auto", 132, True),
        ((8192, 768, 3072), "auto", 132, True),
        ((8192, 4096, 4096), "auto", 132, False),  # the GPU takes longer than the host
        ((65536, 256, 256), "auto", 132, False),  # four tiles of 65,536 terms
    ],
)
def test_which_fp8_products_are_kernels(monkeypatch, sizes, backend: str, multiprocessors: int, expected: bool) -> None:
    """Whatever the order of the sizes: all three products of a layer, or none."""
    monkeypatch.setattr(gemm_fp8, "_multiprocessors", lambda device: multiprocessors)
    for rows, columns, terms in itertools.permutations(sizes):
        asked = (rows, columns, terms, backend, torch.device("cpu"))
        assert gemm_fp8.is_small(*asked) is expected


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128, 96), (17, 33, 5), (1, 15, 16), (256, 256, 256), (1040, 2048, 784)])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_fp8_products_are_the_reference_product(
    shape: tuple[int, int, int], out_dtype: torch.dtype, backend: str
) -> None:
    """Up to the order of FP32 sums: at most twice the rounding of the output dtype."""
    rows, contracted, columns = shape
    small = gemm_fp8.is_small(rows, columns, contracted, backend, torch.device("cuda"))
    ran = "gemm/triton" if small else "gemm/fp8"
    x, w = torch.randn(rows, contracted, device="cuda"), torch.randn(columns, contracted, device="cuda")
    bias = torch.randn(columns, device="cuda")
    quantizers = [make_quantizer(Float8CurrentScaling(), QuantizerRole("linear", role)) for role in ("input", "weight")]
    left, right = (q.quantize(value, columnwise=False).rowwise for q, value in zip(quantizers, (x, w), strict=True))
    fp4engine.ops.reset_executed_paths()
    product = fp4engine.ops.gemm(left, right, out_dtype=out_dtype, bias=bias, backend=backend)
    assert fp4engine.ops.executed_paths() == {ran: 1}
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64).T + bias
    tolerance = 2 * torch.finfo(out_dtype).eps if out_dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))
