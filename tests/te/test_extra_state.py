"""``_extra_state``: what a file of a module's ``state_dict`` holds beside its parameters."""

import io
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fp4engine.integrations import TrainingState
from fp4engine.te.common import recipe as recipes
from fp4engine.te.pytorch import GroupedLinear, LayerNormMLP, Linear, TransformerLayer, autocast
from tests.ranks import process_group, spawn

MAKES = {
    "linear": (lambda: Linear(32, 32), ()),
    "mlp": (lambda: LayerNormMLP(32, 64), ()),
    "grouped": (lambda: GroupedLinear(2, 32, 32), ([8, 8],)),
    "layer": (lambda: TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0), ()),
}


def step(module, x, others, recipe):
    with autocast(recipe=recipe):
        y = module(x, *others)
    return [y, *torch.autograd.grad(y.square().mean(), list(module.parameters()))]


@pytest.mark.parametrize("name", MAKES)
def test_delayed_scaling_goes_on_from_a_file(name) -> None:
    make, others = MAKES[name]
    module, resumed, recipe = make(), make(), recipes.DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 1, 32) if name == "layer" else torch.randn(16, 32)
    for scale in (1.0, 8.0, 3.0):
        step(module, x * scale, others, recipe)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for scale in (2.0, 0.5):
        outputs = [step(one, x * scale, others, recipe) for one in (module, resumed)]
        assert all(map(torch.equal, *outputs))


def test_entries_are_where_transformer_engine_has_them() -> None:
    entries = {key for key in TransformerLayer(32, 64, 2).state_dict() if key.endswith("_extra_state")}
    attention = ("layernorm_qkv", "core_attention", "proj")
    assert entries == {*(f"self_attention.{part}._extra_state" for part in attention), "layernorm_mlp._extra_state"}


def test_other_recipes_have_nothing_to_keep() -> None:
    layer = Linear(32, 32)
    step(layer, torch.randn(16, 32), (), recipes.NVFP4BlockScaling())
    assert layer.state_dict()["_extra_state"].numel() == 0
    Linear(32, 32).load_state_dict(torch.nn.Linear(32, 32).state_dict(), strict=True)


@pytest.mark.parametrize(
    ("state", "warns"),
    [
        (torch.tensor(list(b"\x80\x04 recipe MXFP8BlockScaling"), dtype=torch.uint8), False),
        (torch.tensor(list(b"\x80\x04 amax_history_fwd"), dtype=torch.uint8), True),
        (io.BytesIO(b"\x80\x04"), True),
        (torch.empty(0, dtype=torch.uint8), False),
        (None, False),
    ],
    ids=["stateless", "delayed", "older", "empty", "none"],
)
def test_pickles_of_transformer_engine_are_not_read(state, warns, recwarn) -> None:
    layer = Linear(16, 16)
    layer.load_state_dict({"weight": torch.ones(16, 16), "bias": torch.ones(16), "_extra_state": state}, strict=True)
    assert layer.weight.sum() == 256 and not layer.amax_histories
    assert [str(warning.message).startswith("Linear: the checkpoint's _extra_state") for warning in recwarn] == (
        [True] if warns else []
    )


def test_what_remembers_nothing_makes_a_used_module_forget() -> None:
    """A module that is rolled back to a state before delayed scaling began; its outputs were zeros."""
    x, recipe = torch.randn(32, 32), recipes.DelayedScaling()
    layer = Linear(32, 32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for scale in (1e30, 1.0):
        with autocast(recipe=recipe):
            layer(x * scale).sum().backward()
    layer.load_state_dict(before)
    fresh = Linear(32, 32)
    fresh.load_state_dict(before)
    with torch.no_grad(), autocast(recipe=recipe):
        assert torch.equal(layer(x), fresh(x))


@pytest.mark.parametrize("data", [bytes(400), b'{"0:input": ', b'{"\xff": 1}'], ids=["zeros", "cut off", "no text"])
def test_damaged_bytes_are_refused(data) -> None:
    with pytest.raises(ValueError, match="_extra_state is neither JSON nor a pickle, it begins with b'"):
        Linear(32, 32).set_extra_state(torch.tensor(list(data), dtype=torch.uint8))


@pytest.mark.parametrize("state", [{}, 3, "history", b"{}"])
def test_what_is_no_tensor_of_bytes_is_refused(state) -> None:
    with pytest.raises(ValueError, match=re.escape(f"bytes in a tensor of torch.uint8, got {state!r}")):
        Linear(32, 32).set_extra_state(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_training_state_takes_the_place_of_extra_states_in_distributed_checkpoints(tmp_path) -> None:
    def parts(module):
        state = {name: value for name, value in module.state_dict().items() if not name.endswith("_extra_state")}
        return {"model": state, "fp4": TrainingState(module)}

    module, resumed, recipe = LayerNormMLP(32, 64), LayerNormMLP(32, 64), recipes.DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 32)
    for scale in (1.0, 7.0, 0.3):
        step(module, x * scale, (), recipe)
    dcp.save(parts(module), checkpoint_id=tmp_path)
    loaded = parts(resumed)
    dcp.load(loaded, checkpoint_id=tmp_path)
    resumed.load_state_dict(loaded["model"], strict=True)
    for got, want in zip(step(resumed, x, (), recipe), step(module, x, (), recipe), strict=True):
        assert torch.equal(got, want)


def load_what_one_rank_remembers(rank, folder):
    """Two ranks with histories of their own, whose JSON is equally long."""
    module, recipe = Linear(32, 32, bias=False), recipes.DelayedScaling(amax_history_len=2)
    with torch.no_grad():
        module.weight.fill_(1.0)
    with process_group(rank, 2, f"{folder}/store"):
        step(module, torch.full((16, 32), 1.5 + rank), (), recipe)
        before = bytes(module.get_extra_state().tolist())
        dcp.save(module.state_dict(), checkpoint_id=f"{folder}/saved")
        with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .* for _extra_state"):
            dcp.load(module.state_dict(), checkpoint_id=f"{folder}/saved")
        module.set_extra_state(torch.tensor(list(before), dtype=torch.uint8))
        assert bytes(module.get_extra_state().tolist()) == before
    assert module.amax_histories["input"].values.tolist() == [1.5 + rank, 0.0]


def test_distributed_checkpoints_give_no_rank_the_history_of_another(tmp_path) -> None:
    spawn(load_what_one_rank_remembers, (str(tmp_path),), 2)


def test_a_file_without_the_entry_loads_by_arguments_with_names() -> None:
    """As subclasses pass them on."""
    layer, missing = Linear(32, 32), []
    arguments = {"prefix": "", "local_metadata": {}, "strict": True, "missing_keys": missing}
    layer._load_from_state_dict({"weight": layer.weight}, **arguments, unexpected_keys=[], error_msgs=[])
    assert missing == ["bias"]
