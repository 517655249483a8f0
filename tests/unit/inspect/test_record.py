"""What is recorded of a training run, and that the run does not notice."""

import copy
import json
import re
import subprocess
import sys
import threading
import types
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp4engine
from fp4engine import LayerNormMLP, inspect, ops
from fp4engine.formats import TWO_E2M1, CastSpec
from fp4engine.inspect import recorder as recorder_module
from fp4engine.inspect import report, statistics
from fp4engine.inspect.recorder import scalars
from fp4engine.inspect.watch import layers_of, watching
from fp4engine.ops import Operand
from fp4engine.recipe import Casts, LinearRecipe, Rule, RuledRecipe, zoo
from fp4engine.reference.rounding import decode
from tests.disk import full_disk
from tests.optimizers import Decaying, Lookahead, Wrapping


class Model(nn.Module):
    """A plain linear layer, and a module that owns two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 40)
        self.mlp = LayerNormMLP(40, 56, name="mlp", device="cpu")
        self.head = nn.Linear(40, 8, bias=False)

    def forward(self, x):
        return self.head(self.mlp(F.gelu(self.first(x))))


def make_model():
    torch.manual_seed(0)
    model = Model()
    fp4engine.convert(model, keep_high_precision=["head"])
    return model


def train(recipe, steps=3, out=None, model=None, **options):
    fp4engine.manual_seed(5)
    model = make_model() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    with inspect.record(model, out, **{"every": 2, **options}) if out else nullcontext():
        for step in range(steps):
            x = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(step))
            with fp4engine.autocast(recipe=recipe):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    draws = {device: draw for device, draw in fp4engine.get_rng_state()["draws"].items() if draw}
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, draws


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_has_the_same_bytes_with_and_without(name: str, tmp_path: Path) -> None:
    plain, recorded = train(zoo.make(name), 2), train(zoo.make(name), 2, tmp_path, every=1, draws=2)
    assert plain[0] == recorded[0] and plain[2] == recorded[2]
    assert all(torch.equal(plain[1][key], recorded[1][key]) for key in plain[1])
    kinds = {row["kind"] for row in inspect.read(tmp_path)}
    only = {"high_precision": {"run", "tensor"}, "fp8_delayed": {"run", "refusal"}}
    only["ue5m3_held"] = only["fp8_delayed"]
    assert kinds == only[name] if name in only else kinds >= {"run", "operand", "gemm"}


def rows_of(path: Path, kind: str, **fields):
    return [r for r in inspect.read(path) if r["kind"] == kind and all(r.get(k) == v for k, v in fields.items())]


def test_rows_say_what_was_asked(tmp_path: Path) -> None:
    train(zoo.make("nvfp4"), 5, tmp_path, layers=["first", "**.fc2"], draws=4)
    rows = inspect.read(tmp_path)
    assert rows[0]["layers"] == ["first", "mlp.fc2"]
    assert {row["step"] for row in rows} == {0, 2, 4}
    operands = rows_of(tmp_path, "operand", layer="first", step=2)
    assert [(row["gemm"], row["role"], row["side"]) for row in operands] == [
        ("fprop", "input", "rowwise"),
        ("fprop", "weight", "rowwise"),
        ("wgrad", "grad_output", "columnwise"),  # the model's own input needs no gradient
        ("wgrad", "input", "columnwise"),
    ]
    assert {row["gemm"] for row in rows_of(tmp_path, "gemm", layer="mlp.fc2")} == {"fprop", "dgrad", "wgrad"}
    assert len(rows_of(tmp_path, "rounding", layer="mlp.fc2", step=0)) == 2
    assert [row["line"] for row in rows] == list(range(1, len(rows) + 1))


def test_figures_are_those_of_a_tensor_that_is_known(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(torch.eye(32) * 6)
    fp4engine.convert(layer)
    x = torch.zeros(16, 32)
    x[:, 16] = 6.0
    x[0, 0] = 6.0
    x[0, 1] = 0.1  # rounds to zero beside a 6
    x[3, 20] = 600.0
    x[5, 2] = 6e-9  # its block's scale underflows beside 600
    with inspect.record(layer, tmp_path, every=1, optimizer="by hand", shadow_rows=4) as recorder:
        with fp4engine.autocast(recipe=zoo.make("nvfp4")):
            layer(x)
        recorder.step()
    (row,) = rows_of(tmp_path, "operand", role="input")
    assert row["amax"] == 600.0 and row["elements"] == 512 and row["blocks"] == 32
    assert row["rounded_to_zero"] == 3 / 512 and row["scale_underflow"] == 1 / 32  # row 3's 6 beside its 600 too
    assert row["zeros"] == (512 - 20) / 512 and row["nonfinite"] == 0
    assert sum(row["codes"]) == 512 and sum(row["scale_codes"].values()) == 32
    (tensor,) = rows_of(tmp_path, "tensor", role="input")
    assert tensor["channels"][0] == [20, None] and tensor["amax"] == 600.0  # the median channel is zero
    (product,) = rows_of(tmp_path, "gemm")
    assert (product["rows"], product["of_rows"]) == (4, 16)


def recorded_layer(x: torch.Tensor, recipe, folder: Path, **options) -> nn.Linear:
    """A layer whose one step on ``x`` is recorded, with a gradient of ones times a wave."""
    torch.manual_seed(2)
    fp4engine.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    fp4engine.convert(model)
    with inspect.record(model, folder, every=1, optimizer="by hand", **options) as recorder:
        with fp4engine.autocast(recipe=recipe):
            y = model(x)
        y.backward(torch.sin(torch.arange(y.numel()).float()).view_as(y))
        recorder.step()
    return model[0]


def test_figures_agree_with_a_plain_computation(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(32, 64)
    x[:, 40] *= 30  # a channel that sticks out
    x[7, 3] = 50  # and a block that loses its other numbers
    recipe = zoo.make("nvfp4")
    layer = recorded_layer(x, recipe, tmp_path)
    specs = {"input": recipe.casts("input").rowwise, "weight": recipe.casts("weight").rowwise}
    values = {"input": x, "weight": layer.weight.detach()}
    decoded = {role: fp4engine.cast(values[role], spec) for role, spec in specs.items()}
    for role in values:
        (row,) = rows_of(tmp_path, "operand", gemm="fprop", role=role)
        error = (decoded[role] - values[role]).square().double()
        signal = values[role].square().double()
        assert row["sqnr_db"] == pytest.approx(10 * float((signal.sum() / error.sum()).log10()), rel=1e-6)
        height = 16 if role == "weight" else 1
        per_block = error.view(error.shape[0] // height, height, 4, 16).sum((1, 3))
        place = int(per_block.argmax())
        assert row["worst"][0][:2] == [place // 4 * height, place % 4 * 16] and row["worst"][0][4] == 0
        assert row["worst"][0][2] == pytest.approx(float(per_block.max() / per_block.sum()), rel=1e-5)
        stored = fp4engine.cast(values[role], specs[role], "actual").scale_inv.float()[::height].log2().double()
        assert row["scale_spread_octaves"] == pytest.approx(float(stored.std(unbiased=False)), rel=1e-6)
        assert row["scale_range_octaves"] == pytest.approx(float(stored.max() - stored.min()))
        codes = fp4engine.cast(values[role], specs[role], "actual").data
        assert row["codes"] == torch.bincount(codes.flatten().int(), minlength=16).tolist()
    (product,) = rows_of(tmp_path, "gemm", gemm="fprop")
    exact = x @ layer.weight.detach().T
    error = decoded["input"] @ decoded["weight"].T - exact
    assert product["relative_error"] == pytest.approx(float(error.norm() / exact.norm()), rel=1e-4)
    (tensor,) = rows_of(tmp_path, "tensor", role="input")
    assert tensor["channels"][0][0] == 40
    assert tensor["channels"][0][1] == pytest.approx(float(x.abs().amax(0)[40] / x.abs().amax(0).median()), rel=1e-6)
    assert tensor["rms"] == pytest.approx(float(x.square().mean().sqrt()), rel=1e-6)


def test_the_shadow_is_of_the_rows_that_were_chosen(tmp_path: Path) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    recipe = zoo.make("nvfp4")
    layer = recorded_layer(x, recipe, tmp_path, shadow_rows=8)
    (product,) = rows_of(tmp_path, "gemm", gemm="fprop")
    assert (product["rows"], product["of_rows"]) == (8, 32)
    exact = (x @ layer.weight.detach().T)[::4]
    spec = {role: recipe.casts(role).rowwise for role in ("input", "weight")}
    error = (fp4engine.cast(x, spec["input"]) @ fp4engine.cast(layer.weight.detach(), spec["weight"]).T)[::4] - exact
    assert product["relative_error"] == pytest.approx(float(error.norm() / exact.norm()), rel=1e-4)


def test_nothing_waits_for_the_device_while_a_step_is_recorded(tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "new_tensor", "__bool__", "__int__", "__float__"):
        called = getattr(torch.Tensor, name)

        def spy(self, *arguments, _called=called, _name=name, **options):
            asked.append(_name)
            return _called(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, spy)
    seen = {name: getattr(inspect.watch, name) for name in ("_see_forward", "_see_backward")}
    for name, function in seen.items():

        def alone(*arguments, _function=function, **options):
            before = len(asked)
            _function(*arguments, **options)
            assert asked[before:] == []

        monkeypatch.setattr(inspect.watch, name, alone)
    train(zoo.make("nvfp4"), 1, tmp_path)
    assert rows_of(tmp_path, "operand") and asked


def test_a_nan_is_counted_and_rows_stay_json(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    fp4engine.convert(layer)
    x = torch.randn(16, 32)
    x[0], x[3, 3] = 0, float("nan")
    with inspect.record(layer, tmp_path, every=1, optimizer="by hand") as recorder:
        with fp4engine.autocast():
            layer(x).sum().backward()
        recorder.step()
    assert rows_of(tmp_path, "tensor", role="input")[0]["nonfinite"] == 1
    (row, *_) = rows_of(tmp_path, "operand", role="input")
    assert row["sqnr_db"] is None and row["rounded_to_zero"] is None  # it enters every decoded value
    assert row["amax"] is None and rows_of(tmp_path, "operand", role="weight")[0]["amax"] > 0
    for line in (tmp_path / "record.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_values_that_decode_to_nothing_finite_are_no_signal() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    x[3, 3] = float("inf")
    operand, _ = ops.quantize(x, zoo.make("nvfp4").casts("input").rowwise, None)
    figures = statistics.figures_of([], [statistics.Counted(x, operand, None, 0)])
    sums = dict(zip(statistics.OPERAND_SUMS, figures.numbers.tolist(), strict=False))
    assert sums["nonfinite"] == 1 and sums["signal"] == sums["error"] == 0


def test_draws_that_rotate_anew_are_not_averaged(tmp_path: Path) -> None:
    train(zoo.make("nvfp4_fresh"), 1, tmp_path, layers="**.fc2", draws=2)
    assert {row["gemm"] for row in rows_of(tmp_path, "rounding")} == {"dgrad"}


class Multiplied:
    """A listener that puts the operands of products into ``seen``."""

    def __init__(self, seen: dict[str, Operand]) -> None:
        self.seen = seen

    def made(self, *_) -> None: ...
    def refuse(self, layer, reason) -> None:
        pytest.fail(reason)

    def multiplied(self, layer, gemm, operands) -> None:
        self.seen.update((f"{gemm} {operand.role}", operand.operand) for operand in operands)


def test_a_weight_that_is_not_quantized_is_seen_as_autocast_takes_it() -> None:
    seen: dict[str, Operand] = {}
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    fp4engine.convert(model)
    recipe = LinearRecipe(input=Casts(CastSpec()), grad_output=Casts(CastSpec()))
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with watching(layers_of(model), Multiplied(seen)):
        with fp4engine.autocast(recipe=recipe), torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
    assert seen["fprop weight"].data.dtype == seen["dgrad weight"].data.dtype == torch.bfloat16
    assert model[0].weight.dtype == torch.float32


def test_what_is_not_cast_again_is_seen_as_the_layer_multiplies_it() -> None:
    seen: dict[str, Operand] = {}
    nearest = Casts(CastSpec(), None, "rowwise_dequantized")
    recipe = LinearRecipe(input=nearest, weight=nearest, grad_output=Casts(CastSpec(), CastSpec()))
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    fp4engine.convert(model)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with (
        watching(layers_of(model), Multiplied(seen)),
        fp4engine.autocast(recipe=recipe),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x).float().sum().backward()
    for forward, backward in (("fprop input", "wgrad input"), ("fprop weight", "dgrad weight")):
        assert torch.equal(seen[backward].data, seen[forward].dequantize(torch.bfloat16).T)


def test_an_input_in_float64_is_seen_as_autocast_leaves_it() -> None:
    seen: list[torch.dtype] = []

    class Keep:
        def made(self, layer, tensors, operands) -> None:
            seen.extend(tensor.dtype for tensor in tensors.values())

        def multiplied(self, *_) -> None: ...
        def refuse(self, layer, reason) -> None:
            pytest.fail(reason)

    model = nn.Sequential(nn.Linear(64, 48, dtype=torch.float64))
    fp4engine.convert(model)
    with watching(layers_of(model), Keep()), torch.autocast("cpu", torch.bfloat16), fp4engine.autocast():
        model(torch.randn(32, 64, dtype=torch.float64)).sum().backward()
    assert seen == [torch.float64] * 3


def test_codes_of_two_terms_stand_in_the_order_of_their_values() -> None:
    times = list(range(256))
    values = decode(torch.tensor([code for code, _ in report._by_value("2e2m1 1x16", times)]).to(torch.uint8), TWO_E2M1)
    assert torch.equal(values, values.sort().values)
    order = [code for code, _ in report._by_value("e2m1 1x16", times[:16])]
    assert order == [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]


def test_the_bias_of_saturation_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(1)
    size = 1 + torch.rand(32, 1)  # of all elements of a row: a block scale that is rounded down clips all of its block
    expected = {}
    for name in ("nvfp4", "nvfp4_guarded"):
        model = nn.Sequential(nn.Linear(64, 48, bias=False))
        fp4engine.convert(model)
        with inspect.record(model, tmp_path / name, every=1, optimizer="by hand", draws=64) as recorder:
            with fp4engine.autocast(recipe=zoo.make(name)):
                y = model(torch.randn(32, 64, requires_grad=True))
            y.backward(size.expand(32, 48))
            recorder.step()
        spec = zoo.make(name).casts("grad_output").rowwise
        stored = fp4engine.cast(size.repeat(1, 48), spec, "actual", rng=torch.tensor([9, 0]))
        largest = 6 * stored.scale_inv.float().repeat_interleave(16, 1) * stored.amax / spec.numerator
        expected[name] = float((size - largest).clamp(min=0).square().mean() / size.square().mean())
    (plain,), (guarded,) = (rows_of(tmp_path / name, "rounding", gemm="dgrad") for name in expected)
    assert plain["bias"] == pytest.approx(expected["nvfp4"], rel=0.1) and plain["bias"] > 1e-4
    assert abs(guarded["bias"]) < 0.2 * plain["bias"] and guarded["noise"] > 0 == expected["nvfp4_guarded"]


def test_a_step_is_written_when_the_next_one_ends(tmp_path: Path) -> None:
    model = make_model()
    written = []
    with inspect.record(model, tmp_path, every=2, optimizer="by hand") as recorder:
        for _ in range(3):
            with fp4engine.autocast():
                model(torch.randn(4, 48)).sum().backward()
            recorder.step()
            written.append({row["step"] for row in inspect.read(tmp_path) if row["kind"] != "run"})
    assert written == [set(), {0}, {0}]
    assert {row["step"] for row in inspect.read(tmp_path) if row["kind"] != "run"} == {0, 2}
    with pytest.raises(KeyError), inspect.record(model, tmp_path / "broken", optimizer="by hand") as recorder:
        with fp4engine.autocast():
            model(torch.randn(4, 48)).sum().backward()
        recorder.step()
        raise KeyError
    assert rows_of(tmp_path / "broken", "gemm")


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    """The rows of a step were those of whichever run had written them last."""
    model = make_model()
    first, second = (inspect.record(model, tmp_path, every=1, optimizer="by hand") for _ in range(2))
    unwritten = pytest.warns(UserWarning, match="could not write its last step")
    refused = pytest.raises(RuntimeError, match=r"another one writes there too, .* need folders of their own")
    with unwritten, refused, first as one, second as other:
        for step in (other.step, one.step, other.step, one.step):
            with fp4engine.autocast():
                model(torch.randn(4, 48)).sum().backward()
            step()
    assert {row["line"] for row in inspect.read(tmp_path) if row["kind"] == "run"} == {1, 2}


def test_a_disk_that_fills_is_named_and_no_row_is_cut_off(tmp_path: Path) -> None:
    model, record = make_model(), tmp_path / "record.jsonl"
    named = pytest.raises(OSError, match=re.escape(str(record)))
    with named, inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder, full_disk(record, 5000):
        for _ in range(2):
            with fp4engine.autocast():
                model(torch.randn(4, 48)).sum().backward()
            recorder.step()
    assert record.read_text().endswith("\n") and inspect.read(tmp_path)


def test_a_line_that_a_killed_process_has_not_finished_is_left_out(tmp_path: Path) -> None:
    train(zoo.make("nvfp4"), 1, tmp_path, every=1)
    rows, record = inspect.read(tmp_path), tmp_path / "record.jsonl"
    for unfinished in ('{"step": 1, "kind": "ten', "x" * 200_000):
        with record.open("a") as file:
            file.write(unfinished)
        with pytest.warns(UserWarning, match=f"ends within line {len(rows) + 1}, which is left out"):
            assert inspect.read(tmp_path) == rows
    train(zoo.make("nvfp4"), 1, tmp_path, every=1, first_step=1)
    both = inspect.read(tmp_path)
    assert both[: len(rows)] == rows and len(both) == 2 * len(rows)
    record.write_text("all of it is one line that was not finished")
    train(zoo.make("nvfp4"), 1, tmp_path, every=1)
    assert inspect.read(tmp_path) == rows


def test_a_step_that_cannot_be_told_loses_none_before_it(tmp_path: Path, monkeypatch) -> None:
    model = make_model()

    def step(recorder) -> None:
        with fp4engine.autocast():
            model(torch.randn(4, 48)).sum().backward()
        recorder.step()

    def fail(rows):
        raise RuntimeError("ranks recorded different layers")

    with (
        pytest.raises(RuntimeError, match="different layers"),
        inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder,
    ):
        step(recorder)
        monkeypatch.setattr(recorder_module, "described", fail)
        step(recorder)
    assert {row["step"] for row in inspect.read(tmp_path) if row["kind"] != "run"} == {0}


def test_what_ended_the_region_is_raised_even_if_nothing_can_be_written(tmp_path: Path, monkeypatch) -> None:
    model = make_model()

    def full(step, rows):
        raise OSError("disk full")

    with (
        pytest.raises(KeyError),
        pytest.warns(UserWarning, match="could not write its last step: disk full"),
        inspect.record(model, tmp_path, optimizer="by hand") as recorder,
    ):
        with fp4engine.autocast():
            model(torch.randn(4, 48)).sum().backward()
        recorder.step()
        monkeypatch.setattr(recorder, "_write", full)
        raise KeyError


class _Constant(torch.autograd.Function):
    """Multiplies, and makes no gradient of its first input."""

    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, *grads):
        return None, grads[0]


def test_a_layer_whose_gradient_nobody_makes_trains_on(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(48, 16), nn.Linear(48, 16)

        def forward(self, x):
            return _Constant.apply(self.left(x), self.right(x))

    def made():
        torch.manual_seed(0)
        model = Halves()
        fp4engine.convert(model)
        return model

    plain = train(zoo.make("nvfp4"), 2, model=made())
    recorded = train(zoo.make("nvfp4"), 2, tmp_path, made(), every=1)
    assert plain[0] == recorded[0] and plain[2] == recorded[2]
    assert {row["gemm"] for row in rows_of(tmp_path, "gemm", layer="left")} == {"fprop"}
    assert {row["gemm"] for row in rows_of(tmp_path, "gemm", layer="right")} == {"fprop", "wgrad"}


def test_a_pass_without_gradients_is_not_the_one_that_is_recorded(tmp_path: Path) -> None:
    model = make_model()
    for name, rows in (("same", 4), ("other", 6)):  # of as many rows as the pass that trains, and of others
        with inspect.record(model, tmp_path / name, optimizer="by hand") as recorder:
            with fp4engine.autocast():
                with torch.no_grad():
                    model(torch.full((rows, 48), 1000.0))
                model(torch.ones(4, 48)).sum().backward()
            recorder.step()
        assert {row["amax"] for row in rows_of(tmp_path / name, "tensor", layer="first", role="input")} == {1.0}
        assert {row["gemm"] for row in rows_of(tmp_path / name, "gemm", layer="first")} == {"fprop", "wgrad"}


class Repeated(nn.Module):
    """A checkpointed layer that runs twice."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.again, self.options = nn.Linear(48, 48), nn.Linear(48, 48), options

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = fp4engine.checkpoint(self.again, x, **self.options) if self.options else self.again(x)
        return x


@pytest.mark.parametrize("name", ["nvfp4", "fp4_all_the_way"])  # draws in backward only, and in both
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_recorded_of_a_checkpointed_layer_is_one_pass(name: str, use_reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Repeated()
    fp4engine.convert(plain)
    checkpointed = Repeated(use_reentrant=use_reentrant)
    fp4engine.convert(checkpointed)
    checkpointed.load_state_dict(plain.state_dict())
    trained = [
        train(zoo.make(name), 1, tmp_path / folder, model) for folder, model in (("0", plain), ("1", checkpointed))
    ]
    assert trained[0][0] == trained[1][0]
    rows = [rows_of(tmp_path / folder, "operand", layer="again") for folder in "01"]
    product = [rows_of(tmp_path / folder, "gemm", layer="again") for folder in "01"]
    assert [row["gemm"] for row in product[1]] == [row["gemm"] for row in product[0]] == ["fprop", "dgrad", "wgrad"]
    alike = [[{**row, "line": 0} for row in several] for several in rows]
    assert (alike[0] == alike[1]) != use_reentrant  # which runs the second pass again first


@pytest.mark.parametrize("name", ["nvfp4", "fp4_all_the_way"])
def test_the_key_of_a_late_draw_is_that_of_the_step(name: str) -> None:
    model = make_model()
    fp4engine.set_rng_state({"seed": 3, "draws": {"cpu": (5 << 32) + 7}})
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    products: dict[str, torch.Tensor] = {}

    class Listener:
        def made(self, layer, tensors, operands): ...

        def multiplied(self, layer, gemm, operands):
            left, right = (seen.operand.dequantize() for seen in operands)
            products[gemm] = left @ right.T

        def refuse(self, layer, reason):
            raise AssertionError(reason)

    with inspect.watch.watching({"first": model.first}, Listener()), fp4engine.autocast(recipe=zoo.make(name)):
        y = model.first(x)
        y.square().sum().backward()
    torch.testing.assert_close(products["wgrad"], model.first.weight.grad)
    torch.testing.assert_close(products["fprop"] + model.first.bias, y)


def test_regions_record_the_same_layers_each_for_itself(tmp_path: Path) -> None:
    model = make_model()
    with inspect.record(model, tmp_path / "beside", every=1, layers="first"):
        train(zoo.make("nvfp4"), 3, tmp_path / "within", model=model)
    alone = train(zoo.make("nvfp4"), 3, tmp_path / "alone")
    assert rows_of(tmp_path / "within", "operand") == rows_of(tmp_path / "alone", "operand")
    assert {row["step"] for row in rows_of(tmp_path / "beside", "operand", layer="first")} == {0, 1, 2}
    assert all(torch.equal(parameter, alone[1][name]) for name, parameter in model.named_parameters())


def test_compiled_functions_run_eagerly_until_the_last_region_has_recorded_its_step(tmp_path: Path) -> None:
    ran: list[str] = []

    def backend(graph, _):
        return lambda *inputs: ran.append("compiled") or graph.forward(*inputs)

    compiled = torch.compile(lambda x: x + 1, backend=backend)

    def is_compiled() -> bool:
        ran.clear()
        compiled(torch.ones(2))
        return bool(ran)

    model = make_model()
    options = {"optimizer": "by hand", "every": 2}
    with inspect.record(model, tmp_path / "one", **options) as one:
        with inspect.record(model, tmp_path / "two", **options) as two:
            assert not is_compiled()
            one.step()
            assert not is_compiled()
            two.step()
            assert is_compiled()
            two.step()
            one.step()
            assert not is_compiled()
        assert not is_compiled()
    assert is_compiled()


def test_a_model_that_is_compiled_in_a_recorded_step_runs_eagerly(tmp_path: Path) -> None:
    """In a process of its own, where nobody has used the compiler before; an optimizer uses it."""
    program = """
import sys, torch, fp4engine
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
fp4engine.convert(model)
assert "torch._dynamo" not in sys.modules
with fp4engine.inspect.record(model, sys.argv[1], every=1, optimizer="by hand") as recorder:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with fp4engine.autocast():
        compiled(torch.randn(4, 32)).sum().backward()
    recorder.step()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert [row["gemm"] for row in rows_of(tmp_path, "gemm")] == ["fprop", "wgrad"]


def test_a_copy_made_in_a_recorded_step_is_not_watched(tmp_path: Path) -> None:
    model = make_model()
    with inspect.record(model, tmp_path, optimizer="by hand") as recorder:
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        with fp4engine.autocast():
            copied(torch.randn(3, 48))
        recorder.step()
    assert rows_of(tmp_path, "refusal", layer="first") and copied.first.executed.counts
    assert not model.first.executed.counts


def test_an_empty_batch_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model()
    with inspect.record(model, tmp_path, optimizer="by hand") as recorder:
        with fp4engine.autocast():
            model(torch.randn(0, 48)).sum().backward()
        recorder.step()
    assert {row["reason"] for row in rows_of(tmp_path, "refusal", layer="first")} == {"its input had no elements"}


def test_patterns_arguments_and_models_are_checked(tmp_path: Path) -> None:
    model = make_model()
    for options, said in (
        ({"layers": "nothing.*"}, "matches none"),
        ({"layers": []}, "layers must have at least one pattern"),
        ({"every": 0}, "every must be"),
        ({"draws": 1}, "draws must be"),
        ({"shadow_rows": 0}, "shadow_rows must be"),
        ({"optimizer": "me"}, "optimizer must be"),
        ({"tensorboard": "yes"}, "tensorboard must be"),
    ):
        with pytest.raises(ValueError, match=said), inspect.record(model, tmp_path, **options):
            pass
    with pytest.raises(ValueError, match="convert"), inspect.record(nn.Linear(3, 3), tmp_path):
        pass


def test_two_optimizers_must_be_told_apart(tmp_path: Path) -> None:
    model = make_model()
    both = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.first, model.head)]
    with pytest.raises(RuntimeError, match="two optimizers"), inspect.record(model, tmp_path, every=1):
        for optimizer in both:
            optimizer.step()
    with inspect.record(model, tmp_path, every=1, optimizer=both[1]) as recorder:
        for _ in range(3):
            for optimizer in both:
                optimizer.step()
    assert recorder.step_number == 3


@pytest.mark.parametrize("kind", [Decaying, Wrapping, Lookahead])
def test_a_step_of_a_subclass_or_wrapper_is_one_step(kind: Any, tmp_path: Path) -> None:
    model = make_model()
    optimizer = kind(model.parameters() if kind is Decaying else torch.optim.SGD(model.parameters()))
    with inspect.record(model, tmp_path, every=2, optimizer=optimizer) as recorder:
        for _ in range(3):
            with fp4engine.autocast():
                model(torch.randn(8, 48)).sum().backward()
            optimizer.step()
    assert recorder.step_number == 3 and {row["step"] for row in rows_of(tmp_path, "gemm")} == {0, 2}


def test_a_compiled_step_of_an_optimizer_is_told_by_hand(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    update = torch.compile(optimizer.step, backend="eager")

    def train_step() -> None:
        with fp4engine.autocast():
            model(torch.randn(8, 48)).sum().backward()
        update()

    with inspect.record(model, tmp_path / "told", every=3) as recorder:
        train_step()  # is recorded, and so runs eagerly
        with pytest.raises(RuntimeError, match="pass optimizer='by hand', and call the recorder's step"):
            train_step()
    with inspect.record(model, tmp_path / "by hand", every=3, optimizer="by hand") as recorder:
        for _ in range(4):
            train_step()
            recorder.step()
    assert {row["step"] for row in rows_of(tmp_path / "by hand", "gemm")} == {0, 3}


def test_there_is_no_step_after_the_region(tmp_path: Path) -> None:
    model = make_model()
    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        recorder.step()
    with pytest.raises(RuntimeError, match="has ended"):
        recorder.step()
    assert not recorder.is_recording and recorder.step_number == 1


def test_nothing_recorded_warns_and_layers_not_seen_are_named(tmp_path: Path) -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="without a recorded step"), inspect.record(model, tmp_path, every=7):
        pass
    recipe = RuledRecipe(zoo.make("nvfp4"), (Rule(zoo.make("high_precision"), "mlp"),))
    train(recipe, 1, tmp_path / "ruled")
    assert {row["layer"] for row in rows_of(tmp_path / "ruled", "operand")} == {"first"}
    model.eval()
    train(zoo.make("nvfp4"), 1, tmp_path / "eval", model=model)
    (row,) = rows_of(tmp_path / "eval", "refusal", layer="first")
    assert "training mode" in row["reason"]


@pytest.mark.no_poison
def test_a_compiled_model_is_recorded_by_eager_steps(tmp_path: Path) -> None:
    torch._dynamo.reset()
    recipe, model = zoo.make("nvfp4"), make_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    eager = train(recipe, 4)
    recorded = train(recipe, 4, tmp_path, model=compiled, every=2)
    assert eager[0] == recorded[0]
    assert {row["layer"] for row in rows_of(tmp_path, "operand")} == {"first", "mlp.fc1", "mlp.fc2"}


WRAPPERS = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compiled": partial(torch.compile, backend="eager"),
    "checkpointed": partial(checkpoint_wrapper, context_fn=fp4engine.recompute_contexts),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_change_no_name_in_a_record(wrap, group_of_one, tmp_path: Path) -> None:
    train(zoo.make("nvfp4"), 1, tmp_path / "plain", layers=["first", "mlp"])
    model = make_model()
    model.mlp = wrap(model.mlp)
    train(zoo.make("nvfp4"), 1, tmp_path / "part", model=model, layers=["first", "mlp"])
    train(zoo.make("nvfp4"), 1, tmp_path / "whole", model=wrap(make_model()), layers=["first", "mlp"])
    records = {name: inspect.read(tmp_path / name) for name in ("plain", "part", "whole")}
    names = {name: {row["layer"] for row in rows if row["kind"] == "gemm"} for name, rows in records.items()}
    assert list(names.values()) == [{"first", "mlp.fc1", "mlp.fc2"}] * 3
    assert records["whole"][0]["roles"] == records["plain"][0]["roles"]
    assert [record["layers"] for record, *_ in records.values()] == [["first", "mlp.fc1", "mlp.fc2"]] * 3
    page = report.html(records, "side by side")
    assert not re.search("_orig_mod|module[.]|_checkpoint_wrapped", page)


def test_what_a_wrapper_copies_is_not_taken_for_what_it_wraps() -> None:
    """As PEFT's wrapper of a module that is trained besides."""
    first, copied = fp4engine.Linear(16, 16), fp4engine.Linear(16, 16)
    head = nn.ModuleDict({"original_module": first, "modules_to_save": nn.ModuleDict({"default": copied})})
    found = layers_of(nn.ModuleDict({"body": nn.ModuleDict({"module": first}), "head": head}))
    assert found == {"body": first, "head": copied}
    found = layers_of(nn.ModuleDict({"head": head}))
    assert found == {"head.original_module": first, "head.modules_to_save.default": copied}


def test_tensorboard_is_asked_for_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with (
        pytest.raises(ImportError, match="needs the package tensorboard"),
        inspect.record(make_model(), tmp_path, tensorboard=True),
    ):
        pass
    row = {"step": 3, "kind": "gemm", "layer": "a", "gemm": "wgrad", "rows": 4, "snr_db": 15.0, "relative_error": None}
    assert list(scalars(row)) == [("a/wgrad/snr_db", 15.0)]


NO_NUMBERS = ("style", "title", "h1", "summary", "figcaption", "th")
"""Elements whose text is names: of the page, of layers, of casts such as e2m1 1x16."""


def test_tensorboard_gets_the_numbers_of_every_row(tmp_path: Path, monkeypatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))

        def flush(self):
            written.append(("flush", 0.0, 0))

        def close(self):
            written.append(("close", 0.0, 0))

    module = types.ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    train(zoo.make("nvfp4"), 3, tmp_path, layers="first", tensorboard=True)
    assert written[-1][0] == "close"
    numbers = {(tag, step): value for tag, value, step in written if tag not in ("flush", "close")}
    for row in inspect.read(tmp_path):
        for tag, value in scalars({key: value for key, value in row.items() if key != "line"}):
            assert numbers.pop((tag, row["step"])) == value
    assert not numbers


def require_traced(page: str, records: dict[str, list[dict[str, Any]]]) -> int:
    """The page loads nothing, and each number of it is in the row that its element names; how many there are."""
    tree = ElementTree.fromstring(re.sub("<br>|<(meta|!doctype)[^>]*>", "", page))
    assert not any(one.tag in ("script", "link", "img") or {"src", "href"} & set(one.attrib) for one in tree.iter())
    traced = [one for one in tree.iter() if one.get("data-line")]
    for one in traced:
        record, _, line = one.attrib["data-line"].rpartition(":")
        value = next(row for row in records[record] if row["line"] == int(line))
        for part in one.attrib["data-field"].split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert float(one.attrib["data-value"]) == value
        assert one.get("title") or one.find("title") is not None  # whatever is pointed at says where it is from
    for one in tree.iter():
        said = "".join(filter(None, (one.text, *(child.tail for child in one)))).strip()
        if one not in traced and one.tag not in NO_NUMBERS and not said.startswith("mlp.fc"):  # a layer's name
            assert not re.search(
                r"\d", re.sub(r"fp4engine \S+ with torch \S+|fp4engine|e2m1|nvfp4|fp8_current", "", said)
            )
    return len(traced)


def test_every_number_of_the_report_is_in_its_row(tmp_path: Path) -> None:
    train(zoo.make("nvfp4"), 5, tmp_path, draws=2)
    rows = inspect.read(tmp_path)
    page = inspect.html(rows, "A run <of> mine")
    assert require_traced(page, {"": rows}) > 300 and page.count("</title></text>") > 50


def test_a_report_is_about_the_branch_that_a_resumed_run_took(tmp_path: Path) -> None:
    """It was headed by the last step of the abandoned branch, and its lines went back and forth."""
    for first, steps in ((0, 6), (3, 2)):  # as if it had been saved at step 3, and killed in step 6
        train(zoo.make("nvfp4"), steps, tmp_path, layers="first", every=1, first_step=first)
    rows = inspect.read(tmp_path)
    again = next(row["line"] for row in rows[1:] if row["kind"] == "run")
    page = inspect.html(rows, "resumed")
    lines = {int(line) for line in re.findall(r'data-line="(\d+)"', page)}
    shown = [row for row in rows if row["line"] in lines and row["kind"] not in ("run", "refusal")]
    said = re.sub(r"<[^>]*>", "", page)
    assert "All layers at step 4:" in said and "Recorded steps 0 to 4," in said
    assert "The run began again at step 3; what it had recorded of steps 3 to 5 before is left out." in said
    named = [row for row in shown if row["line"] < again and row["step"] >= 3]
    assert len(named) == 2  # the first and the last step that are left out, by that sentence
    for points in re.findall(r'polyline points="([^"]+)"', page):
        places = [float(point.partition(",")[0]) for point in points.split()]
        assert places == sorted(set(places))


def test_blocks_that_underflow_show_where_the_signal_looks_good(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    fp4engine.convert(model)
    x = torch.zeros(16, 32)
    x[:, :16], x[:, 16:] = 6.0, 1e-9  # half of the blocks are exact, and hold all of the signal
    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        with fp4engine.autocast(recipe=zoo.make("nvfp4")):
            model(x.requires_grad_()).sum().backward()
        recorder.step()
    (row,) = (r for r in rows_of(tmp_path, "operand") if (r["gemm"], r["role"]) == ("fprop", "input"))
    assert row["sqnr_db"] > 100 and row["scale_underflow"] == 0.5
    overview = inspect.html(inspect.read(tmp_path), "underflow").partition("<tbody>")[2].partition("</tbody>")[0]
    cell = overview.split("<td")[2]
    assert "0.5 of blocks are zero" in cell and "rgb(255,255,255)" not in cell


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row_scaled", "mxfp8"])
def test_what_is_not_finite_shows(name: str, tmp_path: Path) -> None:
    """A cell without a signal was as pale as that of a layer in high precision, and NaN of rows an amax of 0."""
    x = torch.randn(16, 64)
    x[:, 3] = float("nan")
    recorded_layer(x, zoo.make(name), tmp_path)
    (row,) = rows_of(tmp_path, "operand", gemm="fprop", role="input")
    assert row["nonfinite"] == 16 and (row["amax"] is None) == (name != "mxfp8")  # which has no outer scale
    overview = inspect.html(inspect.read(tmp_path), "not finite").partition("<tbody>")[2].partition("</tbody>")[0]
    cell = overview.split("<td")[2]
    assert "16 not finite" in cell and "rgb(235,125,65)" in cell


def test_records_side_by_side(tmp_path: Path) -> None:
    records = {}
    for name, steps in (("nvfp4", 3), ("fp8_current", 4)):
        train(zoo.make(name), steps, tmp_path / name, layers="first", every=1)
        records[name] = inspect.read(tmp_path / name)
    page = inspect.html(records, "two")
    require_traced(page, records)
    overview = page.partition("<tbody>")[2].partition("</tbody>")[0]
    assert [row.count("<td") for row in overview.split("<tr>")[1:]] == [11, 11]
    said = re.sub(r"<[^>]*>", "", page)
    assert "All layers at step 2 and 3:" in said and page.count("<section>") == 2
    with pytest.raises(ValueError, match="or of several by their names, got none"):
        inspect.html({}, "none")
    with pytest.raises(ValueError, match="the names of records must be strings, got 1"):
        inspect.html({1: records["nvfp4"]}, "a number")  # pyright: ignore[reportArgumentType]


def test_a_report_needs_the_row_about_the_run(tmp_path: Path) -> None:
    train(zoo.make("nvfp4"), 1, tmp_path, layers="first", every=1)
    with pytest.raises(ValueError, match="rows must have the row of kind 'run'"):
        inspect.html(rows_of(tmp_path, "gemm"), "products only")


def test_a_folder_by_the_name_of_the_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").mkdir()
    with pytest.raises(
        ValueError, match=r"out must be a folder for the file record\.jsonl, and in .* that is a folder"
    ):
        train(zoo.make("nvfp4"), 1, tmp_path, layers="first", every=1)


def test_the_report_shows_the_later_of_two_rows_of_a_step(tmp_path: Path) -> None:
    for _ in range(2):  # as a run that is resumed takes steps again
        train(zoo.make("nvfp4"), 1, tmp_path, layers="first", every=1)
    rows = inspect.read(tmp_path)
    overview = inspect.html(rows, "twice").partition("<tbody>")[2].partition("</tbody>")[0]
    lines = [int(line) for line in re.findall(r'data-line="(\d+)"', overview)]
    assert lines and min(lines) > len(rows) // 2


def test_a_backward_pass_that_runs_twice_is_recorded_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    fp4engine.convert(model)
    x = torch.randn(16, 32, requires_grad=True)
    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        with fp4engine.autocast():
            y = model(x)
        torch.autograd.grad(y.sum(), [x], retain_graph=True)
        y.sum().backward()
        recorder.step()
    gemms = [row["gemm"] for row in inspect.read(tmp_path) if row["kind"] == "gemm"]
    assert sorted(gemms) == ["dgrad", "fprop", "wgrad"]


@pytest.mark.parametrize(("role", "hidden"), [("input", "wgrad"), ("weight", "dgrad")])
def test_a_product_of_what_was_written_to_since_it_was_cast_is_refused(role: str, hidden: str, tmp_path: Path) -> None:
    """A layer keeps operands, so autograd lets both be written to before the backward pass."""

    def rows(write: bool) -> list[dict]:
        out = tmp_path / str(write)
        torch.manual_seed(0)
        fp4engine.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        fp4engine.convert(model)
        x = torch.randn(16, 32, requires_grad=True)
        with inspect.record(model, out, every=1, optimizer="by hand") as recorder:
            with fp4engine.autocast():
                y = model(x)
            if write:
                with torch.no_grad():
                    (x if role == "input" else model[0].weight).mul_(3)
            y.square().mean().backward()
            recorder.step()
        return [{name: value for name, value in row.items() if name != "line"} for row in inspect.read(out)]

    found = rows(write=True)
    for row in rows(write=False):
        assert (row in found) == (row.get("gemm") != hidden)
    refusals = [row for row in found if row["kind"] == "refusal"]
    assert [row["layer"] for row in refusals] == ["0"] and f"its {role} was written to" in refusals[0]["reason"]


def test_of_two_threads_that_run_a_layer_at_once_one_pass_is_recorded(tmp_path: Path, monkeypatch) -> None:
    """As replicas of data parallelism do. Both have begun before either has ended."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    fp4engine.convert(model)
    multiply, both = model[0]._multiply, threading.Barrier(2)

    def together(*arguments):
        output = multiply(*arguments)
        both.wait(timeout=60)
        return output

    monkeypatch.setattr(model[0], "_multiply", together, raising=False)
    outputs: dict[int, torch.Tensor] = {}

    def forward(rows: int) -> None:
        with fp4engine.autocast():
            outputs[rows] = model(torch.randn(rows, 32))

    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        threads = [threading.Thread(target=forward, args=(rows,)) for rows in (8, 16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for output in outputs.values():
            output.sum().backward()
        recorder.step()
    found = [(row["role"], row["shape"][0]) for row in inspect.read(tmp_path) if row["kind"] == "tensor"]
    rows = dict(found)["input"]
    assert rows in (8, 16) and found == [("input", rows), ("weight", 32), ("grad_output", rows)]


def test_a_backward_pass_after_the_step_of_its_forward_pass_is_in_no_step(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    fp4engine.convert(model)

    def forward() -> torch.Tensor:
        with fp4engine.autocast():
            return model(torch.randn(8, 32)).sum()

    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        late = forward()
        recorder.step()
        late.backward()
        forward().backward()
        recorder.step()
    of_steps = [(row["step"], row["gemm"]) for row in inspect.read(tmp_path) if row["kind"] == "gemm"]
    assert of_steps == [(0, "fprop"), (1, "fprop"), (1, "wgrad")]
    (refusal,) = [row for row in inspect.read(tmp_path) if row["kind"] == "refusal"]
    assert refusal["step"] == 0 and refusal["reason"].startswith("no backward pass")
