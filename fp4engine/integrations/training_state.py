"""What a bit-exact resume needs beside the model's and the optimizer's ``state_dict``."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp4engine.arguments import require_model, shown
from fp4engine.modules import get_amax_history, set_amax_history
from fp4engine.ops.rng import device_and_name
from fp4engine.state import get_rng_state, set_rng_state


class TrainingState:
    """The random stream, and what delayed and held scaling remember of ``model``, of every rank.

    Has the two methods that libraries ask for: hand it to Accelerate's ``register_for_checkpointing``, give it to
    ``torch.distributed.checkpoint`` among what is saved and loaded, or save :meth:`state_dict` yourself.

    Args:
        model: whose histories are meant; on a rank that holds a part of a model, that part.
        process_group: whose ranks are saved and found again; None means all of ``torch.distributed``'s.

    Raises:
        ValueError: ``model`` is no module, or ``process_group`` no process group.
    """

    def __init__(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        require_model(model)
        if process_group is not None and not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
            raise ValueError(
                f"process_group must be a process group of torch.distributed or None, got {shown(process_group)}"
            )
        self.model = model
        self.process_group = process_group

    def state_dict(self) -> dict[str, Any]:
        """``{"ranks": ({"rng": ..., "amax_history": ...}, ...)}``, plain values for JSON or ``torch.save``.

        With more than one rank they exchange their states, so all of them have to call this together, and each returns
        the same: it does not matter which one writes the file.
        """
        own = {"rng": _by_kind(get_rng_state()), "amax_history": get_amax_history(self.model)}
        _, size = self._rank_and_size()
        ranks: list[Any] = [own] * size
        if size > 1:
            dist.all_gather_object(ranks, own, self.process_group)
        return {"ranks": tuple(ranks)}  # torch.distributed.checkpoint keeps a tuple whole, whatever it holds by then

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned: every rank from its own state.

        If another number of ranks saved it, a warning says so: every rank then continues after the latest draw of all,
        so that no random bit comes twice, and with the largest amaxes of all.

        Raises:
            ValueError: ``state_dict`` has another form, or its amaxes do not fit the model; nothing is changed then.
        """
        ranks = state_dict.get("ranks") if isinstance(state_dict, dict) else None
        if not isinstance(ranks, Sequence) or not ranks or not all(_is_of_a_rank(state) for state in ranks):
            raise ValueError(
                "state_dict must be what TrainingState.state_dict returned, "
                f"{{'ranks': ({{'rng': ..., 'amax_history': ...}}, ...)}}, got {shown(state_dict)}"
            )
        rank, size = self._rank_and_size()
        state = ranks[rank % len(ranks)]
        if len(ranks) != size:
            warnings.warn(
                f"the training state was saved by {len(ranks)} ranks and is loaded by {size}: rank {rank} continues "
                f"with the seed of rank {rank % len(ranks)}, after the latest draw of all, and with the largest amaxes "
                "of all; this is not bit for bit the run that was saved",
                stacklevel=2,
            )
            state = _merged(ranks, state["rng"]["seed"])
        before = get_rng_state()
        set_rng_state(state["rng"])
        try:
            set_amax_history(self.model, state["amax_history"])
        except ValueError:
            set_rng_state(before)
            raise

    def _rank_and_size(self) -> tuple[int, int]:
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        rank = dist.get_rank(self.process_group)
        if rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not part of the process_group of this TrainingState")
        return rank, dist.get_world_size(self.process_group)


def _is_of_a_rank(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and isinstance(state.get("rng"), dict)
        and isinstance(state["rng"].get("seed"), int)
        and isinstance(state["rng"].get("draws"), dict)
        and all(isinstance(draw, int) for draw in state["rng"]["draws"].values())
        and isinstance(state.get("amax_history"), dict)
        and all(isinstance(history, dict) for history in state["amax_history"].values())
    )


def _by_kind(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the one device of a kind named by its kind: a rank may find itself on another one."""
    keys = [device_and_name(key) for key in state["draws"]]
    kinds = [torch.device(device).type + name for device, name in keys]
    draws = {
        kind if kinds.count(kind) == 1 else key: draw
        for kind, (key, draw) in zip(kinds, state["draws"].items(), strict=True)
    }
    return {**state, "draws": draws}


def _merged(ranks: Sequence[Any], seed: int) -> dict[str, Any]:
    """One state for every rank, that is past each of ``ranks``."""
    draws: dict[str, int] = {}
    histories: dict[str, list[dict[str, Any]]] = {}
    for state in ranks:
        for device, draw in state["rng"]["draws"].items():
            draws[device] = max(draw, draws.get(device, 0))
        for key, history in state["amax_history"].items():
            histories.setdefault(key, []).append(history)
    follows = {key: True for state in ranks for key in state["rng"] if key == "follows_torch"}
    return {
        "rng": {"seed": seed, "draws": draws, **follows},
        "amax_history": {key: _largest(key, several) for key, several in histories.items()},
    }


def _largest(key: str, histories: list[dict[str, Any]]) -> dict[str, Any]:
    """The amaxes that a reduction over these ranks would have found; NaN where one has NaN."""
    if len(kinds := {frozenset(history) for history in histories}) > 1:
        forms = " and as ".join(sorted(str(sorted(kind)) for kind in kinds))
        raise ValueError(f"the ranks that saved the training state remember {key} as {forms}: by several recipes")
    if "left" in histories[0]:
        return {"amax": max(h["amax"] for h in histories), "left": min(h["left"] for h in histories)}
    lengths = {len(history["values"]) for history in histories}
    if len(lengths) > 1:
        raise ValueError(f"the ranks that saved the training state remember {sorted(lengths)} steps of {key}")
    values = torch.tensor(
        [[history["amax"], *history["values"]] for history in histories], dtype=torch.float64, device="cpu"
    )
    amax, *largest = values.amax(0).tolist()
    return {"values": largest, "amax": amax, "open": any(history["open"] for history in histories)}
