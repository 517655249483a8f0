"""Hybrid and identity tensors, and what is stored of either in a module and in a file."""

import io

import pytest
import torch

from fp4engine.te.common.recipe import CustomRecipe, Float8CurrentScaling
from fp4engine.te.pytorch import (
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizedTensor,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    Linear,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    autocast,
    quantized_model_init,
)


def hybrid(columnwise=None, **arguments) -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(DType.kFloat8E4M3),
        columnwise_quantizer=columnwise or NVFP4Quantizer(),
        **arguments,
    )


def per_tensor() -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3)


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
    tensor = IdentityQuantizer()(torch.zeros(16, 16))
    tensor.copy_(source)
    tensor.add_(1)
    assert torch.equal(source, torch.ones(16, 16)) and torch.equal(tensor.dequantize(), source + 1)
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}


def test_high_precision_passes_for_the_dtype_that_it_is_kept_in() -> None:
    tensor = IdentityQuantizer().make_empty((16, 16), dtype=torch.bfloat16)
    assert tensor.dtype is torch.bfloat16
    source = torch.randn(16, 16)
    IdentityQuantizer(dtype=torch.float32).update_quantized(source, tensor)
    assert tensor.dtype is torch.float32 and torch.equal(tensor.dequantize(), source)


def test_fast_math_of_4over6_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    NVFP4Quantizer()
    with pytest.raises(ValueError, match="FAST_MATH='1' is not implemented"):
        NVFP4Quantizer(nvfp4_use_4over6=True)


@pytest.mark.parametrize("quantizer", [IdentityQuantizer(), hybrid(), hybrid(IdentityQuantizer()), NVFP4Quantizer()])
def test_files_load_with_weights_only(quantizer) -> None:
    tensor, file = quantizer(torch.randn(32, 64)), io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(tensor) and type(loaded._quantizer) is type(quantizer)
    assert torch.equal(loaded.dequantize(), tensor.dequantize())


def both_ways(role) -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
        columnwise_quantizer=Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
    )


def test_weights_of_a_factory_are_of_its_classes() -> None:
    recipe = CustomRecipe(qfactory=both_ways)
    with quantized_model_init(recipe=recipe):
        layer = Linear(32, 32)
    values = layer.weight.dequantize()
    assert isinstance(layer.weight, HybridQuantizedTensor)
    assert torch.equal(layer.weight.rowwise_sub_storage.dequantize(), values)
    assert torch.equal(layer.weight.columnwise_sub_storage.dequantize(), values)
    assert layer.weight.dequantize(dtype=torch.bfloat16).dtype is torch.bfloat16
    with autocast(recipe=recipe):
        layer(torch.randn(32, 32)).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(RuntimeError, match="Recipe mismatch"), autocast(recipe=Float8CurrentScaling()):
        layer(torch.randn(32, 32))
    with quantized_model_init(recipe=CustomRecipe(qfactory=lambda role: IdentityQuantizer())):
        plain = Linear(32, 32)
    assert isinstance(plain.weight, IdentityTensor) and isinstance(plain.weight, torch.nn.Parameter)
    x = torch.randn(32, 32)
    expected = torch.nn.functional.linear(x, plain.weight.dequantize(), plain.bias)
    assert torch.equal(plain(x), expected)


def test_views_of_one_scale_are_quantized_and_views_of_blocks_are_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 40)
    current = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")
    both = HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=current.copy())
    for quantizer in (current, both, IdentityQuantizer()):
        whole = quantizer(x)
        values = whole.dequantize()
        views = (whole[3:9], whole.narrow(0, 16, 32), whole[:, 1::2], whole.view(32, 80), *whole.split(20))
        plain = (values[3:9], values.narrow(0, 16, 32), values[:, 1::2], values.view(32, 80), *values.split(20))
        for view, expected in zip(views, plain, strict=True):
            assert type(view) is type(whole)
            assert torch.equal(view.dequantize(), expected)
        columnwise = views[0].operands.columnwise
        assert columnwise is None or torch.equal(columnwise.dequantize().T, values[3:9])
        assert type(whole.new_zeros(4, 8)) is type(whole) and not whole.new_zeros(4, 8).any()
    with pytest.raises(RuntimeError, match=r"call \.dequantize\(\) for the values"):
        MXFP8Quantizer(DType.kFloat8E4M3)(x)[3:9]


WRITES = {
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
@pytest.mark.parametrize(
    "kind", [NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E4M3), "FP8"], ids=["NVFP4", "MXFP8", "FP8"]
)
def test_what_is_written_is_there_or_refused(kind, way: str) -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu") if kind == "FP8" else kind
    tensor, values = quantizer(torch.randn(32, 32)), torch.full((32, 32), 2.0)
    before = tensor.dequantize().clone()
    try:
        WRITES[way](tensor, values)
    except RuntimeError as refused:
        assert "lost" in str(refused) and torch.equal(tensor.dequantize(), before)
    else:
        assert torch.equal(tensor.dequantize(), values)


@pytest.mark.parametrize("kind", [NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E4M3)], ids=["NVFP4", "MXFP8"])
def test_data_of_the_same_kind_is_taken_as_it_is(kind) -> None:
    tensor, other = kind(torch.randn(32, 32)), kind(torch.randn(32, 32))
    tensor.data = other
    assert torch.equal(tensor.dequantize(), other.dequantize()) and torch.equal(tensor.data, other)
    with pytest.raises(ValueError, match=r"the data of a tensor \[32, 32\] cannot be one \[8, 8\]"):
        tensor.data = torch.ones(8, 8)
    for value in (3, None, [1.0]):
        with pytest.raises(TypeError, match=r"the data of a \w+Tensor must be a tensor, got (3|None|\[1\.0\])$"):
            tensor.data = value
    assert torch.equal(tensor.dequantize(), other.dequantize())


@pytest.mark.parametrize("kind", [NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E4M3)], ids=["NVFP4", "MXFP8"])
def test_a_module_takes_its_codes_to_another_dtype(kind) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(kind(torch.full((32, 32), 2.0)))
    weight = module.to(torch.bfloat16).weight
    assert weight.dtype == torch.bfloat16 and weight.requires_grad and type(weight) is kind.tensor_class
    weight.dequantize().sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and torch.equal(weight.dequantize(), torch.full_like(weight.grad, 2.0))


def test_an_optimizer_of_lists_trains_codes() -> None:
    weight = torch.nn.Parameter(NVFP4Quantizer()(torch.randn(32, 32)))
    before, weight.grad = weight.dequantize().clone(), torch.ones(32, 32)
    torch.optim.SGD([weight], 1.0, foreach=True).step()
    assert (weight.dequantize() - before).mean() < -0.9


def test_a_parameter_is_saved_as_one() -> None:
    for requires_grad in (True, False):
        buffer = io.BytesIO()
        torch.save(torch.nn.Parameter(NVFP4Quantizer()(torch.randn(32, 32)), requires_grad), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad is requires_grad


def test_high_precision_is_written_where_it_lies() -> None:
    base = torch.zeros(6, 4)
    IdentityQuantizer()(base)[2:4].copy_(torch.ones(2, 4))
    assert base.sum(1).tolist() == [0, 0, 4, 4, 0, 0]


def test_identity_sides_of_a_hybrid_have_dtypes_of_their_own() -> None:
    sides = [IdentityQuantizer(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    tensor = HybridQuantizer(rowwise_quantizer=sides[0], columnwise_quantizer=sides[1])(torch.ones(4, 8))
    assert tensor.rowwise_sub_storage._hp_data.dtype == torch.bfloat16
    assert tensor.columnwise_sub_storage._hp_data.dtype == torch.float32


def test_strides_of_a_part_are_those_of_the_whole() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    for quantizer in (per_tensor(), HybridQuantizer(rowwise_quantizer=per_tensor(), columnwise_quantizer=per_tensor())):
        whole = quantizer(x)
        part = whole[:63]
        moved = part.as_strided(part.shape, part.stride(), 32)
        assert type(moved) is type(whole) and torch.equal(moved.dequantize(), whole.dequantize()[1:])
        with pytest.raises(RuntimeError, match="as_strided"):
            whole.as_strided((4,), (33,))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_given_scale_does_not_hide_what_is_not_finite(value: float) -> None:
    x = torch.randn(4, 32)
    x[1, 3] = value
    given = Float8Quantizer(torch.full((1,), 20.0), torch.zeros(1), DType.kFloat8E4M3)
    existing = Float8CurrentScalingQuantizer(
        DType.kFloat8E4M3, use_existing_amax=True, amax=torch.full((1,), 4.0), force_pow_2_scales=True
    )
    for quantizer in (given, existing):
        for side in (quantizer(x).operands.rowwise, quantizer(x).operands.columnwise):
            assert not side.dequantize().isfinite().any()
    assert not given.amax.isfinite()


def test_a_given_scale_and_its_amax_may_be_numbers_without_a_dimension() -> None:
    x, scale, amax = torch.randn(4, 32), torch.tensor(20.0), torch.tensor(0.5)
    quantizer = Float8Quantizer(scale, amax, DType.kFloat8E4M3)
    with_dimension = Float8Quantizer(scale.view(1), torch.zeros(1), DType.kFloat8E4M3)
    assert torch.equal(quantizer(x).dequantize(), with_dimension(x).dequantize()) and amax == x.abs().max()
    quantizer.calibrate(2 * x)
    assert amax == 2 * x.abs().max()


def test_an_existing_amax_is_scaled_by_a_power_of_two_where_one_is_asked_for() -> None:
    quantizer = Float8CurrentScalingQuantizer(
        DType.kFloat8E4M3, use_existing_amax=True, amax=torch.full((1,), 4.0), force_pow_2_scales=True
    )
    assert quantizer(torch.randn(4, 32))._scale_inv == 1 / 64


@pytest.mark.parametrize("kept", ["rowwise", "columnwise"])
def test_a_side_that_is_made_of_the_other_has_its_scale(kept) -> None:
    """The scale and the amax of delayed scaling go on meanwhile."""
    scale, amax = torch.full((1,), 20.0), torch.zeros(1)
    sides = {"rowwise": False, "columnwise": False, kept: True}
    tensor = Float8Quantizer(scale, amax, DType.kFloat8E4M3, **sides)(torch.randn(32, 48))
    scale.fill_(3.0)
    amax.zero_()
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    row, col = tensor.operands.rowwise, tensor.operands.columnwise
    assert torch.equal(row.dequantize(), col.dequantize().T) and torch.equal(row.amax, col.amax)
    assert amax == 0


def test_quantizers_say_what_they_were_given() -> None:
    x, e4m3 = torch.ones(16, 32), DType.kFloat8E4M3
    nvfp4 = NVFP4Quantizer()
    for make, message in (
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300), "nvfp4_e4m3_max must be one of"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="x"), "nvfp4_4over6_err_mode must be"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), "row_scaled_nvfp4=True goes with"),
        (lambda: NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group="x")(x), "amax_reduction_group must"),
        (lambda: nvfp4("x"), "NVFP4Quantizer quantizes a tensor, got 'x'"),
        (lambda: nvfp4.quantize(x, out=nvfp4(x[:8])), r"a tensor \[16, 32\] cannot be quantized into one \[8, 32\]"),
        (lambda: nvfp4.quantize(x, out=x), "NVFP4Quantizer writes into a QuantizedTensor, got Tensor"),
        (lambda: Float8Quantizer(1.0, torch.zeros(1), e4m3), r"Float8Quantizer\(scale=\) must be a tensor of one"),
        (lambda: Float8CurrentScalingQuantizer(torch.float8_e5m2), r"write TE_DType\[torch.float8_e5m2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="mse").nvfp4_4over6_err_mode == "MSE"
    assert NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    with pytest.raises(NotImplementedError, match="define frozen"):
        Quantizer()(x)


def test_the_dtype_that_a_quantizer_is_told_rounds_nothing() -> None:
    x, quantizer = torch.randn(16, 32), NVFP4Quantizer()
    told, plain = quantizer.quantize(x, dtype=torch.bfloat16), quantizer.quantize(x)
    assert told.dtype == plain.dtype == torch.float32 and torch.equal(told.dequantize(), plain.dequantize())
