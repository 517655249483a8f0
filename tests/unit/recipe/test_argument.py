"""A recipe has three kinds of names wherever one is asked for, and two recipes differ in fields that can be named."""

from itertools import combinations
from pathlib import Path

import pytest

from fp4engine.cli import main
from fp4engine.recipe import (
    LinearRecipe,
    Recipe,
    Rule,
    RuledRecipe,
    ScheduledRecipe,
    differences,
    recipe_from_argument,
    zoo,
)
from fp4engine.recipe.identity import ablations, as_casts, identity

NVFP4, MXFP4 = zoo.make("nvfp4"), zoo.make("mxfp4")
WITHOUT_BOTH = NVFP4.replace(disable_rht=True, disable_stochastic_rounding=True)

CODE = """
from fp4engine.recipe import zoo

RECIPE = zoo.make("mxfp4")

class Book:
    @staticmethod
    def mine():
        return zoo.make("mxfp4")

def nothing():
    return 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(CODE)
    (tmp_path / "mine.json").write_text(MXFP4.to_json())
    return tmp_path


@pytest.mark.parametrize("name", ["mxfp4", "mine.json", "of_mine:RECIPE", "of_mine:Book.mine", "of_mine.py:Book.mine"])
def test_a_recipe_is_a_row_a_file_or_a_function(name: str, folder: Path) -> None:
    assert recipe_from_argument(name) == MXFP4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nvfp5", "did you mean 'nvfp4'"),
        ("", "a recipe is a row of the book"),
        ("none.json", "'none.json' cannot be read: No such file"),
        ("of_mine.py", "'of_mine.py' holds no recipe: "),
        ("of_mine:nothing", "of_mine:nothing must be a recipe or a function that returns one, got 5"),
        ("of_mine:none", "of_mine has no 'none'"),
        ("no_module:f", "cannot import 'no_module'"),
        ("nowhere/code.py:f", "there is no file 'nowhere/code.py'"),
        (":f", "write module:function"),
    ],
)
def test_what_names_no_recipe_is_refused(name: str, said: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        recipe_from_argument(name)


@pytest.mark.parametrize(
    "command",
    [
        "recipes mine.json --json",
        "estimate --layers 1 --width 64 --heads 2 --ffn 128 --vocabulary 64 --recipe mine.json",
        "estimate --layers 1 --width 64 --heads 2 --ffn 128 --vocabulary 64 --recipe of_mine:RECIPE",
    ],
)
def test_commands_take_all_kinds_of_names(command: str, folder: Path, capsys) -> None:
    assert main(command.split()) == 0
    assert capsys.readouterr().out


def test_differences_are_fields_of_one_class_and_casts_of_two() -> None:
    assert differences(NVFP4, WITHOUT_BOTH) == {
        "disable_rht": (False, True),
        "disable_stochastic_rounding": (False, True),
    }
    assert differences(NVFP4, NVFP4.replace()) == {}
    found = differences(NVFP4, MXFP4)
    assert found["weight.rowwise.block"] == ((16, 16), (1, 32)) and "disable_rht" not in found
    summed = NVFP4.replace(accumulation="blackwell")
    assert differences(summed, as_casts(NVFP4))["accumulation"] == ("blackwell", "fp32")
    with pytest.raises(ValueError, match="no table of casts"):
        differences(zoo.make("fp8_delayed"), NVFP4)


def test_one_field_changes_at_a_time() -> None:
    assert ablations(NVFP4, WITHOUT_BOTH) == {
        "disable_rht": NVFP4.replace(disable_rht=True),
        "disable_stochastic_rounding": NVFP4.replace(disable_stochastic_rounding=True),
    }
    changed = {"accumulation": "blackwell", "disable_rht": True}
    assert ablations(NVFP4, NVFP4.replace(**changed)).keys() == changed.keys()
    by_product = ablations(NVFP4, MXFP4)
    assert list(by_product) == ["fprop", "dgrad", "wgrad"]
    dgrad = by_product["dgrad"]
    assert dgrad.casts("grad_output").rowwise == MXFP4.casts("grad_output").rowwise
    assert dgrad.casts("grad_output").columnwise == NVFP4.casts("grad_output").columnwise
    with pytest.raises(ValueError, match="there is nothing to change"):
        ablations(NVFP4, NVFP4)


def test_every_row_has_an_identity_of_its_own_that_defaults_leave_out(monkeypatch) -> None:
    rows = [(zoo.make(name), identity(zoo.make(name))) for name in zoo.ZOO]
    assert all((first == second) == (one == other) for (first, one), (second, other) in combinations(rows, 2))
    assert identity(NVFP4) == {"recipe": "NVFP4BlockScaling"}
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")  # a flag makes another recipe, and no other default
    assert identity(zoo.make("nvfp4")) == identity(NVFP4.replace(disable_rht=True))


def test_two_recipes_are_held_against_each_other_on_the_command_line(folder: Path, capsys) -> None:
    (folder / "other.json").write_text(WITHOUT_BOTH.to_json())
    assert main(["recipes", "nvfp4", "other.json"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["field", "nvfp4", "other.json"]
    assert rows == [["disable_rht", "False", "True"], ["disable_stochastic_rounding", "False", "True"]]
    assert main(["recipes", "mxfp4", "mine.json"]) == 0
    assert "mxfp4 and mine.json are the same recipe" in capsys.readouterr().out


def shown(capsys, *words: str) -> list[str]:
    assert main(["recipes", *words]) == 0
    text = capsys.readouterr().out
    return text[text.index("on sm_") :].splitlines()


@pytest.mark.parametrize(
    ("name", "capability", "product"),
    [
        ("nvfp4", "90", "a kernel on BF16 or FP16 tensor cores"),
        ("nvfp4", "10.0", "FP4 tensor cores"),
        ("nvfp4", "75", "the reference: sm_75 has no BF16 arithmetic; the kernels need Ampere (sm_80) or newer"),
        ("fp8_current", "90", "FP8 tensor cores"),
        ("fp8_current", "80", "a kernel on BF16 or FP16 tensor cores"),
        ("high_precision", "90", "PyTorch"),
    ],
)
def test_kernels_are_told_of_a_gpu_that_is_not_here(name: str, capability: str, product: str, capsys) -> None:
    pytest.importorskip("triton")
    lines = shown(capsys, name, "--kernels", capability)
    assert next(line for line in lines if "product" in line).endswith(product)
    assert sum("product" in line for line in lines) == 3 and len(lines) == 2 + 9


def test_kernels_of_a_recipe_of_recipes_are_those_of_its_parts(folder: Path, capsys) -> None:
    pytest.importorskip("triton")
    parts: dict[str, Recipe] = {
        "ruled": RuledRecipe(NVFP4, (Rule(MXFP4, "*.up"),)),
        "scheduled": ScheduledRecipe(((0, NVFP4), (10, LinearRecipe()))),
    }
    for name, recipe in parts.items():
        (folder / f"{name}.json").write_text(recipe.to_json())
        lines = shown(capsys, f"{name}.json", "--kernels", "90")
        assert sum("product" in line for line in lines) == 6
    assert any(line.startswith("from step 10 on") for line in lines)


@pytest.mark.parametrize("words", [["nvfp4", "--kernels", "x"], ["--kernels", "90"], ["nvfp4", "mxfp4", "mxfp8"]])
def test_recipes_refuses_in_one_line(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["recipes", *words])
    assert capsys.readouterr().err.count("\n") == 1
