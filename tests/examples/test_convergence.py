"""Studies of convergence: pairs are pairs, nothing is repeated, and tables are what they say."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4engine
from convergence import run, screen, sources, tables, task, tensors
from convergence.studies import (
    BASELINE,
    HIGH_PRECISION,
    PRESETS,
    STUDIES,
    SWITCH_AT,
    VARIANTS,
    Conditions,
    Outliers,
    Resets,
    variants_of,
)
from convergence.task import run_of, task_of
from fp4engine import cli
from fp4engine.cli import recipes
from fp4engine.compare import read
from fp4engine.compare.files import read_rows
from fp4engine.compare.recorder import header_of
from fp4engine.compare.training import Training
from fp4engine.formats import CastSpec, Rotation, RoundingMode, Signs
from fp4engine.optimizer_hooks import OsciReset
from fp4engine.recipe import Recipe, zoo
from fp4engine.roles import QuantizerRole
from gpt.data import load_corpus
from gpt.settings import InputError
from tests.tiny_task import InThisProcess, trained

SMALL = dataclasses.replace(PRESETS["tiny"], layers=1, width=32, sequence=16, batch=2, tokens=2 * 16 * 11)


@pytest.fixture(autouse=True)
def short_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "VALIDATION_BYTES", 256)


@pytest.fixture
def corpus(texts: Path, tmp_path: Path) -> Path:
    """The file of a text."""
    return sources.prepare(str(texts), SMALL.sequence + 1, tmp_path / "text")


def made(settings: Conditions, variant: str, corpus: Path) -> Training:
    return Training(task_of(settings, corpus), run_of(variant, settings, settings.seed))


def losses(settings: Conditions, variant: str, corpus: Path) -> list[float]:
    training = made(settings, variant, corpus)
    return [training.train_step().item() for _ in range(settings.steps)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_answers_for_every_linear_layer_at_every_step(variant: str) -> None:
    for settings in PRESETS.values():
        schedule = VARIANTS[variant].recipe(settings)
        for step in (0, settings.steps - 1):
            recipe: Recipe = schedule.at(step)
            for block in (0, settings.layers - 1):
                role = QuantizerRole("linear", "input", f"blocks.{block}.mlp.up", (64, 64))
                assert recipe.of(role).casts("input") is not None


def test_studies_name_variants_and_their_reference() -> None:
    for study in STUDIES.values():
        assert set(study.variants) <= set(VARIANTS)
        assert study.reference in study.variants
        assert variants_of(study)[0] == BASELINE


def test_a_late_switch_changes_the_pass_it_names_at_the_step_it_names() -> None:
    settings = PRESETS["tiny"]
    schedule = VARIANTS["forward to bf16 at 82%"].recipe(settings)
    first = round(SWITCH_AT * settings.steps)
    assert schedule.at(first - 1).casts("input").rowwise is not None
    assert schedule.at(first).casts("input").rowwise is None
    assert schedule.at(first).casts("grad_output").rowwise is not None
    assert VARIANTS["both to bf16 at 82%"].recipe(settings).at(first) == HIGH_PRECISION


def test_kept_blocks_are_as_many_first_as_last() -> None:
    settings = PRESETS["10m"]
    names = [f"blocks.{block}.mlp.up" for block in range(settings.layers)]
    for variant, kept in (("first blocks in bf16", names[0]), ("last blocks in bf16", names[-1])):
        recipe = VARIANTS[variant].recipe(settings)
        assert [n for n in names if recipe.of(QuantizerRole("linear", "", n, (64, 64))) == HIGH_PRECISION] == [kept]


def test_variants_are_run_once_and_in_order() -> None:
    labels = run.labels_of(["noise", "switch"], None)
    assert labels == list(dict.fromkeys([*variants_of(STUDIES["noise"]), *variants_of(STUDIES["switch"])]))
    assert run.labels_of(["noise", "switch"], [BASELINE]) == [BASELINE]
    chosen = run.labels_of(["board"], ["UFP4", "both to bf16 at 82%", "mxfp8", BASELINE])
    assert chosen == ["UFP4", "mxfp8", BASELINE]  # in the order given; one is of another study, one a row of the book


def test_a_late_switch_is_the_reference_run_until_then(corpus: Path) -> None:
    switched = losses(SMALL, "forward to bf16 at 82%", corpus)
    reference = losses(SMALL, "nvfp4", corpus)
    first = round(SWITCH_AT * SMALL.steps)
    assert switched[:first] == reference[:first]
    assert switched[first:] != reference[first:]


def assert_continues(settings: Conditions, variant: str, corpus: Path, folder: Path) -> Path:
    """A run that is stopped three times leaves the rows of one that is not."""
    of_study, run = task_of(settings, corpus), run_of(variant, settings, settings.seed)
    whole = trained(of_study, run, folder / "whole")
    for steps in (4, 3, 2):
        left = iter([False] * (steps - 1) + [True] * 99)
        assert not trained(of_study, run, folder / "parts", stop=lambda left=left: next(left)).exists()
    part = trained(of_study, run, folder / "parts")
    one, other = ([row for row in read_rows(path)[1:] if row.get("kind") != "end"] for path in (whole, part))
    assert one == other
    return whole


def test_oscillating_weights_are_reset_late_in_a_run_that_may_stop_within_a_window(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nvfp4, OsciReset"
    eager = dataclasses.replace(VARIANTS[name], resets=Resets(threshold=0.5))
    monkeypatch.setitem(VARIANTS, name, eager)
    header = read(assert_continues(SMALL, name, corpus, tmp_path)).header
    assert header["extra"] == {"resets": {"start": 0.64, "periods": 48, "threshold": 0.5}}
    training, plain = (made(SMALL, variant, corpus) for variant in (name, "nvfp4"))
    for step in range(SMALL.steps):
        training.train_step()
        plain.train_step()
        pairs = zip(training.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (step < SMALL.steps - 1)
    (hook,) = training.hooks
    assert isinstance(hook, OsciReset) and hook.reset_share and not hook.state_dict()["oscillations"]


def test_outlying_channels_are_chosen_early_in_a_run_that_may_stop_while_it_looks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TetraJet-v2, both hooks"
    early = dataclasses.replace(VARIANTS[name], outliers=Outliers(start=0.2, length=0.3, multiple=16))
    monkeypatch.setitem(VARIANTS, name, early)
    header = read(assert_continues(SMALL, name, corpus, tmp_path)).header
    assert header["extra"]["outliers"] == {"start": 0.2, "length": 0.3, "share": 0.1, "multiple": 16}
    training, start, length = made(SMALL, name, corpus), *early.outliers.times(SMALL.steps)
    _, control = training.hooks
    for step in range(SMALL.steps):
        looks, chosen = step > start, step > start + length
        assert training.task.phase(training.run, step)[1] == looks + chosen
        state = control.state_dict()
        assert bool(state["norms"]) == (looks and not chosen) and bool(state["channels"]) == chosen
        training.train_step()
    assert {len(outlying) for outlying, _ in control.state_dict()["channels"].values()} == {16}


@pytest.mark.parametrize("role", ["weight", "input"])
def test_two_terms_are_a_second_product_in_fprop_alone(role: str, corpus: Path) -> None:
    plain, two = (made(SMALL, name, corpus) for name in ("1x16 + 4/6", f"1x16 + 4/6, two-term {role}s"))
    assert list(plain.model.state_dict()) == list(two.model.state_dict())
    assert [dict(one.run.extra) for one in (plain, two)] == [{}, {"two_terms": role}]
    recipe, seen = two.recipe, {}
    layers = [training.model.blocks[0].mlp.up for training in (plain, two)]
    torch.manual_seed(0)
    x, dy = torch.randn(4, SMALL.width), torch.randn(4, layers[0].out_features)
    for one, layer in zip((plain, two), layers, strict=True):
        inp = x.clone().requires_grad_()
        with one.alone(), one.precision(recipe):
            y = layer(inp)
        with one.alone():
            y.backward(dy)
        seen[one] = y.detach(), inp.grad, layer.weight.grad
    (y, *gradients), (better, *same) = seen[plain], seen[two]
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    weight, other = layers[0].weight.detach(), "input" if role == "weight" else "weight"
    exact = {"input": x, "weight": weight}
    exact[other] = fp4engine.cast(exact[other], recipe.casts(other).rowwise)
    wanted = exact["input"] @ exact["weight"].T
    assert (better - wanted).norm() < 0.15 * (y - wanted).norm()


@pytest.mark.slow
def test_hot_channels_stay_hot_and_fused_pieces_train_every_recipe_and_are_compiled_once(corpus: Path) -> None:
    """One channel in a thousand of what linear layers read of a norm is hot, whatever its weight learns."""
    hot = dataclasses.replace(SMALL, hot=64.0)
    read: list[torch.Tensor] = []
    for variant in ("nvfp4", "MXFP8"):
        found = []
        for settings in (hot, dataclasses.replace(hot, compile=True)):
            training = made(settings, variant, corpus)
            training.model.blocks[0].mlp.up.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
            with torch.compiler.set_stance("default" if variant == "nvfp4" else "fail_on_recompile"):
                found.append([training.train_step().item() for _ in range(SMALL.steps)])
            first, *others = read[-1].flatten(0, 1).square().mean(0).sqrt().tolist()
            assert first > 30 * max(others)
        assert found[1] == pytest.approx(found[0], rel=0.01)
    assert training.task.setting()["hot"] == 64.0 and "hot" not in task_of(SMALL).setting()


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


ON_GPU = dataclasses.replace(SMALL, device="cuda", width=128, batch=16, tokens=16 * 16 * 30)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "variant",
    ["nvfp4", "forward to bf16 at 82%", "FP8 current", "Quartet II", "MXFP4", "TetraJet-v2, both hooks"],
)
def test_a_replayed_step_is_the_eager_step(variant: str, corpus: Path) -> None:
    replayed = losses(ON_GPU, variant, corpus)
    eager = Training(dataclasses.replace(task_of(ON_GPU, corpus), cuda_graph=False), run_of(variant, ON_GPU, 0))
    assert [eager.train_step().item() for _ in range(ON_GPU.steps)] == replayed


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("variant", ["nvfp4", "TetraJet-v2, OsciReset"])
def test_replayed_runs_stop_and_continue(variant: str, corpus: Path, tmp_path: Path) -> None:
    assert_continues(ON_GPU, variant, corpus, tmp_path)


def options(texts: Path, folder: Path, *more: str) -> list[str]:
    common = ["--preset=tiny", "--device=cpu", "--tokens=2048", "--seeds=1", "--jobs=2"]
    return [*common, f"--data={texts}", f"--results={folder}", f"--scratch={folder / 'scratch'}", *more]


@pytest.mark.slow
def test_the_command_trains_once_and_then_only_reports(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    assert run.main(["noise", *options(texts, folder), "--variants", BASELINE]) == 0
    (first,) = folder.rglob("*.jsonl")
    began = first.stat().st_mtime_ns
    monkeypatch.setattr(run, "Runner", InThisProcess)  # the others, with short validations, which no other process has
    more = ["--variants", BASELINE, "nvfp4", "nvfp4, other draws", "mxfp8"]
    capsys.readouterr()
    assert run.main(["noise", *options(texts, folder), *more]) == 0
    table = capsys.readouterr().out.partition("How far")[2]
    assert "| nvfp4 | 1 |" in table and "| mxfp8 | 1 |" in table
    assert (folder / "tiny" / "noise.png").exists()
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    assert files[first] == began
    header = json.loads(next(path for path in files if path.name.startswith("nvfp4.")).read_text().splitlines()[0])
    assert (header["label"], header["seed"], header["setting"]["on"]) == ("nvfp4", 0, "cpu") and "commit" in header
    assert run.main(["noise", *options(texts, folder), *more]) == 0
    assert capsys.readouterr().out.partition("How far")[2] == table
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == files
    (texts / "another.txt").write_text("more text")
    assert run.main(["noise", *options(texts, folder, "--seeds=2")]) == 2
    assert "finished runs were trained on text" in capsys.readouterr().err and len(files) == 4


def test_stopping_early_begins_nothing(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["noise", *options(texts, tmp_path / "results", "--seconds=0")]) == 130
    out, err = capsys.readouterr()
    assert "3 runs are left, 0 of them begun: the same command continues" in err
    assert "Not run: bf16; nvfp4; nvfp4, other draws." in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["noise", "--seeds=0"],
        ["noise", "--tokens=0"],
        ["noise", "--jobs=0"],
        ["noise", "--variants", "no such recipe"],
        ["noise", "--seconds=nan"],
        ["noise", "--seconds=-1"],
        ["noise", "--report=/nowhere/page.md"],
    ],
)
def test_the_command_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device=cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("run: ") and error.count("\n") == 1


@pytest.mark.parametrize("tokens", ["nan", "inf", "1.5", "many"])
def test_bytes_are_a_whole_number(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["noise", f"--tokens={tokens}"])
    assert "invalid whole value" in capsys.readouterr().err
    assert run.parser().parse_args(["noise", "--tokens=1e6"]).tokens == 1_000_000


def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["noise", "--device=cuda"]) == 2
    assert capsys.readouterr() == ("", "run: --device cuda: PyTorch finds no CUDA device here\n")


def saved(
    folder: Path, variant: str, seed: int, loss: float, data: str = "d", like: Conditions = SMALL, **made: Any
) -> None:
    """The file of a run that ended."""
    run = run_of(variant, like, seed)
    run = dataclasses.replace(run, recipe=made.pop("recipe", run.recipe))
    on = "cpu" if made.get("device", "cpu") == "cpu" else "gpu"
    setting = {**task_of(like).setting(), "data": data, "on": on}
    rows = [
        {**header_of(run, setting), "device": "cpu", "torch": "2", "date": "today", **made},
        {"step": 1, "loss": 9.0},
        {"step": 1, "validation_loss": 2 * loss},
        {"step": like.steps, "validation_loss": loss},
        {
            "kind": "end",
            "steps": like.steps,
            "status": "finished" if math.isfinite(loss) else "diverged",
            "seconds": 1.0,
        },
    ]
    path = run.path(folder / like.preset, setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_of_a_recipe_that_has_changed_are_shown_apart(tmp_path: Path) -> None:
    """They were tables' rows of the variant as it is now, and were never run again."""
    saved(tmp_path, BASELINE, 0, 1.0)
    saved(tmp_path, "Quartet II", 0, 1.02, recipe=zoo.make("quartet2_no_4over6"))
    text = tables.write(["ends"], SMALL, 1, tmp_path)
    assert "| Quartet II, an earlier recipe | 1 | 1.0200 |" in text and "Quartet II;" in text.partition("Not run:")[2]


def test_the_board_names_ties_and_puts_what_diverged_last(tmp_path: Path) -> None:
    losses = {
        BASELINE: (1.0, 1.0, 1.0),
        "MXFP8": (1.001, 0.999, 1.002),
        "nvfp4": (1.0400, 1.0410, 1.0420),
        "no RHT": (1.0401, 1.0409, 1.0424),
        "no SR": (1.05, 1.051, 1.052),
        "MXFP4": (math.nan,),
        "Quartet II": (1.02,),
    }
    for variant, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            saved(tmp_path, variant, seed, loss)
    found = tables.load(STUDIES["board"], SMALL, 3, tmp_path)
    rows = list(tables.places(found))
    assert [arm.label for arm, _, _ in rows] == [BASELINE, "MXFP8", "Quartet II", "nvfp4", "no RHT", "no SR", "MXFP4"]
    assert [tables.told(to_next) for _, _, to_next in rows] == [
        "tie (+0.07 (-0.31 to +0.45))", "one seed: not told apart", "one seed: not told apart",
        "tie (+0.01 (-0.05 to +0.08))", "+0.99 (+0.92 to +1.05)", "diverged", "",
    ]  # fmt: skip
    text = tables.write(["board"], SMALL, 3, tmp_path)
    step, bytes_saved = tables.costs("nvfp4")
    tie = "tie (+0.01 (-0.05 to +0.08))"
    assert (
        f"| 4 | nvfp4 | 3 | 1.0410 | +4.10 (+3.85 to +4.35) | {tie} | 67% | {step} | {bytes_saved} | `nvfp4`: " in text
    )
    assert "| 7 | MXFP4 | 1 | nan | diverged | " in text
    assert (tmp_path / "tiny" / "board.png").exists() and "Not run: nvfp4 + 4/6; " in text


def test_the_share_in_fp4_is_that_of_the_whole_run() -> None:
    """The table did not say it, and a variant that leaves little in FP4 may rank best."""
    whole, backward, late, none = (
        float(tables.fp4_share(variant, PRESETS["3m"]).removesuffix("%"))
        for variant in ("nvfp4", "backward only", "forward to bf16 at 82%", "both to bf16 at 82%")
    )
    assert whole == 98 and backward == pytest.approx(2 / 3 * whole, abs=1)
    assert late == pytest.approx(whole * (1 - (1 - SWITCH_AT) / 3), abs=1) and none == pytest.approx(
        0.82 * whole, abs=1
    )
    assert tables.fp4_share(BASELINE, PRESETS["3m"]) == "0%"


def test_every_row_of_the_board_says_where_it_is_from() -> None:
    assert all(VARIANTS[variant].row or VARIANTS[variant].source for variant in variants_of(STUDIES["board"]))


def test_the_page_holds_expectations_and_the_tables_of_the_rows_under_version_control(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "research" / "leaderboard.md"
    page.parent.mkdir(parents=True)
    shutil.copy(run.ROOT / "docs" / "research" / "leaderboard.md", page)
    expected = page.read_text().index("## Expected, written down before the runs")
    assert expected > page.read_text().index("## Results")
    folder = tmp_path / "benchmarks" / "results" / "convergence"
    shutil.copytree(run.RESULTS, folder)
    shipped = tmp_path / "leaderboard.json"
    for preset in ("3m", "10m"):
        tables.write(["board"], PRESETS[preset], 3, folder, page)
        tables.ship(tables.load(STUDIES["board"], PRESETS[preset], 3, folder), preset, shipped)
    assert page.read_text() == (run.ROOT / "docs" / "research" / "leaderboard.md").read_text()
    assert json.loads(shipped.read_text()) == json.loads(recipes.LEADERBOARD.read_text())


def test_the_command_line_prints_the_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "LEADERBOARD", tmp_path / "leaderboard.json")
    assert cli.main(["recipes"]) == 0
    assert capsys.readouterr().out.startswith("high_precision")
    for seed in range(2):
        saved(tmp_path, BASELINE, seed, 1.0)
        saved(tmp_path, "nvfp4", seed, 1.04 + 0.01 * seed)
        saved(tmp_path, "no SR", seed, 1.05)
    tables.ship(tables.load(STUDIES["board"], SMALL, 3, tmp_path), "3m", recipes.LEADERBOARD)
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["3m"]
    assert any(re.match(r"nvfp4 +\+4\.50 \(-1\.85 to \+10\.85\)  arXiv 2509", line) for line in lines)
    assert any(re.match(r"quartet2  +arXiv", line) for line in lines)


def test_spreads_are_those_of_the_rows_under_version_control(tmp_path: Path) -> None:
    assert run.main(["--spreads", str(tmp_path / "spreads.json"), "--device=cpu"]) == 0
    shipped = Path(fp4engine.__file__).parent / "compare" / "spreads.json"
    assert json.loads((tmp_path / "spreads.json").read_text()) == json.loads(shipped.read_text())


def test_a_study_at_several_presets_is_set_side_by_side(tmp_path: Path) -> None:
    for preset, gap in (("3m-20", 0.1), ("3m", 0.05)):
        saved(tmp_path, BASELINE, 0, 1.0, like=PRESETS[preset])
        saved(tmp_path, "nvfp4", 0, 1 + gap, like=PRESETS[preset])
    lines = tables.write(["horizon"], PRESETS["3m"], 1, tmp_path).splitlines()
    at = lines.index("| gap to bf16, % | 3m-20 | 3m | 3m-400 |")
    assert lines[at + 2] == "| nvfp4 | +10.00 | +5.00 | - |"


def test_tables_take_their_place_in_a_document(tmp_path: Path) -> None:
    folder, target = tmp_path / "results", tmp_path / "docs" / "evidence.md"
    saved(folder, BASELINE, 0, 1.0)
    target.parent.mkdir()
    target.write_text("before\n<!-- tiny -->\nold\n<!-- end of tiny -->\nafter\n")
    text = tables.write(["noise"], SMALL, 1, folder, target)
    assert target.read_text() == f"before\n<!-- tiny -->\n\n{text}\n<!-- end of tiny -->\nafter\n"
    assert "](../results/tiny/noise.png)" in text and (folder / "tiny" / "noise.png").exists()
    assert f"1 runs of {SMALL.tokens} bytes each. cpu, torch 2, today." in text and "| bf16 | 1 | 1.0000 |" in text
    with pytest.raises(InputError, match="needs the lines <!-- mini -->"):
        tables.write(["noise"], PRESETS["mini"], 1, folder, target)


@pytest.mark.parametrize(
    ("other", "said"), [({"data": "other"}, "data 'd' and 'other'"), ({"device": "NVIDIA H200"}, "on 'cpu' and 'gpu'")]
)
def test_runs_on_different_text_or_kinds_of_device_are_not_compared(other, said, tmp_path: Path) -> None:
    saved(tmp_path, BASELINE, 0, 1.0)
    saved(tmp_path, "nvfp4", 0, 1.0, **other)
    with pytest.raises(InputError, match=f"differ in more than recipe and seed: .*{said}"):
        tables.write(["noise"], SMALL, 1, tmp_path)


def test_runs_that_were_not_made_alike_are_told_apart(tmp_path: Path) -> None:
    for seed in range(2):
        saved(tmp_path, BASELINE, seed, 1.0, device="NVIDIA H200", commit="a")
        saved(tmp_path, "nvfp4", seed, 1.0, device="NVIDIA H200", commit="b")
    assert "made alike" not in tables.write(["board"], SMALL, 2, tmp_path)
    text = tables.write(["noise"], SMALL, 2, tmp_path)
    assert "- device NVIDIA H200, torch 2, commit b: nvfp4 (seeds 0, 1)\n" in text
    saved(tmp_path, "nvfp4", 1, 1.0, device="NVIDIA H100", commit="b")
    text = tables.write(["board"], SMALL, 2, tmp_path)
    assert "- device NVIDIA H200, torch 2: bf16 (seeds 0, 1); nvfp4 (seeds 0)\n" in text
    assert "- device NVIDIA H100, torch 2: nvfp4 (seeds 1)\n" in text


def test_python_sources_are_read_once(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    small = load_corpus(str(texts), 17, torch.device("cpu"))
    monkeypatch.setattr(sources, "python_sources", lambda length: reads.append(length) or small)
    for _ in range(2):
        found = sources.load(sources.prepare(None, 17, tmp_path), "cpu")
        assert found.digest == small.digest and torch.equal(found.training, small.training)
    assert reads == [17]
    assert sources.load(sources.prepare(str(texts), 17, tmp_path), "cpu").digest == small.digest


X = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [16, 128])
def test_the_rotation_is_undone(size: int) -> None:
    spec = CastSpec(rotation=Rotation(size, Signs.DGRAD))
    rng = torch.tensor([0, 3])
    rotated = tensors.prepare(X, spec, rng, 0)
    torch.testing.assert_close(tensors.unrotate(rotated, spec, rng, 0), X)
    assert not torch.allclose(rotated, X)


def test_bias_is_one_if_unbiased_and_the_number_of_draws_if_deterministic() -> None:
    guarded = CastSpec(rounding=RoundingMode.STOCHASTIC, target=6 * 16 / 17)
    assert tensors.measure(X, guarded, 0)["bias"] == pytest.approx(1, abs=0.1)
    assert tensors.measure(X, CastSpec(), 0)["bias"] == pytest.approx(tensors.DRAWS)


def test_errors_are_the_yardsticks() -> None:
    assert tensors.measure(X, CastSpec(), 0)["error"] == pytest.approx(9.05e-3, rel=0.05)
    rotated = CastSpec(rotation=Rotation(16))
    assert tensors.measure(X, rotated, 0)["error"] == pytest.approx(9.05e-3, rel=0.05)


def test_saturation_and_underflow_are_counted() -> None:
    x = torch.full((1, 32), 0.01)
    x[0, 0] = 6.0
    measured = tensors.measure(x, CastSpec(), 0)
    assert measured["underflow"] == pytest.approx(15 / 32)  # the block of the large value
    assert measured["saturated"] == 0
    stochastic = zoo.make("nvfp4").casts("grad_output").rowwise
    assert isinstance(stochastic, CastSpec)
    assert tensors.measure(X, stochastic, 0)["saturated"] > 0
    assert tensors.measure(X, stochastic.replace(target=6 * 16 / 17), 0)["saturated"] == 0


def test_nothing_is_measured_on_zeros() -> None:
    measured = tensors.measure(torch.zeros(16, 32), CastSpec(), 0)
    assert measured == {"error": 0.0, "bias": 0.0, "saturated": 0.0, "underflow": 0.0}


@pytest.mark.slow
def test_the_tensors_of_a_run_are_measured_and_drawn(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--preset=tiny",
        f"--data={texts}",
        f"--out={tmp_path}",
        f"--scratch={tmp_path}",
        "--tokens=2048",
        "--recipes",
        "nvfp4",
    ]
    assert tensors.main([*arguments, "--at", "0.5", "1"]) == 0
    assert "| nvfp4 | grad_output.columnwise |" in capsys.readouterr().out
    header, *rows = [json.loads(line) for line in (tmp_path / "tensors.jsonl").read_text().splitlines()]
    assert header["setting"]["preset"] == "tiny"
    assert len(rows) == 2 * 10 * 6  # steps, linear layers, operands
    assert all((tmp_path / f"{name}.png").exists() for name in tensors.MEASURES)


def test_a_screening_sees_the_forward_pass_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "VALIDATION_BYTES", 0)
    of_study = task_of(SMALL, corpus)
    weights = screen.trained(of_study, tmp_path)
    written = weights.stat().st_mtime_ns
    assert screen.trained(of_study, tmp_path).stat().st_mtime_ns == written  # is trained once
    predicted = {
        label: screen.predictions(of_study, label, weights) for label in (BASELINE, "backward only", "no RHT", "nvfp4")
    }
    moved = {label: screen.divergence(ours, predicted[BASELINE]) for label, ours in predicted.items()}
    assert moved["nvfp4"] == moved["no RHT"] > 1e-7 > moved["backward only"] >= moved[BASELINE] == 0.0


def test_a_screening_says_what_its_divergences_say_of_gaps() -> None:
    rows = [("no SR", 0.03, 4.0), ("nvfp4", 0.02, 3.0), ("scale search", 0.015, None), ("MXFP8", 0.0, 1.0)]
    text = screen.table(rows, "3m")
    assert "| scale search | 0.0150 | 0.75 | 0.68 |  | +2.50% |" in text
    assert text.endswith("over 3 variants: 1.00.\nThe line: 1.00% + 100.0% x nats per byte.")
