"""Hybrid and identity tensors, and what is stored of either in a module and in a file."""

import copy
import io
import pickle

import pytest
import torch
from torch._library.opaque_object import get_opaque_type_name

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine.te.common import recipe as recipes
from fp4engine.te.pytorch.cpp_extensions import general_gemm
from fp4engine.te.pytorch.custom_recipes.quantizer_factory_zoo import nvfp4_row_scaled_fwd_high_precision_bwd_factory
from fp4engine.te.pytorch.tensor.master_weights import post_all_gather_processing, quantize_master_weights

E4M3 = te.DType.kFloat8E4M3


def hybrid(columnwise=None, **arguments) -> te.HybridQuantizer:
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=columnwise or te.NVFP4Quantizer(), **arguments
    )


def per_tensor() -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(E4M3)


def test_a_side_that_is_gone_cannot_be_asked_for() -> None:
    tensor = hybrid()(torch.randn(32, 64))
    row = tensor.rowwise_sub_storage
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert tensor.rowwise_sub_storage is row
    tensor.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="no columnwise sub-storage"):
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert tensor.rowwise_sub_storage is row and tensor.columnwise_sub_storage is None
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": False} and "columnwise=None" in repr(tensor)


class Doubled(te.HybridQuantizer):
    factor = 2.0

    def quantize_impl(self, tensor: torch.Tensor):
        return super().quantize_impl(self.factor * tensor)


def test_a_hybrid_quantizer_of_a_class_of_its_own_stays_one_in_copies() -> None:
    """Copies, of which each tensor keeps one, were plain hybrids without the attributes that someone had set."""
    quantizer = Doubled(rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer())
    quantizer.factor = 4.0
    copied = quantizer.copy()
    quantizer.rowwise_quantizer.internal = True
    assert type(copied) is Doubled and copied.factor == 4.0 and not copied.rowwise_quantizer.internal
    assert type(copied(torch.ones(32, 64))._quantizer) is Doubled
    quantizer.rowwise_quantizer.dtype = 7  # as a script may have it, and not a DType
    assert type(quantizer.copy().rowwise_quantizer.dtype) is int


@pytest.mark.parametrize("used", [(True, False), (False, True), (False, False)])
def test_an_update_leaves_the_sides_that_are_not_in_use(used) -> None:
    quantizer, x = hybrid(), torch.randn(32, 64)
    tensor, other = quantizer(x), quantizer(2 * x)
    quantizer.set_usage(rowwise=used[0], columnwise=used[1])
    quantizer.update_quantized(2 * x, tensor)
    assert torch.equal(tensor.operands.rowwise.scale_inv, other.operands.rowwise.scale_inv) is used[0]
    assert torch.equal(tensor.operands.columnwise.amax, other.operands.columnwise.amax) is used[1]
    assert quantizer(x).get_usages() == {"rowwise": used[0], "columnwise": used[1]}


def test_what_is_written_into_high_precision_is_a_copy() -> None:
    source = torch.ones(16, 16)
    tensor = te.IdentityQuantizer()(torch.zeros(16, 16))
    tensor.copy_(source)
    tensor.add_(1)
    assert torch.equal(source, torch.ones(16, 16)) and torch.equal(tensor.dequantize(), source + 1)
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}


def test_high_precision_passes_for_the_dtype_that_it_is_kept_in() -> None:
    tensor = te.IdentityQuantizer().make_empty((16, 16), dtype=torch.bfloat16)
    assert tensor.dtype is torch.bfloat16
    source = torch.randn(16, 16)
    te.IdentityQuantizer(dtype=torch.float32).update_quantized(source, tensor)
    assert tensor.dtype is torch.float32 and torch.equal(tensor.dequantize(), source)


def test_fast_math_of_4over6_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    te.NVFP4Quantizer()
    with pytest.raises(ValueError, match="FAST_MATH='1' is not implemented"):
        te.NVFP4Quantizer(nvfp4_use_4over6=True)


@pytest.mark.parametrize(
    "quantizer", [te.IdentityQuantizer(), hybrid(), hybrid(te.IdentityQuantizer()), te.NVFP4Quantizer()]
)
def test_files_load_with_weights_only(quantizer) -> None:
    tensor, file = quantizer(torch.randn(32, 64)), io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(tensor) and type(loaded._quantizer) is type(quantizer)
    assert torch.equal(loaded.dequantize(), tensor.dequantize())


def both_ways(role) -> te.HybridQuantizer:
    return te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(E4M3),
        columnwise_quantizer=te.Float8CurrentScalingQuantizer(E4M3),
    )


def test_weights_of_a_factory_are_of_its_classes() -> None:
    recipe = recipes.CustomRecipe(qfactory=both_ways)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(32, 32)
    values = layer.weight.dequantize()
    assert isinstance(layer.weight, te.HybridQuantizedTensor)
    assert torch.equal(layer.weight.rowwise_sub_storage.dequantize(), values)
    assert torch.equal(layer.weight.columnwise_sub_storage.dequantize(), values)
    assert layer.weight.dequantize(dtype=torch.bfloat16).dtype is torch.bfloat16
    with te.autocast(recipe=recipe):
        layer(torch.randn(32, 32)).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(RuntimeError, match="Recipe mismatch"), te.autocast(recipe=recipes.Float8CurrentScaling()):
        layer(torch.randn(32, 32))
    with te.quantized_model_init(recipe=recipes.CustomRecipe(qfactory=lambda role: te.IdentityQuantizer())):
        plain = te.Linear(32, 32)
    assert isinstance(plain.weight, te.IdentityTensor) and isinstance(plain.weight, torch.nn.Parameter)
    x = torch.randn(32, 32)
    expected = torch.nn.functional.linear(x, plain.weight.dequantize(), plain.bias)
    assert torch.equal(plain(x), expected)


def test_parts_of_codes_under_one_scale_are_quantized() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 40)
    current = te.Float8CurrentScalingQuantizer(E4M3, device="cpu")
    both = te.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=current.copy())
    for quantizer in (current, both, te.IdentityQuantizer()):
        whole = quantizer(x)
        values = whole.dequantize()
        views = (whole[3:9], whole.narrow(0, 16, 32), whole[:, 1::2], whole.view(4, 16, 40), *whole.split(20))
        plain = (values[3:9], values.narrow(0, 16, 32), values[:, 1::2], values.view(4, 16, 40), *values.split(20))
        for view, expected in zip(views, plain, strict=True):
            assert type(view) is type(whole)
            assert torch.equal(view.dequantize(), expected)
        columnwise = views[0].operands.columnwise
        assert columnwise is None or torch.equal(columnwise.dequantize().T, values[3:9])
        assert type(whole.new_zeros(4, 8)) is type(whole) and not whole.new_zeros(4, 8).any()


WRITES = {
    "itself": lambda tensor, values: tensor.copy_(values),
    "arithmetic": lambda tensor, values: tensor.mul_(0).add_(values),
    "data": lambda tensor, values: tensor.data.copy_(values),
    "new data": lambda tensor, values: setattr(tensor, "data", values),
    "detached": lambda tensor, values: tensor.detach().copy_(values),
    "out": lambda tensor, values: torch.mul(values, 1.0, out=tensor),
    "a list": lambda tensor, values: torch._foreach_copy_([tensor], [values]),
    "an item": lambda tensor, values: tensor.__setitem__(0, values[0]),
    "a part": lambda tensor, values: tensor.__setitem__(slice(0, 16), values[:16]),
    "a view": lambda tensor, values: tensor.view(16, 64).copy_(values.view(16, 64)),
    "a transpose": lambda tensor, values: tensor.t().copy_(values.T),
    "a diagonal": lambda tensor, values: tensor.fill_diagonal_(7.0),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("kind", [te.NVFP4Quantizer(), te.MXFP8Quantizer(E4M3), "FP8"], ids=["NVFP4", "MXFP8", "FP8"])
def test_what_is_written_is_there_or_refused(kind, way: str) -> None:
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, device="cpu") if kind == "FP8" else kind
    tensor, values = quantizer(torch.randn(32, 32)), torch.full((32, 32), 2.0)
    before = tensor.dequantize().clone()
    try:
        WRITES[way](tensor, values)
    except RuntimeError as refused:
        assert "lost" in str(refused) or "inner dimension" in str(refused)
        assert torch.equal(tensor.dequantize(), before)
    else:
        assert torch.equal(tensor.dequantize(), values)


@pytest.mark.parametrize("kind", [te.NVFP4Quantizer(), te.MXFP8Quantizer(E4M3)], ids=["NVFP4", "MXFP8"])
def test_data_of_the_same_kind_is_taken_as_it_is(kind) -> None:
    tensor, other = kind(torch.randn(32, 32)), kind(torch.randn(32, 32))
    tensor.data = torch.ones(8, 16, dtype=torch.bfloat16)
    assert tensor.shape == (8, 16) and tensor.dtype == torch.bfloat16 and bool((tensor.dequantize() == 1).all())
    tensor.data = other
    assert torch.equal(tensor.dequantize(), other.dequantize()) and torch.equal(tensor.data, other)
    assert tensor._rowwise_data is other._rowwise_data and tensor._rowwise_scale_inv is other._rowwise_scale_inv
    for value in (3, None, [1.0]):
        with pytest.raises(TypeError, match=r"the data of a \w+Tensor must be a tensor, got (3|None|\[1\.0\])$"):
            tensor.data = value
    assert torch.equal(tensor.dequantize(), other.dequantize())


@pytest.mark.parametrize("kind", [te.NVFP4Quantizer(), te.MXFP8Quantizer(E4M3)], ids=["NVFP4", "MXFP8"])
def test_a_module_takes_its_codes_to_another_dtype(kind) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(kind(torch.full((32, 32), 2.0)))
    weight = module.to(torch.bfloat16).weight
    assert weight.dtype == torch.bfloat16 and weight.requires_grad and type(weight) is kind.tensor_class
    weight.dequantize().sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and torch.equal(weight.dequantize(), torch.full_like(weight.grad, 2.0))


def test_an_optimizer_of_lists_trains_codes() -> None:
    weight = torch.nn.Parameter(te.NVFP4Quantizer()(torch.randn(32, 32)))
    before, weight.grad = weight.dequantize().clone(), torch.ones(32, 32)
    torch.optim.SGD([weight], 1.0, foreach=True).step()
    assert (weight.dequantize() - before).mean() < -0.9


def test_a_parameter_is_saved_as_one() -> None:
    for requires_grad in (True, False):
        buffer = io.BytesIO()
        torch.save(torch.nn.Parameter(te.NVFP4Quantizer()(torch.randn(32, 32)), requires_grad), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad is requires_grad


def test_high_precision_is_written_where_it_lies() -> None:
    base = torch.zeros(6, 4)
    te.IdentityQuantizer()(base)[2:4].copy_(torch.ones(2, 4))
    assert base.sum(1).tolist() == [0, 0, 4, 4, 0, 0]


def test_identity_sides_of_a_hybrid_have_dtypes_of_their_own() -> None:
    sides = [te.IdentityQuantizer(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    tensor = te.HybridQuantizer(rowwise_quantizer=sides[0], columnwise_quantizer=sides[1])(torch.ones(4, 8))
    assert tensor.rowwise_sub_storage._hp_data.dtype == torch.bfloat16
    assert tensor.columnwise_sub_storage._hp_data.dtype == torch.float32


def test_sides_of_a_hybrid_that_are_written_keep_their_memory_and_dtype() -> None:
    """FP32 master weights made the side in high precision one of FP32, which what had been detached did not see."""
    tensor = hybrid(te.IdentityQuantizer())(torch.zeros(32, 64, dtype=torch.bfloat16))
    detached, later = tensor.detach(), torch.randn(32, 64)
    tensor.copy_(later)
    for side in (tensor.columnwise_sub_storage, detached.columnwise_sub_storage):
        assert side.dtype == torch.bfloat16 and torch.equal(side.dequantize(), later.bfloat16())


def test_a_stored_weight_of_two_casts_is_what_its_quantizer_writes() -> None:
    recipe = recipes.CustomRecipe(qfactory=nvfp4_row_scaled_fwd_high_precision_bwd_factory)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        weight = te.Linear(64, 32, params_dtype=torch.bfloat16, device="cpu").weight
    before = weight.columnwise_sub_storage.dequantize().clone()
    assert before.dtype == weight.columnwise_sub_storage._hp_data.dtype == torch.bfloat16
    with torch.no_grad():
        weight.copy_(weight.get_high_precision_init_val())
    assert torch.equal(weight.columnwise_sub_storage.dequantize(), before)


def test_strides_of_a_part_are_those_of_the_whole() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    for quantizer in (
        per_tensor(),
        te.HybridQuantizer(rowwise_quantizer=per_tensor(), columnwise_quantizer=per_tensor()),
    ):
        whole = quantizer(x)
        moved = whole.as_strided((62, 32), (32, 1), 32)
        assert type(moved) is type(whole) and torch.equal(moved.dequantize(), whole.dequantize()[1:63])
        part = whole[2:60, 8:24].detach()
        assert (part.stride(), part.storage_offset()) == ((32, 1), 2 * 32 + 8)
        for view, values in (
            (moved, whole.dequantize()[1:63]),
            (part.as_strided((59, 16), (32, 1), 5 * 32 + 16), whole.dequantize()[5:, 16:]),  # of what it is a part of
        ):
            assert torch.equal(view.dequantize(), values)
            assert torch.equal(view.operands.columnwise.dequantize(torch.bfloat16).T, values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_given_scale_does_not_hide_what_is_not_finite(value: float) -> None:
    x = torch.randn(4, 32)
    x[1, 3] = value
    given = te.Float8Quantizer(torch.full((1,), 20.0), torch.zeros(1), E4M3)
    existing = te.Float8CurrentScalingQuantizer(
        E4M3, use_existing_amax=True, amax=torch.full((1,), 4.0), force_pow_2_scales=True
    )
    for quantizer in (given, existing):
        for side in (quantizer(x).operands.rowwise, quantizer(x).operands.columnwise):
            assert not side.dequantize().isfinite().any()
    assert not given.amax.isfinite()


def test_a_given_scale_and_its_amax_may_be_numbers_without_a_dimension() -> None:
    x, scale, amax = torch.randn(4, 32), torch.tensor(20.0), torch.tensor(0.5)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    with_dimension = te.Float8Quantizer(scale.view(1), torch.zeros(1), E4M3)
    assert torch.equal(quantizer(x).dequantize(), with_dimension(x).dequantize()) and amax == x.abs().max()
    quantizer.calibrate(2 * x)
    assert amax == 2 * x.abs().max()


def test_an_existing_amax_is_scaled_by_a_power_of_two_where_one_is_asked_for() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(
        E4M3, use_existing_amax=True, amax=torch.full((1,), 4.0), force_pow_2_scales=True
    )
    assert quantizer(torch.randn(4, 32))._scale_inv == 1 / 64


@pytest.mark.parametrize("kept", ["rowwise", "columnwise"])
def test_a_side_that_is_made_of_the_other_has_its_scale(kept) -> None:
    """The scale and the amax of delayed scaling go on meanwhile."""
    scale, amax = torch.full((1,), 20.0), torch.zeros(1)
    sides = {"rowwise": False, "columnwise": False, kept: True}
    tensor = te.Float8Quantizer(scale, amax, E4M3, **sides)(torch.randn(32, 48))
    scale.fill_(3.0)
    amax.zero_()
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    row, col = tensor.operands.rowwise, tensor.operands.columnwise
    assert torch.equal(row.dequantize(), col.dequantize().T) and torch.equal(row.amax, col.amax)
    assert amax == 0


def test_quantizers_say_what_they_were_given() -> None:
    x, e4m3 = torch.ones(16, 32), E4M3
    nvfp4 = te.NVFP4Quantizer()
    for make, message in (
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300), "nvfp4_e4m3_max must be one of"),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="x"), "nvfp4_4over6_err_mode must be"),
        (
            lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True),
            "row_scaled_nvfp4=True goes with",
        ),
        (lambda: te.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group="x")(x), "amax_reduction_group must"),
        (lambda: nvfp4("x"), "NVFP4Quantizer quantizes a tensor, got 'x'"),
        (lambda: nvfp4.quantize(x, out=nvfp4(x[:8])), r"a tensor \[16, 32\] cannot be quantized into one \[8, 32\]"),
        (lambda: nvfp4.quantize(x, out=x), "NVFP4Quantizer writes into a NVFP4Tensor, got Tensor"),
        (lambda: te.Float8Quantizer(1.0, torch.zeros(1), e4m3), r"Float8Quantizer\(scale=\) must be a tensor of one"),
        (lambda: te.Float8CurrentScalingQuantizer(torch.float8_e5m2), r"write TE_DType\[torch.float8_e5m2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="mse").nvfp4_4over6_err_mode == "MSE"
    assert te.NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    with pytest.raises(NotImplementedError, match="define frozen"):
        te.Quantizer()(x)


def test_the_dtype_that_a_quantizer_is_told_rounds_nothing() -> None:
    x, quantizer = torch.randn(16, 32), te.NVFP4Quantizer()
    told, plain = quantizer.quantize(x, dtype=torch.bfloat16), quantizer.quantize(x)
    assert told.dtype == plain.dtype == torch.float32 and torch.equal(told.dequantize(), plain.dequantize())


BLOCKS = {
    "NVFP4": te.NVFP4Quantizer(),
    "NVFP4 16x16": te.NVFP4Quantizer(with_2d_quantization=True),
    "MXFP8": te.MXFP8Quantizer(E4M3),
    "FP8 1x128": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "FP8 128x128": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
}
ALL = {**BLOCKS, "FP8": per_tensor()}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_an_update_drops_a_side_that_would_be_of_the_old_values(name: str, side: str) -> None:
    quantizer, x, later = ALL[name].copy(), torch.randn(128, 256), torch.randn(128, 256)
    tensor, kept = quantizer(x), quantizer(x)
    quantizer.set_usage(rowwise=side == "rowwise", columnwise=side == "columnwise")
    assert quantizer.update_quantized(later, tensor) is tensor
    assert tensor.get_usages() == {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
    assert torch.equal(tensor.dequantize(), quantizer(later).dequantize())
    quantizer.update_quantized(later, kept, noop_flag=torch.ones(1))
    assert kept.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("name", ["FP8", "FP8 128x128", "NVFP4 16x16"])
def test_what_is_written_into_detached_codes_is_in_the_transpose_too(name: str) -> None:
    """As by an optimizer of one's own, ``weight.data.add_(step)``, where the quantizer does not use the other side."""
    quantizer, later = ALL[name].copy(), torch.randn(128, 256)
    quantizer.set_usage(columnwise=False)
    weight = quantizer(torch.randn(128, 256))
    weight.update_usage(columnwise_usage=True)
    detached = weight.detach()
    detached.zero_()
    detached.add_(later)
    expected = ALL[name](later).operands
    assert torch.equal(weight.operands.columnwise.dequantize(), expected.columnwise.dequantize())
    detached.copy_from_storage(quantizer(2 * later))
    assert torch.equal(weight.operands.columnwise.dequantize(), weight.dequantize().T)


@pytest.mark.parametrize("name", [*ALL, "hybrid"])
@pytest.mark.parametrize("used", [False, True])
def test_a_write_is_in_both_sides_whatever_the_quantizer_uses(name: str, used: bool) -> None:
    """A hybrid kept the side that is not in use, of the old values; without a side in use nothing was written."""
    quantizer, later = {**ALL, "hybrid": hybrid()}[name], torch.randn(128, 256)
    tensor, expected = quantizer(torch.randn(128, 256)), quantizer(later).operands
    tensor._quantizer.set_usage(rowwise=used, columnwise=False)
    tensor.copy_(later)
    for side in ("rowwise", "columnwise"):
        assert torch.equal(getattr(tensor.operands, side).dequantize(), getattr(expected, side).dequantize())


def test_a_write_casts_the_second_side_from_the_first_as_it_was_written() -> None:
    """Not from another rounding of the same values, where the first side rounds stochastically."""
    first, second = te.NVFP4Quantizer(stochastic_rounding=True), te.NVFP4Quantizer(rowwise=False)
    made_by = te.HybridQuantizer(
        rowwise_quantizer=first, columnwise_quantizer=second, columnwise_source="rowwise_dequantized"
    )
    tensor = made_by(torch.randn(32, 64))
    tensor._quantizer.set_usage(rowwise=False, columnwise=True)
    tensor.copy_(torch.randn(32, 64))
    expected = second(tensor.rowwise_sub_storage.dequantize(dtype=torch.float32)).operands.columnwise
    assert torch.equal(tensor.operands.columnwise.data, expected.data)


@pytest.mark.parametrize(
    ("quantizer", "mine", "message"),
    [
        (per_tensor(), te.MXFP8Quantizer(E4M3), "Float8CurrentScalingQuantizer writes into a Float8Tensor, got MXFP8T"),
        (te.MXFP8Quantizer(E4M3), te.IdentityQuantizer(), "writes into a MXFP8Tensor, got IdentityTensor"),
        (te.NVFP4Quantizer(with_rht=True), te.NVFP4Quantizer(), "with_rht mismatch"),
        (hybrid(per_tensor()), hybrid(), "Float8CurrentScalingQuantizer writes into a Float8Tensor, got NVFP4Tensor"),
    ],
)
def test_a_quantizer_writes_into_what_reads_its_codes_alone(quantizer, mine, message: str) -> None:
    """FP8 of one scale was written as codes of MXFP8, and as values of high precision: 30 and 60 times what it was."""
    tensor = mine(torch.zeros(32, 64))
    with pytest.raises(ValueError, match=message):
        quantizer.quantize(torch.randn(32, 64), out=tensor)
    assert not tensor.dequantize().any() and tensor.get_usages() == mine(torch.zeros(32, 64)).get_usages()


def test_a_module_that_moves_keeps_what_was_set_on_its_weight() -> None:
    """It was kept by .to(dtype) alone, as torch.nn.Linear keeps it everywhere."""
    moves = (lambda m: m._apply(torch.clone), lambda m: m.share_memory(), lambda m: m.to_empty(device="cpu"))
    for move in (*moves, lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16), copy.deepcopy):
        with te.quantized_model_init(recipe=recipes.MXFP8BlockScaling(), preserve_high_precision_init_val=True):
            layer = te.Linear(64, 64, device="cpu")
        initial = layer.weight.get_high_precision_init_val()
        layer.weight.main_grad, layer.weight.is_ours = torch.zeros(64, 64), True
        weight = move(layer).weight
        assert weight.is_ours and weight.main_grad.shape == (64, 64)
        assert torch.equal(weight.get_high_precision_init_val(), initial)
    part = ALL["MXFP8"](torch.randn(64, 256))[:32]
    part.is_ours = [1]
    copied = copy.deepcopy(part)
    assert copied.is_ours == [1] and copied.is_ours is not part.is_ours and not copied.zero_().dequantize().any()


@pytest.mark.parametrize("name", [*ALL, "hybrid"])
def test_what_is_stored_is_shared_and_counted(name: str) -> None:
    """What products read was, which is made anew; of hybrid tensors nothing was moved."""
    tensor = (hybrid() if name == "hybrid" else ALL[name])(torch.randn(128, 256))
    parts = tensor._stored() if name == "hybrid" else [tensor]
    stored = [each for part in parts for each in part._tensors().values() if each is not None]
    assert tensor.nbytes == sum(each.nbytes for each in stored) and not tensor.is_shared()
    assert tensor.share_memory_().is_shared() and all(each.is_shared() for each in stored)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_a_backward_pass_notices_that_its_weight_was_written(name: str) -> None:
    """It multiplied by the new codes, without a word."""
    recipe = getattr(recipes, name)()
    for way in (lambda weight: weight, lambda weight: weight.detach(), lambda weight: weight.data):
        with te.quantized_model_init(recipe=recipe):
            layer = te.Linear(64, 64, device="cpu")
        with te.autocast(recipe=recipe):
            y = layer(torch.randn(16, 64, requires_grad=True))
        with torch.no_grad():
            way(layer.weight).copy_(torch.randn(64, 64))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_is_no_tensor_is_not_written() -> None:
    """A list had no attribute 'shape'."""
    writes = [quantizer(torch.ones(16, 16)).quantize_ for quantizer in (per_tensor(), hybrid(), te.IdentityQuantizer())]
    for write in (*writes, per_tensor()):
        with pytest.raises(ValueError, match=r"Quantizer quantizes a tensor, got \[1\.0\]"):
            write([1.0])


def test_a_write_leaves_no_transpose_of_the_old_values() -> None:
    quantizer = per_tensor()
    quantizer.set_usage(columnwise=False)
    weight, later = quantizer(torch.randn(32, 16)), torch.randn(32, 16)
    weight.update_usage(columnwise_usage=True)
    weight.copy_(later)
    weight.update_usage(columnwise_usage=True)
    assert torch.equal(weight._transpose, quantizer(later)._data.T)


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("name", [*ALL, "hybrid"])
def test_copies_and_pickles_multiply_as_what_they_are_of(name: str, internal: bool) -> None:
    """A deep copy had FP8's scale and not the amax by which layers decode; pickles of some storages raised."""
    made_by = hybrid(per_tensor()) if name == "hybrid" else ALL[name].copy()
    for quantizer in (made_by, made_by.rowwise_quantizer) if name == "hybrid" else (made_by,):
        quantizer.internal = internal
    values, amaxes = torch.randn(128, 256), torch.linspace(5, 6, 100)
    values[0, 0] = next(amax for amax in amaxes if 448 * per_tensor()(amax.view(1, 1))._scale_inv != amax)
    tensor = made_by(values)
    if not internal:
        tensor.copy_(values)
    for copied in (copy.deepcopy(tensor), copy.copy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert type(copied) is type(tensor) and torch.equal(copied.dequantize(), tensor.dequantize())
        for side in ("rowwise", "columnwise"):
            spec = getattr(made_by.frozen(), f"{side}_spec")
            read, expected = copied._operand_as(side, spec), tensor._operand_as(side, spec)
            assert torch.equal(read.data, expected.data) and torch.equal(read.amax, expected.amax)
            assert torch.equal(read.scale_inv.view(torch.uint8), expected.scale_inv.view(torch.uint8))


SHARING = {
    "detached": lambda t: t.detach(),
    "view": lambda t: t.view(2, 128, 128),
    "part": lambda t: t[128:],
    "alike": lambda t: type(t).make_like(t),
}


@pytest.mark.parametrize("way", SHARING)
@pytest.mark.parametrize("name", ["NVFP4 16x16", "FP8 128x128", "FP8"])
def test_a_transpose_goes_when_codes_are_written_by_one_that_lacks_it(name: str, way: str) -> None:
    """What was detached from a tensor, or its view, multiplied by the transpose of the values before."""
    quantizer, later = ALL[name].copy(), torch.randn(256, 128)
    quantizer.set_usage(columnwise=False)
    expected = quantizer(later).dequantize()
    for has_transpose, writes in ((1, 0), (0, 1)):
        pair = tensor, _ = (lambda t: (t, SHARING[way](t)))(quantizer(torch.randn(256, 128)))
        pair[has_transpose].update_usage(columnwise_usage=True)
        if way == "part" and writes:  # it takes none
            continue
        pair[writes].copy_(later.view(pair[writes].shape))
        assert [each.get_usages()["columnwise"] for each in pair] == [False, False]
        for each in pair:
            there = expected[128:] if each.shape == (128, 128) else expected
            assert torch.equal(each.dequantize().view_as(there), there)
            each.update_usage(columnwise_usage=True)
            assert torch.equal(each.operands.columnwise.dequantize(), there.T)
        tensor.copy_(2 * later)  # both have one now, each of its own
        assert [each.get_usages()["columnwise"] for each in pair] == [True, False]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("is_made_alike", [False, True])
def test_a_side_goes_when_codes_are_written_by_one_that_lacks_it(name: str, side: str, is_made_alike: bool) -> None:
    quantizer, later = ALL[name].copy(), torch.randn(128, 128)
    tensor = quantizer(torch.randn(128, 128))
    same, copied = tensor.detach(), tensor.clone()
    before = copied.dequantize()
    if is_made_alike:
        (others,) = (names for other, names in tensor._SIDES.items() if other != side)
        lacking = [tensor._argument(each) for each in tensor._SIDES[side] if each not in others]
        tensor = type(tensor).make_like(tensor, **dict.fromkeys(lacking))
    else:
        tensor.update_usage(**{f"{side}_usage": False})
    tensor._quantizer.set_usage(**tensor.get_usages())
    tensor.copy_(later)
    assert same.get_usages() == tensor.get_usages() and torch.equal(same.dequantize(), tensor.dequantize())
    assert all(copied.get_usages().values()) and torch.equal(copied.dequantize(), before)


def test_a_step_of_a_distributed_optimizer_leaves_no_transpose() -> None:
    weight, master = per_tensor()(torch.randn(32, 64)), torch.randn(32 * 64)
    same = weight.detach()
    quantize_master_weights([weight], [master], [0], None)
    assert same.get_usages() == weight.get_usages() == {"rowwise": True, "columnwise": False}
    weight._data.zero_()  # an all-gather
    post_all_gather_processing([weight])
    assert not weight.operands.columnwise.dequantize().any() and not same.get_usages()["columnwise"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("unseen", [False, True])
def test_what_is_written_into_scales_is_decoded_and_multiplied(name: str, side: str, unseen: bool) -> None:
    quantizer, x = ALL[name].copy(), torch.randn(130, 260)
    quantizer.set_usage(rowwise=side == "rowwise", columnwise=side == "columnwise")
    tensor = quantizer(x)
    before = tensor.dequantize()
    scales = tensor._scale_inv if name == "FP8" else getattr(tensor, f"_{side}_scale_inv")
    scales = scales.data if unseen else scales  # whose version PyTorch counts apart
    if scales.dtype == torch.uint8:
        step = 8 if "NVFP4" in name else 1  # half as large, of E4M3 and of E8M0
        scales.copy_(torch.where(scales > step, scales - step, scales))
    else:
        scales.mul_(0.5)
    assert torch.equal(tensor.dequantize(), before / 2)
    eye, layout = torch.eye(260 if side == "rowwise" else 130), "TN" if side == "rowwise" else "NN"
    product = general_gemm(tensor, eye, torch.float32, layout=layout)[0]
    assert torch.allclose(product, (before.T if side == "rowwise" else before) / 2, atol=1e-6)
    setattr(tensor, "_scale_inv" if name == "FP8" else f"_{side}_scale_inv", scales.clone().zero_())
    assert not tensor.dequantize().any() or "MXFP8" in name  # of which no scale is zero


@pytest.mark.parametrize("name", ["NVFP4", "MXFP8", "FP8 1x128"])
def test_a_side_that_would_be_cast_anew_is_refused(name: str) -> None:
    tensor = ALL[name](torch.randn(128, 128))
    tensor.update_usage(columnwise_usage=False)
    before = tensor._rowwise_data.clone()
    with pytest.raises(RuntimeError, match="no columnwise data, which cannot be made of the other side"):
        tensor.update_usage(columnwise_usage=True)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False} and torch.equal(tensor._rowwise_data, before)


@pytest.mark.parametrize("name", ["NVFP4 16x16", "FP8 128x128", "FP8"])
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_a_side_of_square_blocks_is_the_others_transpose(name: str, side: str) -> None:
    tensor = ALL[name](torch.randn(160, 272))
    before = {attribute: value.clone() for attribute, value in tensor._tensors().items()}
    tensor.update_usage(**{f"{side}_usage": False})
    tensor.update_usage(**{f"{side}_usage": True})
    for attribute, value in before.items():
        assert torch.equal(getattr(tensor, attribute), value), attribute


@pytest.mark.parametrize("name", ALL)
def test_views_by_other_leading_axes_share_bytes(name: str) -> None:
    tensor = ALL[name](torch.randn(64, 256))
    view = tensor.view(4, 16, 256)
    values = torch.randn(4, 16, 256)
    view.copy_(values)
    assert type(view) is type(tensor) and view._rowwise_data.data_ptr() == tensor._rowwise_data.data_ptr()
    expected = ALL[name](values.view(64, 256))
    for attribute, value in expected._tensors().items():
        assert torch.equal(getattr(tensor, attribute), value), attribute
    if name == "FP8":
        assert tensor.view(32, 512).shape == (32, 512)
    else:
        with pytest.raises(RuntimeError, match="does not support reshaping the inner dimension"):
            tensor.view(32, 512)


WHOLE_VIEWS = {
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.squeeze(),
    "slice": lambda t: t[0:64],
    "narrow": lambda t: t.narrow(0, 0, 64),
    "chunk": lambda t: t.chunk(1)[0],
    "split": lambda t: t.split(64)[0],
    "unbind": lambda t: t.view(1, 64, 256).unbind(0)[0],
}


@pytest.mark.parametrize("way", WHOLE_VIEWS)
@pytest.mark.parametrize("name", ALL)
def test_what_is_written_into_a_view_of_everything_is_there(name: str, way: str) -> None:
    tensor, values = ALL[name](torch.randn(64, 256)), torch.randn(64, 256)
    WHOLE_VIEWS[way](tensor).copy_(values)
    for attribute, value in ALL[name](values)._tensors().items():
        assert torch.equal(getattr(tensor, attribute), value), attribute


def test_a_view_without_a_transpose_that_is_stored_takes_no_writes() -> None:
    tensor = per_tensor()(torch.randn(32, 64))
    for view in (tensor.view(-1), tensor.view(64, 32), tensor.view(64, 32).detach()):
        with pytest.raises(RuntimeError, match="a write into a view"):
            view.mul_(2)
    tensor.update_usage(columnwise_usage=False)
    values = tensor.dequantize()
    tensor.view(-1).mul_(2)
    assert torch.equal(tensor.dequantize(), 2 * values)


@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}])
@pytest.mark.parametrize("shape", [(32, 32), (2, 3, 16)])
def test_axes_that_change_places_are_another_view_even_of_equal_sizes(shape: tuple[int, ...], usages) -> None:
    """A square matrix was taken for its own transpose, and ``torch.nn.functional.linear`` multiplied by it."""
    tensor = te.Float8CurrentScalingQuantizer(E4M3, **usages)(torch.randn(shape))
    values, x = tensor.dequantize(), torch.randn(4, shape[-1])
    assert torch.equal(tensor.transpose(0, 1).dequantize(), values.transpose(0, 1))
    assert torch.equal(tensor.mT.dequantize(), values.mT)
    assert torch.equal(tensor.mT.mT.dequantize(), values) and torch.equal(
        tensor.mT.movedim(0, -1), values.mT.movedim(0, -1)
    )
    assert torch.equal(x @ tensor.mT, x @ values.mT)
    written = torch.randn(shape)
    tensor.transpose(0, 1).copy_(written.transpose(0, 1))
    expected = te.Float8CurrentScalingQuantizer(E4M3, **usages)(written)
    for attribute, value in expected._tensors().items():
        assert value is None or torch.equal(getattr(tensor, attribute), value), attribute


@pytest.mark.parametrize("recipe", [recipes.NVFP4BlockScaling(), recipes.Float8BlockScaling()], ids=["NVFP4", "FP8"])
def test_a_new_module_takes_the_bytes_of_one_that_has_trained(recipe) -> None:
    """It stores one side and the other one both, so codes were decoded and quantized again, which moves NVFP4's."""
    x, modules = torch.randn(16, 32), []
    with te.quantized_model_init(recipe=recipe):
        modules += [te.Linear(32, 32) for _ in range(2)]
    with torch.no_grad():
        modules[0].weight.copy_(torch.randn(32, 32))
    modules[1].load_state_dict(modules[0].state_dict())
    for old, new in zip(*(module.weight._tensors().values() for module in modules), strict=True):
        assert torch.equal(old, new) and old.data_ptr() != new.data_ptr()
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(modules[0](x), modules[1](x))
    modules[0].weight.update_usage(columnwise_usage=False)
    modules[1].load_state_dict(modules[0].state_dict())
    assert torch.equal(modules[1].weight.operands.columnwise.dequantize().T, modules[0].weight.dequantize())


def test_axes_of_a_hybrid_change_places_too() -> None:
    quantizer = te.HybridQuantizer(rowwise_quantizer=per_tensor(), columnwise_quantizer=per_tensor())
    tensor = quantizer(torch.randn(32, 32))
    assert torch.equal(tensor.T.dequantize(), tensor.dequantize().T)
    assert torch.equal(tensor.T.T.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("name", ALL)
def test_pickles_are_read(name: str) -> None:
    tensor = torch.nn.Parameter(ALL[name](torch.randn(128, 256)))
    again = pickle.loads(pickle.dumps(tensor))
    assert isinstance(again, torch.nn.Parameter) and torch.equal(again.dequantize(), tensor.dequantize())
    for made, expected in zip(again.tensors(), tensor.tensors(), strict=True):
        assert torch.equal(made, expected)
    assert torch.equal(again.make_rowwise().amax, tensor.make_rowwise().amax)


@pytest.mark.parametrize("name", ALL)
def test_a_part_is_copied_byte_for_byte(name: str) -> None:
    """Its scales lie without padding, and its amax is that of the whole."""
    whole = ALL[name](torch.linspace(-1, 9, 256 * 256).view(256, 256))
    for copy_to in (lambda new: new.copy_(whole[:128]), lambda new: new.copy_from_storage(whole[:128])):
        new = ALL[name](torch.randn(128, 256))
        copy_to(new)
        assert torch.equal(new.dequantize(), whole.dequantize()[:128])
        columnwise = whole.operands.columnwise.dequantize().T[:128]
        assert torch.equal(new.operands.columnwise.dequantize().T, columnwise)
        new.copy_(torch.zeros(128, 256))
        assert whole.dequantize().any(1)[1:].all()
    with pytest.raises(RuntimeError, match=r"shape mismatch in copy_from_storage: \[128, 256\] here, and \[256, 256\]"):
        new.copy_from_storage(whole)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_a_copy_of_one_side_drops_the_other_one(name: str, side: str) -> None:
    one = ALL[name].copy()
    one.set_usage(rowwise=side == "rowwise", columnwise=side == "columnwise")
    source, tensor = one(torch.randn(128, 256)), ALL[name](torch.randn(128, 256))
    tensor.copy_from_storage(source)
    assert tensor.get_usages() == source.get_usages()
    assert torch.equal(tensor.dequantize(), source.dequantize())
    one.set_usage(rowwise=side != "rowwise", columnwise=side != "columnwise")
    with pytest.raises(RuntimeError, match=r"needs a side that both store, got .* here, and"):
        tensor.copy_from_storage(one(torch.randn(128, 256)))
    assert torch.equal(tensor.dequantize(), source.dequantize())


def test_a_copy_of_one_side_of_a_hybrid_drops_the_other_one() -> None:
    tensor, source = hybrid()(torch.zeros(32, 64)), hybrid()(torch.randn(32, 64))
    source.update_usage(columnwise_usage=False)
    tensor.copy_from_storage(source)
    assert tensor.get_usages() == source.get_usages() and torch.equal(tensor.dequantize(), source.dequantize())
    tensor, other = hybrid()(torch.zeros(32, 64)), hybrid(per_tensor())(torch.randn(32, 64))
    with pytest.raises(TypeError, match="copy_from_storage expects NVFP4TensorStorage, got Float8Tensor"):
        tensor.copy_from_storage(other)
    assert not tensor.dequantize().any()


SQUARE, RHT = {"with_2d_quantization": True}, {"with_rht": True}


@pytest.mark.parametrize(
    ("mine", "others", "message"),
    [
        (SQUARE, {}, "with_2d_quantization mismatch: True here, and False in the source"),
        ({}, RHT, "with_rht mismatch: columnwise codes under None here, and under rht16-fixed in the source"),
        (RHT, {**RHT, "with_random_sign_mask": False}, "under rht16-fixed here, and under rht16-none in the source"),
    ],
)
def test_codes_that_would_be_read_as_others_are_not_copied(mine, others, message: str) -> None:
    """What a product reads as columnwise codes is the cast of the values, of one stored side too."""
    source, values = te.NVFP4Quantizer(**others)(torch.randn(32, 64)), torch.zeros(32, 64)
    tensor, expected = (te.NVFP4Quantizer(**mine)(given) for given in (values, source.dequantize()))
    with pytest.raises(RuntimeError, match=message):
        tensor.copy_from_storage(source)
    assert not tensor.dequantize().any()
    tensor.copy_(source)
    assert torch.equal(tensor.make_columnwise().dequantize(), expected.make_columnwise().dequantize())


@pytest.mark.parametrize("name", ALL)
def test_a_tensor_of_one_side_is_copied_into_one_of_two(name: str) -> None:
    tensor, values = ALL[name](torch.randn(64, 256)), torch.randn(64, 256)
    source = ALL[name].copy()
    source.set_usage(columnwise=False)
    tensor.copy_(source(values))
    expected = ALL[name](source(values).dequantize())
    assert torch.equal(tensor.dequantize(), expected.dequantize())
    assert torch.equal(tensor.operands.columnwise.dequantize(), expected.operands.columnwise.dequantize())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_inference_mode_views_and_moves_as_other_modes(name: str, inside: bool) -> None:
    """There PyTorch calls ``to`` and ``reshape`` themselves instead of what they consist of."""
    values = torch.randn(64, 256)
    with torch.inference_mode(inside):
        tensor = ALL[name](values)
    with torch.inference_mode():
        for made in (tensor.detach(), tensor.to("cpu"), tensor.reshape(4, 16, 256).reshape(64, 256), tensor.cpu()):
            assert type(made) is type(tensor) and torch.equal(made.dequantize(), tensor.dequantize())
            assert made.is_inference() is inside
        narrow = tensor.to(torch.bfloat16)
        assert type(narrow) is torch.Tensor and torch.equal(narrow, tensor.dequantize().bfloat16())


@pytest.mark.parametrize("recipe", [recipes.NVFP4BlockScaling(), recipes.DelayedScaling()], ids=["NVFP4", "delayed"])
def test_modules_are_made_saved_loaded_and_cast_in_inference_mode(recipe) -> None:
    x, modules = torch.randn(16, 32), []
    for inside in (False, True):
        with torch.inference_mode(inside), te.quantized_model_init(recipe=recipe):
            modules.append(te.Linear(32, 32))
    with torch.inference_mode(), te.autocast(recipe=recipe):
        modules[1].load_state_dict(modules[0].state_dict())
        torch.testing.assert_close(modules[0](x), modules[1](x))
        for module in modules:
            assert {parameter.dtype for parameter in module.to(torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("quantizer", [*ALL.values(), te.IdentityQuantizer()], ids=[*ALL, "high precision"])
def test_an_operation_in_place_does_not_change_the_shape(quantizer: te.Quantizer) -> None:
    tensor = quantizer(torch.randn(64, 256))
    values = tensor.dequantize().clone()
    for change in (lambda: tensor.unsqueeze_(0), lambda: tensor.resize_(4, 16, 256), tensor.t_):
        with pytest.raises(RuntimeError, match="stored as codes: it keeps its shape"):
            change()
    assert torch.equal(tensor.dequantize(), values)


def test_a_view_of_which_one_side_takes_no_writes_takes_none() -> None:
    quantizer = te.HybridQuantizer(rowwise_quantizer=per_tensor(), columnwise_quantizer=te.MXFP8Quantizer(E4M3))
    tensor = quantizer(torch.randn(64, 256))
    values = tensor.dequantize()
    with pytest.raises(RuntimeError, match="a write into a view"):
        tensor.view(-1).mul_(2)
    assert torch.equal(tensor.dequantize(), values)


def test_values_of_another_dtype_are_written_where_high_precision_lies() -> None:
    tensor, values = te.IdentityQuantizer()(torch.zeros(8, 4)), torch.randn(8, 4, dtype=torch.bfloat16)
    same = tensor.detach()
    tensor[2:4].copy_(values[2:4])
    assert torch.equal(tensor.dequantize()[2:4], values[2:4].float())
    tensor.copy_(values)
    for each in (tensor, same):
        assert each.dtype == torch.float32 and torch.equal(each.dequantize(), values.float())


@pytest.mark.parametrize("name", ALL)
def test_parts_share_bytes_and_take_no_writes(name: str) -> None:
    whole = ALL[name](torch.randn(256, 512))
    values = whole.dequantize()
    for part, expected in (
        (whole[128:], values[128:]),
        (whole.chunk(2, 1)[1], values[:, 256:]),
        (whole.split((128, 128))[0], values[:128]),
    ):
        assert type(part) is type(whole) and torch.equal(part.dequantize(), expected)
        assert part._rowwise_data.untyped_storage().data_ptr() == whole._rowwise_data.untyped_storage().data_ptr()
        columnwise = part.operands.columnwise
        assert torch.equal(
            columnwise.dequantize().T, whole.operands.columnwise.dequantize().T[expected_index(part, whole)]
        )
        with pytest.raises(RuntimeError, match="a write into a view"):
            part.copy_(torch.zeros_like(expected))
        copied = copy.deepcopy(part)
        assert isinstance(copy.deepcopy(torch.nn.Parameter(part)), torch.nn.Parameter)
        assert torch.equal(copied.dequantize(), expected) and not copied.zero_().dequantize().any()
    assert torch.equal(whole.dequantize(), values)
    if name != "FP8":
        with pytest.raises(RuntimeError, match="which makes a view"):
            whole[:, 1:]


def expected_index(part, whole) -> tuple[slice, slice]:
    """Where ``part`` lies in ``whole``, by the address of its first byte."""
    per_byte = whole.shape[1] // whole._rowwise_data.shape[1]
    row, col = divmod(part._rowwise_data.storage_offset() * per_byte, whole.shape[1])
    return slice(row, row + part.shape[0]), slice(col, col + part.shape[1])


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_stays_so_in_parts_and_copies(name: str) -> None:
    """A block of it in FP8 was stored as zeros under the scale 1, and its NaN was remembered beside them alone."""
    values = torch.ones(256, 256)
    values[3, 5] = float("inf")
    tensor = ALL[name](values)
    for made in (tensor[:128], tensor[:, :128], copy.deepcopy(tensor), tensor.detach(), tensor.view(2, 128, 256)):
        assert not made.dequantize().view(-1, made.shape[-1])[3, 5].isfinite()
    assert not tensor[:128].make_rowwise().dequantize()[3, 5].isfinite()


@pytest.mark.parametrize("name", ALL)
def test_what_is_stored_makes_the_same_tensor_again(name: str) -> None:
    tensor = ALL[name](torch.randn(144, 272, dtype=torch.bfloat16))
    metadata = tensor.get_metadata()
    again = type(tensor)(shape=tensor.shape, dtype=tensor.dtype, **metadata)
    assert torch.equal(again.dequantize(), tensor.dequantize()) and again.get_usages() == tensor.get_usages()
    storage = type(tensor).storage_class()(**metadata)
    assert not isinstance(storage, torch.Tensor) and torch.equal(storage.dequantize(), tensor.dequantize())
    plain, objects = te.prepare_for_saving(storage)
    assert storage.get_usages() == {"rowwise": False, "columnwise": False}
    (restored,) = te.restore_from_saved(objects, plain)
    assert restored is storage and torch.equal(storage.dequantize(), tensor.dequantize())
    quantizer = ALL[name].copy()
    quantizer.internal = True
    x = torch.randn(34, 132)
    assert type(quantizer(x)) is type(storage) and torch.equal(quantizer(x).dequantize(), ALL[name](x).dequantize())
    with pytest.raises(TypeError, match="has no argument 'nonsense'"):
        type(tensor)(tensor.shape, tensor.dtype, nonsense=1)
    empty, specs = quantizer.make_empty((144, 272)), quantizer.inner_tensor_specs((144, 272))
    assert {key: (tuple(value.shape), value.dtype) for key, value in empty._tensors().items()} == specs
    assert {key: (tuple(value.shape), value.dtype) for key, value in tensor._tensors().items()} == specs
    flat, context = tensor.__tensor_flatten__()
    inner = {attribute: getattr(tensor, attribute) for attribute in flat}
    rebuilt = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    assert torch.equal(rebuilt.dequantize(), tensor.dequantize())


RECIPES = {
    te.Float8Tensor: recipes.Float8CurrentScaling(),
    te.NVFP4Tensor: recipes.NVFP4BlockScaling(),
    te.MXFP8Tensor: recipes.MXFP8BlockScaling(),
    te.Float8BlockwiseQTensor: recipes.Float8BlockScaling(),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_stored_parameters_are_what_they_claim_to_be(kind) -> None:
    """And multiply as fp4engine's own do, byte for byte."""
    recipe = RECIPES[kind]
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = te.Linear(96, 160, bias=False, params_dtype=torch.float32)
    with fp4engine.quantized_model_init(recipe=recipe.frozen):
        assert type(te.Linear(96, 160).weight) is kind
    plain = fp4engine.Linear(96, 160, bias=False)
    weight = layer.weight
    plain.weight.data.copy_(weight.get_high_precision_init_val())
    assert type(weight) is kind and isinstance(weight, torch.nn.Parameter)
    assert weight._rowwise_data.shape[0] == 160 and weight._get_quantizer().frozen() is not None
    x = torch.randn(32, 96, requires_grad=True)
    with te.autocast(recipe=recipe):
        torch.manual_seed(1)
        layer(x).sum().backward()
    ours, x.grad = x.grad, None
    with te.autocast(recipe=recipe), torch.no_grad():
        expected = plain(x)
        assert torch.equal(layer(x), expected)
    assert weight.grad is not None and ours is not None
    scales = weight._scale_inv if kind is te.Float8Tensor else weight._rowwise_scale_inv
    if scales.dtype == torch.float32:
        with torch.no_grad():
            for factor, written in ((2, scales), (4, scales.data)):  # ``data`` leaves the version as it was
                written.mul_(2.0)
                with te.autocast(recipe=recipe):
                    assert torch.equal(layer(x), factor * expected)


def test_written_scales_that_a_recipe_cannot_have_are_refused() -> None:
    with te.quantized_model_init(recipe=recipes.Float8BlockScaling()):
        layer = te.Linear(128, 128)
    with torch.no_grad():
        layer.weight._rowwise_scale_inv.mul_(1.5)
    with pytest.raises(ValueError, match="others than powers of two"), te.autocast(recipe=recipes.Float8BlockScaling()):
        layer(torch.randn(16, 128))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_least_amax_of_blocks(dim: int, power_of_two: bool) -> None:
    x = torch.randn(256, 256)
    x[:128, :128] *= 1e-6
    arguments = {"rowwise": True, "columnwise": True, "block_scaling_dim": dim, "force_pow_2_scales": power_of_two}
    epsilon = 1e-3
    floored = te.Float8BlockQuantizer(E4M3, amax_epsilon=epsilon, **arguments)(x)
    plain = te.Float8BlockQuantizer(E4M3, **arguments)(x)
    largest = x.clone()
    largest[:128, 0] = epsilon  # in every block of lines, and in the square
    by_hand = te.Float8BlockQuantizer(E4M3, **arguments)(largest)
    assert torch.equal(floored._rowwise_scale_inv, by_hand._rowwise_scale_inv)
    assert torch.equal(floored._rowwise_data[:, 1:], by_hand._rowwise_data[:, 1:])
    assert torch.equal(floored.dequantize()[:, 128:], plain.dequantize()[:, 128:])
    assert not torch.equal(floored._columnwise_scale_inv, plain._columnwise_scale_inv)


def test_the_least_amax_of_a_tensor() -> None:
    x = torch.randn(16, 32) * 1e-6
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, amax_epsilon=1e-3)
    scale = torch.tensor(1e-3) / 448
    assert torch.equal(quantizer(x)._scale_inv, scale[None])
    assert quantizer(1e6 * x)._scale_inv == per_tensor()(1e6 * x)._scale_inv
    with pytest.raises(ValueError, match=r"amax_epsilon=\) must be a finite number, 0 or more, got -1"):
        te.Float8CurrentScalingQuantizer(E4M3, amax_epsilon=-1)


def test_equal_quantizers_are_constants_of_graphs() -> None:
    for quantizer in ALL.values():
        other = quantizer.copy()
        assert other == quantizer and hash(other) == hash(quantizer)
        other.set_usage(columnwise=False)
        assert other != quantizer
        expression, names = quantizer.__fx_repr__()
        assert eval(expression, dict(names)) == quantizer
    given = [te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3) for _ in range(2)]
    assert given[0] != given[1]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("powers", [True, False])
def test_a_block_of_zeros_has_the_scale_1(powers, dim) -> None:
    arguments = {"force_pow_2_scales": powers, "block_scaling_dim": dim}
    quantizer = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, **arguments)
    x = torch.randn(128, 256, dtype=torch.bfloat16)
    x[:, :128] = 0
    made = quantizer(x)
    rowwise, columnwise = made._rowwise_scale_inv, made._columnwise_scale_inv
    if dim == 2:  # [M / 128, K / 128], and padding
        assert (rowwise[0, :2] == 1).tolist() == [True, False] and columnwise[:2, 0].tolist() == rowwise[0, :2].tolist()
    else:  # [K / 128, M]
        assert (rowwise[0] == 1).all() and not (rowwise[1] == 1).any() and (columnwise[0, :128] == 1).all()
    assert not made.dequantize()[:, :128].any()


def test_compiled_code_reads_codes_between_graphs() -> None:
    """Dynamo keeps the cast of the codes where it leaves a graph, and gave a CastSpec what is no field."""
    weight, x = te.NVFP4Quantizer(with_2d_quantization=True)(torch.randn(32, 64)), torch.randn(4, 64)

    def product(x: torch.Tensor) -> torch.Tensor:
        return 2 * x @ weight.make_rowwise().dequantize().T

    assert torch.equal(torch.compile(product, backend="eager")(x), product(x))


def test_a_quantizer_is_an_argument_of_a_custom_operator() -> None:
    quantizer, x = te.MXFP8Quantizer(E4M3), torch.randn(32, 64)
    kind = get_opaque_type_name(te.MXFP8Quantizer)
    with torch.library._scoped_library("fp4engine_test", "DEF") as library:
        library.define(f"decoded(Tensor x, {kind} quantizer) -> Tensor")
        library.impl("decoded", lambda x, quantizer: quantizer(x).dequantize(), "CompositeExplicitAutograd")
        torch.library.register_fake("fp4engine_test::decoded", lambda x, quantizer: torch.empty_like(x), lib=library)
        compiled = torch.compile(
            lambda x: torch.ops.fp4engine_test.decoded(x, quantizer), backend="eager", fullgraph=True
        )
        assert torch.equal(compiled(x), quantizer(x).dequantize())


@pytest.mark.parametrize("kind", [te.NVFP4Quantizer(), te.MXFP8Quantizer(E4M3)], ids=["NVFP4", "MXFP8"])
def test_fsdp2_gathers_the_stored_codes_themselves_and_scales_without_padding(kind) -> None:
    kind = kind.copy()
    kind.set_usage(rowwise=True, columnwise=not isinstance(kind, te.NVFP4Quantizer))
    tensor = kind(torch.randn(48, 64))
    before = {name: getattr(tensor, name).clone() for name in tensor.fsdp_buffer_fields()}
    buffers, meta = tensor.fsdp_extract_buffers()
    assert meta["field_names"] == tuple(before)
    rows = {"_rowwise_scale_inv": 48, "_columnwise_scale_inv": 2}
    for name, buffer in zip(before, buffers, strict=True):
        if name in rows:
            assert buffer.shape[0] == rows[name]
        else:
            assert buffer is getattr(tensor, name)  # and no view of it
    tensor.fsdp_assign_gathered(buffers, meta)
    for name, value in before.items():
        assert getattr(tensor, name).shape == value.shape
    torch.testing.assert_close(tensor.dequantize(), kind(tensor.dequantize()).dequantize(), rtol=0, atol=0)
