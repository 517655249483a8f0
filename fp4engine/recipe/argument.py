"""One way to name a recipe in words: a row of the recipe book, a JSON file, or a function of one's own."""

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fp4engine.arguments import shown
from fp4engine.recipe import zoo
from fp4engine.recipe.base import Recipe, recipe_from_json


def recipe_from_argument(argument: str) -> Recipe:
    """The recipe that ``argument`` names.

    Args:
        argument: a row of the recipe book (``"nvfp4"``), a file that holds what ``recipe.to_json()`` wrote
            (``"mine.json"``), or ``"module:function"``, a function without arguments that returns a recipe, or a recipe
            itself. The module is imported as ``import`` would from the working directory; ``"path/to/file.py:name"``
            will do too.

    Raises:
        ValueError: no string; there is no such row, file, module or name; the file holds no recipe; the function
            returns none.
    """
    if not isinstance(argument, str):
        raise ValueError(f"argument must be a string that names a recipe, got {shown(argument)}")
    if argument in zoo.ZOO:
        return zoo.make(argument)
    path = Path(argument)
    if path.suffix == ".json" or path.is_file():
        return _from_file(path)
    if ":" in argument:
        return _from_code(argument)
    near = get_close_matches(argument.lower(), zoo.ZOO, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"a recipe is a row of the book (`fp4engine recipes` lists them), a JSON file, or module:function, "
        f"got {argument!r}{meant}"
    )


def _from_file(path: Path) -> Recipe:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"the recipe file {str(path)!r} cannot be read: {why}") from error
    try:
        return recipe_from_json(text)
    except ValueError as error:
        raise ValueError(f"the file {str(path)!r} holds no recipe: {error}") from error


def _from_code(argument: str) -> Recipe:
    found = imported(argument)
    try:
        recipe = found() if callable(found) and not isinstance(found, Recipe) else found
    except Exception as error:  # whatever somebody's function raises
        raise ValueError(f"{argument}() fails: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{argument} must be a recipe or a function that returns one, got {shown(recipe)}")
    return recipe


def imported(argument: str) -> Any:
    """What ``"module:name"`` or ``"path/to/file.py:name"`` names; ``name`` may be dotted.

    Raises:
        ValueError: there is no such module, file or name, or importing it fails.
    """
    where, _, name = argument.rpartition(":")
    if not where or not name:
        raise ValueError(f"write module:function, got {argument!r}")
    try:
        found: Any = _module_of_file(Path(where)) if where.endswith(".py") else _module(where)
    except Exception as error:  # whatever somebody's module raises
        said = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{argument}: cannot import {where!r}: {said}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{argument}: {where} has no {name!r}")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    if (here := str(Path.cwd())) not in sys.path:  # a console script's first entry is its own folder
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may have been written since the process began
    return importlib.import_module(name)


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where pickles and dataclasses look it up
    if (folder := str(path.resolve().parent)) not in sys.path:  # where other processes find what they unpickle
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
