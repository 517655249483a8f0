"""Put this room in place under TransformerEngine's own name, for one process."""

import importlib
import importlib.util
import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "transformer_engine"
EXTENSION = "transformer_engine_torch"
HERE = "fp4engine.te"

PLACES = {
    "pytorch.common": "common",
    "pytorch.common.recipe": "common.recipe",
    "pytorch.module.layernorm": "pytorch.norm",
    "pytorch.module.rmsnorm": "pytorch.norm",
    "pytorch.module.fp8_padding": "pytorch.padding",
    "pytorch.module.fp8_unpadding": "pytorch.padding",
    "pytorch.module.base": "pytorch.base",
    "pytorch.attention.rope": "pytorch.rope",
    "pytorch.attention.inference": "pytorch.inference",
    "pytorch.attention.multi_head_attention": "pytorch.attention",
    "pytorch.attention.dot_product_attention": "pytorch.dot_product_attention",
    "pytorch.attention.dot_product_attention.dot_product_attention": "pytorch.dot_product_attention",
    "pytorch.attention.dot_product_attention.utils": "pytorch.dot_product_attention",
    "pytorch.cpp_extensions.gemm": "pytorch.cpp_extensions",
    "pytorch.optimizers.multi_tensor_apply": "pytorch.multi_tensor",
    "pytorch.ops.basic.l2normalization": "pytorch.attention",
    "pytorch.fp8": "pytorch.quantization",
    "pytorch.float8_tensor": "pytorch.tensor",
    "pytorch.tensor.quantized_tensor": "pytorch.quantized_tensor",
    "pytorch.tensor.utils": "pytorch.tensor.master_weights",
    "pytorch.tensor.storage": "pytorch.tensor",
    **{
        f"pytorch.tensor.storage.{kind}_tensor_storage": "pytorch.tensor"
        for kind in ("float8", "float8_blockwise", "mxfp8", "nvfp4", "hybrid", "identity")
    },
    **{
        f"pytorch.module.{kind}": "pytorch.module"
        for kind in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
    },
}
"""TransformerEngine's module -> the one here that has its names, where the two are called otherwise."""


class _Alias(MetaPathFinder, Loader):
    """Finds ``transformer_engine.x`` with the names of ``fp4engine.te.x``, and ``transformer_engine_torch``."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        head, _, rest = fullname.partition(".")
        if head not in (NAME, EXTENSION):
            return None
        place = PLACES.get(rest, rest) if head == NAME else f"extension.{rest}"
        ours = f"{HERE}.{place}".rstrip(".")
        try:
            importlib.import_module(ours)
        except ModuleNotFoundError as error:
            if error.name is not None and ours.startswith(error.name):
                # Without a name, since ``from x import y`` swallows the one that names ``x.y``, and says less.
                raise ModuleNotFoundError(_what_is_missing(fullname)) from None
            raise
        return ModuleSpec(fullname, self, origin=ours, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give ``module`` the names of the one that it stands for, those that come later too."""
        assert module.__spec__ is not None and module.__spec__.origin is not None
        ours = importlib.import_module(module.__spec__.origin)
        own = {name: value for name, value in vars(module).items() if name.startswith("__")}
        names = {name: value for name, value in vars(ours).items() if not isinstance(value, ModuleType)}
        vars(module).update(names | own, __getattr__=partial(_late, module.__name__))


def _late(stands_for: str, name: str) -> Any:
    """A submodule of TransformerEngine's that nobody has imported yet."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"{stands_for}.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from None


def _what_is_missing(fullname: str) -> str:
    """What to say of a name or a module that is not here: why, or what to use, where ``ABSENT`` beside it says so."""
    parent, _, name = fullname.rpartition(".")
    ours = sys.modules.get(parent)
    spec = None if ours is None else ours.__spec__
    absent: dict[str, str] = {}
    if spec is not None and spec.origin is not None:
        absent = vars(importlib.import_module(spec.origin)).get("ABSENT", {})
    why = f", since {absent[name]}" if name in absent else ""
    return (
        f"{parent} has no {name!r} here{why}: fp4engine stands in for TransformerEngine in this process "
        "(docs/coming-from-te.md lists what there is)"
    )


def install_as_transformer_engine() -> None:
    """Let ``import transformer_engine`` find fp4engine in this process, and say so in one line on stderr.

    Called again it does nothing.

    Raises:
        RuntimeError: TransformerEngine itself is installed, or imported already.
    """
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        raise RuntimeError(
            f"{NAME} is installed; fp4engine does not stand in for it. Change the script's imports to "
            "fp4engine.te.pytorch, or run it in an environment without TransformerEngine"
        )
    sys.meta_path.append(_Alias())
    print("fp4engine stands in for transformer_engine in this process", file=sys.stderr)
