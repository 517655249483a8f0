"""Scale rules of one's own: the reference calls them, keys name them, and whatever cannot know them refuses by name."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import fp4engine
from fp4engine import export, reference
from fp4engine.formats import E8M0, FP32, UE5M3, CastSpec, Outer, Rotation, RoundingMode, ScaleRule, own_scale_rule
from fp4engine.formats import register_scale_rule as register
from fp4engine.kernels import casts
from fp4engine.recipe import Casts, LinearRecipe, recipe_from_json, zoo
from tests.tiny import llama


def largest(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(-1)


def nine_tenths(blocks: Tensor) -> Tensor:
    return 0.9 * blocks.abs().amax(-1)


def changing(blocks: Tensor) -> Tensor:
    blocks.zero_()
    return blocks.new_ones(blocks.shape[:-1])


RULE = register("0.9amax", nine_tenths)
RECIPE = LinearRecipe(
    input=Casts(CastSpec(scale_rule=RULE), CastSpec()),
    weight=Casts(CastSpec(scale_rule=RULE, block=(16, 16)), CastSpec(scale_rule=RULE, block=(16, 16))),
    grad_output=Casts(CastSpec(rounding=RoundingMode.STOCHASTIC), CastSpec(rounding=RoundingMode.STOCHASTIC)),
)


@pytest.mark.parametrize(
    "spec",
    [
        CastSpec(),
        CastSpec(block=(16, 16), rotation=Rotation()),
        CastSpec(block=(3, 32), outer=Outer.BLOCK128, rounding=RoundingMode.STOCHASTIC),
        CastSpec(scale=UE5M3, scale_bound=UE5M3.max_value, outer=Outer.NONE),
        CastSpec(scale=FP32, scale_bound=1.0, outer=Outer.NONE),
    ],
    ids=lambda spec: spec.label,
)
@pytest.mark.parametrize("shape", [(17, 48), (0, 16), (1, 15), (3, 0)])
def test_the_rule_that_says_amax_makes_the_bytes_of_amax(spec: CastSpec, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if x.numel() > 100:
        x[0, :16], x[1, 0], x[2, 1] = 0, torch.nan, torch.inf
    rng = torch.tensor([1, 2])
    own = spec.replace(scale_rule=register("largest", largest))
    for got, expected in zip(reference.quantize(x, own, rng=rng), reference.quantize(x, spec, rng=rng), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_smaller_magnitude_saturates_the_largest_element() -> None:
    x = torch.full((1, 16), 0.5)
    x[0, 0] = 6.0
    plain, own = (
        reference.dequantize(*reference.quantize(x, spec), spec, 16, torch.float32)[0, 0]
        for spec in (CastSpec(), CastSpec(scale_rule=RULE))
    )
    assert float(plain) == pytest.approx(6)
    assert float(own) == pytest.approx(6 * 416 / 448)  # 0.9 * 448, as E4M3 rounds it
    kept = x.clone()
    reference.quantize(x, CastSpec(scale_rule=register("changing", changing)))
    assert torch.equal(x, kept)


def test_keys_name_the_function_and_read_back() -> None:
    spec = CastSpec(scale_rule=RULE)
    assert RULE.identity.startswith(f"{__name__}:nine_tenths#") and len(RULE.identity.rpartition("#")[2]) == 12
    assert CastSpec.from_key(spec.key) == spec != CastSpec()
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)
    assert recipe_from_json(RECIPE.to_json()) == RECIPE
    assert register("0.9amax", nine_tenths) is RULE
    assert register("another", nine_tenths) != RULE
    assert "0.9amax (own rule, no kernel)" in spec.label


def test_another_process_imports_what_registers_the_rule_of_a_pickle(tmp_path) -> None:
    """fp4engine compare sends recipes so, and said that memory was wanting."""
    rules = "from fp4engine.formats import *\ndef half(blocks):\n    return 0.5 * blocks.abs().amax(-1)\n"
    (tmp_path / "their_rules.py").write_text(f"{rules}SPEC = CastSpec(scale_rule=register_scale_rule('half', half))\n")
    write = "import pickle, their_rules; pickle.dump(their_rules.SPEC, open('spec', 'wb'))"
    for code in (write, "import pickle; print(pickle.load(open('spec', 'rb')).label)"):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "e2m1 1x16 half (own rule, no kernel)\n"


def test_a_key_whose_rule_is_not_here_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CastSpec(scale_rule=RULE)
    changed = spec.key.replace(RULE.identity[-12:], "0123456789ab")
    with pytest.raises(ValueError, match=r"'0.9amax' has the source 0123456789ab, and that of .* is another one here"):
        CastSpec.from_key(changed)
    monkeypatch.setattr(own_scale_rule, "_registered", {})
    missing = spec.replace(target=5.0).key  # which no earlier test has read
    with pytest.raises(ValueError, match=f"nothing has registered it here: import {__name__} first"):
        CastSpec.from_key(missing)


def test_the_error_of_an_unknown_rule_points_to_rules_of_ones_own() -> None:
    with pytest.raises(ValueError, match=r"scale_rule must be one of .*register_scale_rule\(name, function\)"):
        CastSpec(scale_rule="0.9amax")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": E8M0, "scale_bound": 1.0, "outer": Outer.NONE}, "scale_rule=0.9amax .* does not go with scale=e8m0"),
        ({"scale": FP32, "scale_bound": 1.0, "block": (0, 0)}, r"scale_rule=0.9amax .* and block=\(0, 0\) has none"),
    ],
)
def test_casts_that_have_no_use_for_a_rule_of_blocks_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CastSpec(scale_rule=RULE, **changes)


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("0.9 amax", nine_tenths, "name must be letters"),
        ("rule", 0.9, "function must be a function"),
        ("rule", lambda blocks: blocks.amax(-1), "function must be defined by `def` at the top level"),
        ("rule", torch.amax, "function must be defined by `def` at the top level"),
    ],
)
def test_what_is_no_rule_is_refused(name: str, function, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        register(name, function)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda blocks: None, "must return an FP32 tensor .* got None"),
        (
            lambda blocks: blocks,
            r"must return an FP32 tensor \[2, 1\] for \[2, 1, 16\], got torch.float32 \[2, 1, 16\]",
        ),
        (lambda blocks: blocks.double().amax(-1), "got torch.float64"),
        (lambda blocks: -blocks.abs().amax(-1), "must return positive finite numbers .* got -1.0"),
        (lambda blocks: blocks.sum(-1) * torch.nan, "got nan for a block whose largest magnitude is 1.0"),
    ],
)
def test_what_a_rule_may_not_say_is_refused(returned, said: str) -> None:
    rule = own_scale_rule.OwnScaleRule("odd", "here:odd#0", returned)
    with pytest.raises(ValueError, match=f"the scale rule 'odd' {said}" if said.startswith("must") else said):
        reference.quantize(torch.ones(2, 16), CastSpec(scale_rule=rule))


def test_no_kernel_covers_it_and_that_is_said() -> None:
    assert casts.supports(CastSpec(scale_rule=RULE), torch.bfloat16) == (
        False,
        "the Triton kernels do not cover scale_rule=0.9amax (own rule, no kernel)",
    )
    assert set(casts.COVERED["scale_rule"]) == set(ScaleRule)


def test_gradients_that_may_be_biased_are_accepted_only_if_told() -> None:
    gradient = CastSpec(scale_rule=RULE, rounding=RoundingMode.STOCHASTIC)
    with pytest.raises(ValueError, match="biased if the rule lets an element saturate"):
        RECIPE.replace(grad_output=Casts(gradient, gradient))
    assert RECIPE.replace(grad_output=Casts(gradient, gradient), allow_biased=True)


def test_a_row_of_the_book_trains_and_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(zoo.ZOO, "mine", zoo.Row(lambda: RECIPE, "this test"))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)), torch.randn(16, 48)
    fp4engine.convert(model)
    losses, optimizer = {}, torch.optim.SGD(model.parameters(), 0.0)
    with fp4engine.inspect.record(model, tmp_path, every=1):
        for name in ("mine", "nvfp4"):
            fp4engine.manual_seed(0)
            with fp4engine.autocast(recipe=zoo.make(name)):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[name] = loss.item()
    assert losses["mine"] != losses["nvfp4"] and all(p.grad.isfinite().all() for p in model.parameters())
    rows = [row for row in fp4engine.inspect.read(tmp_path) if row["kind"] == "operand"]
    assert {row["step"] for row in rows if "0.9amax" in str(row)} == {0}, rows[:2]


def test_its_stored_weights_are_saved_and_read_back(tmp_path) -> None:
    layer, x = fp4engine.Linear(32, 16, recipe=RECIPE), torch.randn(4, 32)
    fp4engine.quantize_weights(layer)
    torch.save(layer, tmp_path / "layer.pt")
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(read(x), layer(x))
    read.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(read(x), layer(x))


def test_its_weights_are_exported_as_they_were_multiplied(tmp_path) -> None:
    recipe = LinearRecipe(weight=Casts(CastSpec(scale_rule=RULE), None, "rowwise_dequantized"))
    model = llama().eval()
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    report = export.export_checkpoint(model, tmp_path / "out", "modelopt", shared_scales=(), verify="files", force=True)
    checkpoint = export.ServedCheckpoint(tmp_path / "out")
    name, module = next((n, m) for n, m in model.named_modules() if isinstance(m, fp4engine.Linear))
    role = fp4engine.QuantizerRole("linear", "weight", module.name, tuple(module.weight.shape))
    trained = fp4engine.make_quantizer(recipe, role).quantize(module.weight.detach(), columnwise=False).rowwise
    assert torch.equal(checkpoint.weight(name), trained.dequantize())
    assert "0.9amax (own rule, no kernel)" in str(report)
