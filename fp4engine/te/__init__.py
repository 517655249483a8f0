"""The room in which TransformerEngine's names, arguments and habits live; nothing else in the package knows them.

``fp4engine.te.pytorch`` stands for ``transformer_engine.pytorch`` and ``fp4engine.te.common.recipe`` for
``transformer_engine.common.recipe``. :func:`install_as_transformer_engine` puts them in place under those very names.
"""

from fp4engine.te.install import install_as_transformer_engine

__version__ = "2.20.0.dev0+fp4engine"
"""The version of the TransformerEngine whose names these are. fp4engine has a version of its own."""

ABSENT = {"debug": "fp4engine.inspect records what casts do to tensors", "jax": "fp4engine is about PyTorch"}
"""Packages of TransformerEngine's that are not here, and why."""

__all__ = ["install_as_transformer_engine"]
