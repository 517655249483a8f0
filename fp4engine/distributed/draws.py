"""Random bits that do not depend on which process holds a layer."""

from collections import Counter

from torch import nn

from fp4engine.arguments import require_integer, require_model
from fp4engine.modules import GroupedLinear
from fp4engine.modules.gemms import require_layers
from fp4engine.ops.rng import MOST_RANK


def draw_by_layer(model: nn.Module, replica: int, *, prefix: str = "", first_expert: int = 0) -> tuple[str, ...]:
    """Give every layer of ``model`` a random stream of its own, by its name instead of by process and order of calls.

    The k-th forward of a layer, and its k-th backward, then draw the same bits whatever else the process runs between
    them: in a stage of any pipeline under any schedule, in an expert on any rank, and in one process that holds the
    whole model. The seed is the process's; :func:`fp4engine.get_rng_state` counts the draws by name.

    Args:
        model: converted, or of fp4engine's layers; a part of a model too. The names are those that
            :func:`fp4engine.convert` gave, or the layers' ``name=``.
        replica: which copy of these weights this is: the rank along the data-parallel dimension of the mesh, or 0 in
            one process. Copies draw different bits; ranks that share tensors must give the same number.
        prefix: put before the names, for parts of a model that were converted one by one.
        first_expert: the index, in the whole model, of the first expert of each ``GroupedLinear`` here.

    Returns:
        The names by which layers draw.

    Raises:
        ValueError: ``replica`` is not an integer from 0 to 2^24 - 1, or ``first_expert`` none of at least 0; the model
            has no layer of fp4engine's; a layer has no name; or two layers have the same.
    """
    require_model(model)
    if not isinstance(prefix, str):
        raise ValueError(f"prefix must be a string, got {prefix!r}")
    replica = require_integer("replica", replica, 0, MOST_RANK)
    first_expert = require_integer("first_expert", first_expert, 0)
    index = {
        id(gemms): f".{first_expert + i}"
        for module in model.modules()
        if isinstance(module, GroupedLinear)
        for i, gemms in enumerate(module.gemms)
    }
    layers = require_layers(model)
    nameless = [path or type(module).__name__ for path, module in layers.items() if not module.name]
    if nameless:
        raise ValueError(f"{', '.join(nameless)} has no name; fp4engine.convert gives names, and so does name=")
    names = [prefix + module.name + index.get(id(module), "") for module in layers.values()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"several layers have the name {', '.join(twice)}, and would draw the same bits")
    for module, name in zip(layers.values(), names, strict=True):
        module.draws_as = name, replica
    return tuple(names)
