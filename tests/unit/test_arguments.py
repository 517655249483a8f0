"""Arguments of a wrong kind: one clear error that names the argument, what is allowed, and what was given."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fp4engine
from fp4engine import inspect, qat
from fp4engine.arguments import require_patterns
from fp4engine.distributed import draw_by_layer, fp4_all_gather
from fp4engine.doctor import examine
from fp4engine.estimate import Architecture, estimate, from_config
from fp4engine.export import TensorFolder, calibrate, export_checkpoint, share_amax, verify_checkpoint
from fp4engine.formats import CastSpec
from fp4engine.inspect import bisect, sensitivity
from fp4engine.integrations import TrainingState
from fp4engine.modules.shared_amax import sibling_groups
from fp4engine.optimizer_hooks import OsciReset, OutControl
from fp4engine.recipe import (
    Casts,
    CustomRecipe,
    DelayedScaling,
    NVFP4BlockScaling,
    Rule,
    combine,
    differences,
    recipe_from_argument,
    zoo,
)

RECIPE = NVFP4BlockScaling()
ROLE = fp4engine.QuantizerRole("linear", "input")
SMALL = Architecture(2, 64, 2, 128, 64)


def make_model(recipe=RECIPE) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    fp4engine.convert(model, recipe)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def osci_reset(**options: object) -> object:
    model = make_model()
    return OsciReset(model, sgd(model), **options)


def out_control(**options: object) -> object:
    model = make_model()
    return OutControl(model, sgd(model), **{"multiple": 16} | options)


def hybrid(**options: object) -> object:
    own = fp4engine.IdentityQuantizer()
    return fp4engine.HybridQuantizer(**{"rowwise_quantizer": own, "columnwise_quantizer": own} | options)


RUN = {"step": 0, "kind": "run", "every": 1, "world_size": 1, "line": 1}


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)])


def record(model: object, out: object, **options: object) -> None:
    with inspect.record(model, out, **options):
        pass


OF_A_MODEL: dict[str, Callable[[object], object]] = {
    "convert": fp4engine.convert,
    "revert": fp4engine.revert,
    "executed_gemms": fp4engine.executed_gemms,
    "assert_quantized": fp4engine.assert_quantized,
    "quantize_weights": fp4engine.quantize_weights,
    "dequantize_weights": fp4engine.dequantize_weights,
    "export_checkpoint": lambda model: export_checkpoint(model, "never"),
    "verify_checkpoint": lambda model: verify_checkpoint(model, "never"),
    "calibrate": lambda model: calibrate(model, [torch.randn(2, 32)]),
    "share_amax": lambda model: share_amax(model, RECIPE),
    "prepare": qat.prepare,
    "finalize": qat.finalize,
    "record": lambda model: record(model, "never"),
    "bisect": lambda model: bisect(lambda recipe: [1.0], model, RECIPE),
    "sensitivity": lambda model: sensitivity(lambda recipe: [1.0], model, RECIPE),
    "OsciReset": lambda model: OsciReset(model, sgd(make_model())),
    "OutControl": lambda model: OutControl(model, sgd(make_model())),
    "draw_by_layer": lambda model: draw_by_layer(model, 0),
    "fp4_all_gather": fp4_all_gather,
    "weight_cache": lambda model: fp4engine.weight_cache(model).__enter__(),
    "get_amax_history": fp4engine.get_amax_history,
    "set_amax_history": lambda model: fp4engine.set_amax_history(model, {}),
    "TrainingState": TrainingState,
}


@pytest.mark.parametrize("model", [None, [1, 2], "llama", nn.Linear], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("name", OF_A_MODEL)
def test_what_is_no_module_is_named(name: str, model: object) -> None:
    with pytest.raises(ValueError, match=rf"^model must be a torch\.nn\.Module, got {re.escape(repr(model))}"):
        OF_A_MODEL[name](model)


OF_A_RECIPE: dict[str, Callable[[object], object]] = {
    "convert": lambda recipe: fp4engine.convert(nn.Sequential(nn.Linear(32, 32)), recipe),
    "autocast": lambda recipe: fp4engine.autocast(recipe=recipe),
    "Linear": lambda recipe: fp4engine.Linear(32, 32, recipe=recipe),
    "quantize_weights": lambda recipe: fp4engine.quantize_weights(make_model(), recipe),
    "export_checkpoint": lambda recipe: export_checkpoint(make_model(), "never", recipe=recipe),
    "calibrate": lambda recipe: calibrate(make_model(), [torch.randn(2, 32)], recipe),
    "share_amax": lambda recipe: share_amax(make_model(), recipe),
    "prepare": lambda recipe: qat.prepare(nn.Sequential(nn.Linear(32, 32)), recipe),
    "bisect": lambda recipe: bisect(lambda tried: [1.0], make_model(), recipe),
    "estimate": lambda recipe: estimate(SMALL, recipe=recipe),
    "OsciReset": lambda recipe: osci_reset(recipe=recipe),
    "OutControl": lambda recipe: out_control(recipe=recipe),
}


@pytest.mark.parametrize("recipe", ["nvfp4", NVFP4BlockScaling], ids=["its name", "its class"])
@pytest.mark.parametrize("name", OF_A_RECIPE)
def test_what_is_no_recipe_is_named(name: str, recipe: object) -> None:
    with pytest.raises(ValueError, match=r"^recipe must be an fp4engine\.recipe\.Recipe .*got "):
        OF_A_RECIPE[name](recipe)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fp4engine.convert(make_model(None), keep_high_precision=None), "keep_high_precision .* got None"),
        (lambda: fp4engine.convert(make_model(None), keep_high_precision=[3]), r"keep_high_precision .* got \[3\]"),
        (lambda: fp4engine.convert(make_model(None), keep_high_precision="lm_head"), "must be a sequence of patterns"),
        (
            lambda: fp4engine.convert(make_model(None), module_filter_fn=["x"]),
            r"module_filter_fn must be .* got \['x'\]",
        ),
        (lambda: fp4engine.convert(make_model(None), adapters=["x"]), r"adapters must be True or False, got \['x'\]"),
        (lambda: export_checkpoint(make_model(), "never", keep_high_precision=[3]), r"keep_high_precision .* \[3\]"),
        (lambda: export_checkpoint(make_model(), None), "directory must be a path, got None"),
        (lambda: export_checkpoint(make_model(), "never", weights=[1]), r"weights must map .* got \[1\]"),
        (lambda: calibrate(make_model(), None), "batches must be a sequence of batches, got None"),
        (lambda: calibrate(make_model(), torch.ones(2, 16)), "batches must be a sequence of batches, got tensor"),
        (lambda: TensorFolder(3), "directory must be a path, got 3"),
        (lambda: qat.prepare(nn.Sequential(nn.Linear(32, 32)), clip="half"), "clip must be .* got 'half'"),
        (lambda: record(make_model(), None), "out must be a path, got None"),
        (lambda: record(make_model(), __file__), "out must be a folder, and .* is a file"),
        (lambda: record(make_model(), "a\0b"), r"out must be a path, got 'a\\x00b'"),
        (
            lambda: record(make_model(), Path(__file__) / "x"),
            r"out must be a folder, and .*/x' cannot be made: .*Not a dir",
        ),
        (lambda: inspect.html("runs/look", "t"), r"rows must be what .*read\('runs/look'\) returns, got the path"),
        (lambda: inspect.html(Path("runs"), "t"), "rows must be what .* returns, got the path itself"),
        (lambda: inspect.html(None, "t"), "rows must be a list, as .* returns it, got None"),
        (lambda: inspect.html(iter([RUN]), "t"), "rows must be a list, as .* returns it, got <list_iterator"),
        (lambda: inspect.html([3], "t"), "rows must be what .* returns, got 3 among them: it needs a step and a kind"),
        (lambda: inspect.html([{**RUN, "every": "x"}], "t"), "got .* among them: 'every' of a row .* cannot be 'x'"),
        (lambda: inspect.html([{key: RUN[key] for key in RUN if key != "line"}], "t"), "among them: it needs 'line'"),
        (lambda: inspect.html([RUN], None), "title must be a string, got None"),
        (lambda: record(make_model(), "never", layers=3), "layers must be a sequence of patterns, .* got 3"),
        (lambda: bisect(3, make_model(), RECIPE), "make_run must be a function, got 3"),
        (lambda: bisect(lambda recipe: None, make_model(), RECIPE), "make_run must return the losses .* got None"),
        (lambda: sensitivity(3, make_model(), RECIPE), "make_run must be a function, got 3"),
        (lambda: fp4engine.executed_gemms(make_model(), 3), "step must be a function, got 3"),
        (lambda: OsciReset(make_model(), "opt"), r"optimizer must be a torch\.optim\.Optimizer, got 'opt'"),
        (lambda: OutControl(make_model(), None), r"optimizer must be a torch\.optim\.Optimizer, got None"),
        (lambda: osci_reset(window=7, period=8), "window must be at most period - 2, got window=7 and period=8"),
        (lambda: osci_reset(threshold="8"), "threshold must be a positive finite number, got '8'"),
        (lambda: verify_checkpoint(make_model(), None), "directory must be a path, got None"),
        (lambda: share_amax(make_model(), RECIPE, torch.tensor(1)), "shared_scales must be sequences of names"),
        (lambda: share_amax(make_model(), RECIPE, [(1, 2)]), r"sequences of names, got \(1, 2\) among them"),
        (lambda: TrainingState(make_model(), "world"), "process_group must be .* got 'world'"),
        (lambda: osci_reset(threshold=math.inf), "threshold must be a positive finite number, got inf"),
        (lambda: osci_reset(threshold=math.nan), "threshold must be a positive finite number, got nan"),
        (lambda: fp4engine.assert_quantized(make_model(), min_fraction="0.5"), "min_fraction must be .* got '0.5'"),
        (lambda: fp4engine.assert_quantized(make_model(), recipe="nvfp4"), "recipe must be .* got 'nvfp4'"),
        (lambda: fp4engine.convert(make_model(None), keep_high_precision=torch.tensor(1)), r"strings, got tensor\(1\)"),
        (lambda: fp4engine.manual_seed(torch.tensor(1, device="meta")), "seed must be an integer"),
        (lambda: fp4engine.cast([1.0], CastSpec(), compute="triton"), "x must be a tensor, got list"),
        (
            lambda: fp4engine.cast(torch.eye(32).to_sparse(), CastSpec()),
            "x must be a dense tensor, got .*_coo",
        ),
        (lambda: fp4engine.NVFP4Quantizer()(torch.eye(32).to_sparse_csr()), "x must be a dense tensor, got .*_csr"),
        (lambda: fp4engine.NVFP4Quantizer().amax(nested()), "x must be a dense tensor, got a nested one"),
        (lambda: fp4engine.LayerNormLinear(32, 32)(nested()), "the input must be a dense tensor, got a nested one"),
        (lambda: fp4engine.GroupedLinear(1, 32, 32)(nested(), [5]), "the input must be a dense tensor, got a nested"),
        (lambda: fp4engine.LayerNorm(32)([1.0]), "x must be a tensor, got list"),
        (lambda: fp4engine.LayerNorm("32"), "normalized_shape must be an integer or a sequence of integers, got '32'"),
        (lambda: fp4engine.RMSNorm([]), r"normalized_shape must be an integer or a sequence of integers, got \[\]"),
        (
            lambda: fp4engine.LayerNorm(32, zero_centered_gamma="no"),
            "zero_centered_gamma must be True or False",
        ),
        (lambda: fp4engine.LayerNorm(32, eps=True), "eps must be a finite number of at least 0, got True"),
        (lambda: fp4engine.LayerNormMLP(32, 32, bias="no"), "bias must be True or False, got 'no'"),
        (lambda: fp4engine.Linear(32, 32, torch.bfloat16), "bias must be True or False, got torch.bfloat16"),
        (lambda: fp4engine.LayerNormMLP(32, 32, init_method=0), "init_method must be a function, got 0"),
        (lambda: fp4engine.LayerNormMLP(32, 32, name=3), "name must be a string or None, got 3"),
        (
            lambda: fp4engine.MultiheadAttention(32, 2, fuse_qkv_params="no"),
            "fuse_qkv_params must be True or False",
        ),
        (
            lambda: fp4engine.MultiheadAttention(32, 2, input_layernorm=1),
            "input_layernorm must be True or False",
        ),
        (
            lambda: fp4engine.MultiheadAttention(32, 2)(torch.ones(2, 2, 32), bottom_right_diagonal="no"),
            "bottom_right_diagonal must be one of None, False, True, got 'no'",
        ),
        (
            lambda: fp4engine.MultiheadAttention(32, 2)(torch.ones(2, 2, 32), checkpoint_core_attention="no"),
            "checkpoint_core_attention must be True or False, got 'no'",
        ),
        (
            lambda: fp4engine.TransformerLayer(32, 64, 2, output_layernorm="no"),
            "output_layernorm must be .* got 'no'",
        ),
        (lambda: fp4engine.LayerNormLinear(32, 32, bias=1), "bias must be True or False, got 1"),
        (lambda: fp4engine.LayerNormLinear(32, 32, params_dtype=torch.int8), "params_dtype must be .* got torch.int8"),
        (lambda: fp4engine.LayerNormLinear(32, 32, recipe=nn.Linear(2, 2)), "recipe must be .* got Linear"),
        (lambda: fp4engine.GroupedLinear(2, 32, 32, params_dtype="bf16"), "params_dtype must be .* got 'bf16'"),
        (lambda: fp4engine.Linear(32, 32, params_dtype="bf16"), "params_dtype must be .* got 'bf16'"),
        (lambda: fp4engine.Linear.from_linear(nn.Conv2d(1, 1, 1)), r"module must be a torch.nn.Linear, got Conv2d"),
        (lambda: make_model()(torch.ones(4, 32, dtype=torch.int64)), "the input must be float16, .* got torch.int64"),
        (lambda: fp4engine.Linear(32, 32, init_method="normal"), "init_method must be a function, got 'normal'"),
        (lambda: qat.distillation_loss(torch.ones(2), torch.ones(2) + 1j), "teacher must be .* got torch.complex64"),
        (
            lambda: qat.linear_ste(torch.ones(4, 32), torch.ones(8, 32, device="meta")),
            "input on 'cpu' and .*'meta'",
        ),
        (lambda: out_control(share="a"), r"share must be in \(0, 1\), got 'a'"),
        (lambda: out_control(group="world"), "group must be a torch.distributed process group or None, got 'world'"),
        (lambda: draw_by_layer(nn.Linear(32, 32), 0), "this Linear has no layer .* call fp4engine.convert first"),
        (lambda: draw_by_layer(make_model(), 0, prefix=3), "prefix must be a string, got 3"),
        (lambda: estimate("Llama-3-8B"), r"such as MODELS\['Llama-3-8B'\], or .* got 'Llama-3-8B'"),
        (lambda: estimate(None), "model must be an Architecture, or .* got None"),
        (lambda: from_config(None), "config must be a path, got None"),
        (lambda: make_model()(np.ones((4, 32), np.float32)), "the input must be a tensor, got ndarray"),
        (lambda: fp4engine.NVFP4Quantizer()("x"), "x must be a tensor, got str"),
        (lambda: fp4engine.NVFP4Quantizer().amax("x"), "x must be a tensor, got str"),
        (lambda: fp4engine.checkpoint(None, torch.ones(4)), "function must be a function, got None"),
        (lambda: fp4engine.make_quantizer(None, ROLE), r"recipe must be an fp4engine\.recipe\.Recipe, got None"),
        (lambda: fp4engine.make_quantizer(RECIPE, "input"), "role must be a QuantizerRole, got 'input'"),
        (lambda: CastSpec(rounding="even"), "rounding must be one of RoundingMode.EVEN, .* got 'even'"),
        (lambda: DelayedScaling(fp8_format="E4M3"), "fp8_format must be one of Format.HYBRID, Format.E4M3, .* 'E4M3'"),
        (lambda: zoo.Row(RECIPE, "here"), r"build must be a function, got NVFP4BlockScaling\(\)"),
        (lambda: combine(RECIPE, "nvfp4"), r"backward must be an fp4engine\.recipe\.Recipe, got 'nvfp4'"),
        (lambda: differences(5, RECIPE), r"first must be an fp4engine\.recipe\.Recipe, got 5"),
        (lambda: differences(RECIPE, "nvfp4"), r"second must be an fp4engine\.recipe\.Recipe, got 'nvfp4'"),
        (lambda: differences(5, 5), r"first must be an fp4engine\.recipe\.Recipe, got 5"),
        (lambda: recipe_from_argument(None), "argument must be a string that names a recipe, got None"),
        (lambda: zoo.nemo_rl_experts("48"), "blocks must be an integer of at least 4, got '48'"),
        (lambda: Casts("e2m1"), r"rowwise must be an fp4engine\.formats\.CastSpec or None, got 'e2m1'"),
        (lambda: Casts(CastSpec(), clipped_gradient="no"), "clipped_gradient must be True or False, got 'no'"),
        (lambda: hybrid(rowwise_quantizer=None), "rowwise_quantizer must be a Quantizer, got None"),
        (lambda: hybrid(columnwise_quantizer=CastSpec()), "columnwise_quantizer must be a Quantizer, got CastSpec"),
    ],
)
def test_an_argument_of_another_kind_is_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


class Three:
    """An integer by its ``__index__`` alone."""

    def __index__(self) -> int:
        return 3


def architecture(**sizes: object) -> Architecture:
    return Architecture(**{"layers": 2, "width": 64, "heads": 2, "ffn": 128, "vocabulary": 64} | sizes)


def tiny_estimate(**options: object) -> object:
    recipe = None if "tp" in options or "fsdp" in options else RECIPE
    return estimate(
        architecture(heads=3, width=96, ffn=96, vocabulary=96), **{"sequence": 8, "recipe": recipe} | options
    )


INTEGERS: dict[str, Callable[[object], object]] = {
    "batch": lambda batch: tiny_estimate(batch=batch).tokens,
    "sequence": lambda sequence: tiny_estimate(sequence=sequence).tokens,
    "fsdp": lambda fsdp: tiny_estimate(fsdp=fsdp).label,
    "tp": lambda tp: tiny_estimate(tp=tp).label,
    "lora_rank": lambda lora_rank: tiny_estimate(lora_rank=lora_rank).label,
    "layers": lambda layers: architecture(layers=layers),
    "positions": lambda positions: architecture(positions=positions),
    "every": lambda every: record(make_model(), "never", every=every),
    "replica": lambda replica: draw_by_layer(make_model(), replica),
    "first_expert": lambda first_expert: draw_by_layer(make_model(), 0, first_expert=first_expert),
    "num_gemms": lambda num_gemms: fp4engine.GroupedLinear(num_gemms, 16, 16, device="cpu"),
    "out_features": lambda out_features: fp4engine.GroupedLinear(1, 16, out_features, device="cpu"),
    "start": lambda start: osci_reset(start=start),
    "window": lambda window: osci_reset(window=window),
    "period": lambda period: osci_reset(window=1, period=period),
    "steps": lambda steps: out_control(steps=steps),
    "max_shard_size": lambda size: export_checkpoint(
        make_model(), "never", inputs="high_precision", max_shard_size=size
    ),
    "quantization_alignment": lambda alignment: CustomRecipe(qfactory=print, quantization_alignment=alignment),
    "amax_history_len": lambda length: DelayedScaling(amax_history_len=length),
    "margin": lambda margin: DelayedScaling(margin=margin),
    "narrower_than": lambda width: Rule(RECIPE, narrower_than=width),
    "step": RECIPE.at,
    "seed": fp4engine.manual_seed,
    "state['seed']": lambda seed: fp4engine.set_rng_state({"seed": seed, "draws": {}}),
    "state['draws']['cpu']": lambda draw: fp4engine.set_rng_state({"seed": 3, "draws": {"cpu": draw}}),
    "jobs": lambda jobs: len(examine([], jobs=jobs).checks),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer_is_named(name: str) -> None:
    for value in (True, 2.0, "3", None, float("nan")):
        if value is not None or name != "narrower_than":
            with pytest.raises(ValueError, match=rf"^{re.escape(name)} must be an integer.*, got {value!r}$"):
                INTEGERS[name](value)


@pytest.mark.filterwarnings("ignore:inspect.record ended")
@pytest.mark.parametrize("name", INTEGERS)
def test_any_integer_is_one(name: str, tmp_path: Path, monkeypatch) -> None:
    """What is made of it is what the plain one makes, to the letter."""
    made: list[str] = []
    for number, value in enumerate((3, np.int64(3), np.uint8(3), Three())):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        torch.manual_seed(0)
        result = INTEGERS[name](value)
        made.append("" if type(result).__repr__ is object.__repr__ else repr(result))
    assert len({*made}) == 1


def test_a_converted_layer_outside_regions_complains_as_a_plain_one_does() -> None:
    said = r"linear\(\): argument 'input'.* must be Tensor, not numpy.ndarray"
    for layer in (nn.Linear(32, 16), fp4engine.Linear(32, 16)):
        with pytest.raises(TypeError, match=said):
            layer(np.ones((4, 32), np.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_no_code_stands_for_is_not_stored(value: float) -> None:
    model = make_model()
    with torch.no_grad():
        model[2].weight[3, 5] = value
    with pytest.raises(ValueError, match=r"'2\.weight' holds a NaN or an Inf"):
        fp4engine.quantize_weights(model)
    assert not any(isinstance(layer.weight, fp4engine.QuantizedWeight) for layer in (model[0], model[2]))


def test_a_long_value_is_shown_in_one_line() -> None:
    with pytest.raises(ValueError) as caught:
        require_patterns("names", [torch.zeros(30, 30)])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_real_numbers_are_whatever_is_one() -> None:
    """NumPy's, and no bools."""
    four = np.float32(4)
    assert osci_reset(threshold=four).threshold == 4
    assert out_control(share=np.float32(0.25)).share == 0.25
    assert fp4engine.qat.distillation_loss(torch.ones(2, 3), torch.ones(2, 3), four) == 0
    with pytest.raises(ValueError, match="tolerance must be a finite number of at least 0, or None, got True"):
        bisect(lambda recipe: [1.0], make_model(), RECIPE, tolerance=True)


def test_patterns_may_come_from_a_generator() -> None:
    """They are read twice."""
    model = make_model()
    with fp4engine.autocast(recipe=RECIPE):
        model(torch.randn(16, 32)).sum().backward()
        with fp4engine.autocast(enabled=False):
            model[2](torch.randn(16, 64)).sum().backward()
    fp4engine.assert_quantized(model, keep_high_precision=(name for name in ("2",)))


def test_norms_take_the_integers_of_numpy() -> None:
    assert fp4engine.LayerNorm(np.int64(8)).normalized_shape == (8,)
    assert fp4engine.RMSNorm((np.int64(2), 8)).normalized_shape == (2, 8)


def test_a_grouped_layer_of_no_features_is_one_of_biases() -> None:
    layer = fp4engine.GroupedLinear(2, 0, 16)
    with torch.no_grad():
        layer.bias1.fill_(1)
    for enabled in (True, False):
        with fp4engine.autocast(enabled):
            assert torch.equal(layer(torch.ones(3, 0), [1, 2]), torch.tensor([[0.0], [1.0], [1.0]]).expand(3, 16))


def test_names_of_siblings_may_come_from_generators() -> None:
    """They are read for each parent."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    names = ["0.q_proj", "0.k_proj", "1.q_proj", "1.k_proj"]
    assert set(sibling_groups(names, (iter(pair) for pair in [("q_proj", "k_proj")]))) == set(names)
    model = nn.Sequential(Block(), Block())
    qat.prepare(model, shared_scales=(iter(pair) for pair in [("q_proj", "k_proj")]))
    with torch.no_grad():
        for block in model:
            block.k_proj.weight *= 100
        shared = model[1].q_proj(torch.eye(32))
        for block in model:
            block.k_proj.weight /= 100
    assert not torch.equal(model[1].q_proj(torch.eye(32)), shared)
