"""Pictures of measured results are drawn from the rows under version control, and nothing in them hides."""

import csv
import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text

from fp4engine.recipe import zoo

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load("pictures")


@pytest.fixture(scope="module")
def lesson():
    return load("nvfp4_pictures")


@pytest.fixture
def drawn(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Draws one picture by its name, and returns the figure."""

    def draw(name: str):
        figures = []
        monkeypatch.setattr(plt, "close", figures.append)
        dict(tool.pictures())[name](tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1] if figures else plt.figure(plt.get_fignums()[-1])

    yield draw
    monkeypatch.undo()
    plt.close("all")


def test_every_picture_of_results_can_be_drawn_again(tool) -> None:
    committed = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.png")}
    assert {name for name, _ in tool.pictures()} == committed


def test_a_run_has_a_panel_of_the_gap_and_a_title_with_its_numbers(drawn) -> None:
    figure = drawn("train_gpt/10m/loss.png")
    above, below = figure.axes
    lasts = []
    for name in ("bf16", "nvfp4"):
        rows = map(json.loads, (RESULTS / "train_gpt/10m" / name / "metrics.jsonl").read_text().splitlines())
        lasts.append([row["validation_loss"] for row in rows if "validation_loss" in row][-1])
        assert f"{lasts[-1]:.4f} in {name}" in above.get_title()
    gap = next(line for line in below.lines if line.get_label() == "nvfp4, validation")
    assert gap.get_ydata()[-1] == pytest.approx(100 * (lasts[1] / lasts[0] - 1))


def test_equal_curves_are_told_apart_by_their_widths(drawn) -> None:
    for axes in drawn("convergence/tensors/saturated.png").axes:
        widths = [line.get_linewidth() for line in axes.lines]
        assert len(widths) == 5 and widths == sorted(set(widths), reverse=True)
        assert axes.get_ylim()[0] < 0  # a curve of zeros is not hidden by the frame


def test_the_final_gaps_are_drawn_from_zero_on(drawn) -> None:
    course, ends = drawn("convergence/10m/noise.png").axes
    low, high = ends.get_xlim()
    assert low <= 0 < high
    assert len(course.lines) == 2 and course.collections  # zero, and the mean of three seeds in its band


@pytest.mark.parametrize(
    ("picture", "tells"), [("convergence/10m/noise.png", True), ("convergence/3m/search.png", False)]
)
def test_a_legend_does_not_hide_many_curves(drawn, picture: str, tells: bool) -> None:
    course, ends = drawn(picture).axes
    assert (course.get_legend() is not None) == tells
    assert all(label.get_text() for label in ends.get_yticklabels())


def test_every_shape_has_a_color_of_its_own(drawn) -> None:
    shapes = [line for line in drawn("quantize.png").axes[0].lines if line.get_marker() == "o"]
    assert len({tuple(line.get_color()) for line in shapes}) == len(shapes) == 12


def test_no_title_is_cut_off(drawn) -> None:
    figure = drawn("convergence/mini/switch.png")
    figure.canvas.draw()
    titles = {figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)} - {""}
    drawn_titles = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text() in titles)
    assert titles and len(drawn_titles) == len(titles)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in map(Text.get_window_extent, drawn_titles))


@pytest.mark.parametrize("tolerance", [math.inf, 1.0])
def test_the_boards_legend_tells_a_finite_tolerance_below_the_title(tool, drawn, monkeypatch, tolerance: float) -> None:
    draw = tool.tables.draw
    with_tolerance = lambda name, found, *rest: draw(name, dataclasses.replace(found, tolerance=tolerance), *rest)
    monkeypatch.setattr(tool.tables, "draw", with_tolerance)
    figure = drawn("convergence/3m/board.png")
    figure.canvas.draw()
    assert not figure.axes[0].get_title()  # matplotlib would draw it over the legend
    legend = figure.axes[0].get_legend()
    if math.isinf(tolerance):
        assert legend is None
    else:
        assert [text.get_text() for text in legend.get_texts()] == ["asked: 1%"]
        title = next(text for text in figure.findobj(Text) if text.get_text() == figure.get_suptitle())
        assert legend.get_window_extent().y1 <= title.get_window_extent().y0


def test_errors_of_recipes_are_of_every_row_of_the_book() -> None:
    rows = csv.DictReader((ROOT / "docs" / "images" / "recipe_errors.csv").read_text().splitlines())
    assert list(dict.fromkeys(row["recipe"] for row in rows)) == list(zoo.ZOO)


def test_the_page_about_nvfp4_shows_every_picture_that_is_drawn_for_it(lesson) -> None:
    page = (ROOT / "docs" / "nvfp4.md").read_text()
    drawn = {f"nvfp4-{name}.png" for name in lesson.PICTURES}
    assert set(re.findall(r"\(images/(nvfp4-\w+\.png)\)", page)) == drawn
    assert {path.name for path in (ROOT / "docs" / "images").glob("nvfp4-*.png")} == drawn


def test_pictures_about_nvfp4_show_what_the_page_says(lesson) -> None:
    assert len(lesson.grid_values()) == 15
    one_scale, own_scales = (int(axes.get_title().split(": ")[1].split()[0]) for axes in lesson.blocks().axes)
    assert one_scale > 120 and own_scales < 40
    without, with_outer = (line.get_ydata() for line in lesson.outer().axes[0].lines)
    assert max(with_outer) < 10 and without[0] == 100
    thin, tiles = (axes.get_title() for axes in lesson.tiles().axes[:2])
    assert tiles == "16x16 blocks: 0% of the weights differ" and " 0%" not in thin
    assert all(lesson.lost(size, rotated=True) < lesson.lost(size, rotated=False) / 2 for size in (1, 8, 64))
    exact, stochastic, nearest = (line.get_ydata()[-1] for line in lesson.rounding().axes[1].lines)
    assert nearest == 0 and abs(stochastic - exact) < 0.1 * exact
    errors = {label.get_text(): bar.get_width() for label, bar in zip(*_bars(lesson.formats()), strict=True)}
    assert errors["NVFP4, 4/6"] < errors["NVFP4: blocks of 16, E4M3 scales"] < min(list(errors.values())[:2])
    for name in ("values", "products", "hadamard"):
        assert lesson.PICTURES[name]().axes
    plt.close("all")


def _bars(figure):
    axes = figure.axes[0]
    return axes.get_yticklabels(), axes.containers[0]
