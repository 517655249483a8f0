"""The global state manager: what a script asks, and what it sets."""

import threading

import pytest
import torch

import fp4engine
from fp4engine import state
from fp4engine.te.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fp4engine.te.pytorch import Linear, autocast, fp8_autocast, quantized_model_init
from fp4engine.te.pytorch.quantization import FP8GlobalStateManager as Manager

OUTSIDE = (False, False, None, None, False, False)


@pytest.fixture(autouse=True)
def _reset():
    Manager.reset()
    yield
    Manager.reset()


def executed(layer, x) -> set[str]:
    layer.executed.counts.clear()
    layer(x)
    return {formats for _, formats in layer.executed.counts}


def test_what_is_read_is_what_is_in_force() -> None:
    recipe, qstate = MXFP8BlockScaling(), Manager.quantization_state
    assert Manager.get_autocast_state() == OUTSIDE and Manager.AUTOCAST_DEPTH == 0
    with autocast(recipe=recipe):
        assert Manager.get_autocast_state() == (True, False, recipe, None, True, False)
        assert (
            qstate.fp8_enabled and qstate.fp8_recipe is recipe and Manager.FP8_RECIPE is recipe and Manager.FP8_ENABLED
        )
        assert Manager.is_first_fp8_module() and not Manager.is_first_fp8_module()
        with autocast(enabled=False):
            assert not Manager.FP8_ENABLED and Manager.AUTOCAST_DEPTH == qstate.autocast_depth == 2
            assert not Manager.is_first_fp8_module()
        key = Manager.get_unique_autocast_key(recipe, None)
        assert qstate.autocast_arguments[key] == (recipe, None) == Manager.fp8_autocast_arguments[key]
    assert Manager.get_autocast_state() == OUTSIDE
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert qstate.fp8_parameters and Manager.HIGH_PRECISION_INIT_VAL
        assert Manager.with_fp8_parameters() and Manager.with_high_precision_init_val()
    assert not Manager.with_fp8_parameters()
    with pytest.raises(AttributeError, match="no attribute 'NONSENSE'"):
        _ = Manager.NONSENSE


@pytest.mark.parametrize("name", ["is_fp8_calibration", "get_fp8_group"])
def test_a_compiled_question_is_not_compiled_anew_for_each_recipe(name) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    ask = torch.compile(lambda x: x + 1 if getattr(Manager, name)() else x - 1, backend=backend, fullgraph=True)
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()):
        with autocast(recipe=recipe), autocast(enabled=False, recipe=recipe):
            assert ask(torch.zeros(())) == -1
    assert len(graphs) == 1


def test_a_region_by_hand_is_one_by_with() -> None:
    x, layer = torch.randn(16, 32), Linear(32, 32)
    saved = Manager.get_autocast_state()
    Manager.autocast_enter(enabled=True, fp8_recipe=NVFP4BlockScaling())
    assert executed(layer, x) == {"e2m1 x e2m1"}
    Manager.set_autocast_state(saved)
    assert Manager.get_autocast_state()[:4] == OUTSIDE[:4] and executed(layer, x) == {"high_precision"}
    Manager.autocast_exit(True, _graph=False)
    assert Manager.AUTOCAST_DEPTH == 0 and Manager.get_autocast_state()[:4] == OUTSIDE[:4]
    Manager.fp8_autocast_enter(True, fp8_recipe=NVFP4BlockScaling(), _graph=True)
    assert Manager.fp8_graph_capturing() and Manager.get_fp8_autocast_state()[-1]
    Manager.fp8_autocast_exit(True, True)
    with fp8_autocast(True, fp8_recipe=NVFP4BlockScaling(), _graph=True):
        assert Manager.fp8_graph_capturing()
    with pytest.raises(RuntimeError, match="none is open here"):
        Manager.autocast_exit(True, False)
    autocast().__enter__()
    Manager.reset()
    assert not Manager.is_fp8_enabled()


def test_what_is_set_holds_until_the_region_is_left() -> None:
    x, layer, nvfp4 = torch.randn(16, 32), Linear(32, 32), NVFP4BlockScaling()
    with autocast(recipe=Float8CurrentScaling()):
        before = state.current_state()
        snapshot = Manager.get_autocast_state()
        Manager.quantization_state.fp8_recipe = nvfp4
        assert Manager.get_fp8_recipe() is nvfp4 and executed(layer, x) == {"e2m1 x e2m1"}
        assert (
            before.recipe == Float8CurrentScaling().frozen and state.current_state() is not before
        )  # values stay frozen
        with autocast(enabled=False):
            Manager.FP8_ENABLED = True
            assert Manager.is_fp8_enabled()
        assert Manager.get_fp8_recipe() is nvfp4
        Manager.set_autocast_state(snapshot)
        assert executed(layer, x) == {"e4m3 x e4m3"}
        Manager.quantization_state.fp8_enabled = False
        assert executed(layer, x) == {"high_precision"} and isinstance(Manager.get_fp8_recipe(), Float8CurrentScaling)
    assert state.current_state() is None and Manager.AUTOCAST_DEPTH == 0


def test_what_is_set_outside_all_regions_holds_until_it_is_set_again() -> None:
    x, layer = torch.randn(16, 32), Linear(32, 32)
    Manager.set_autocast_state((True, False, NVFP4BlockScaling(), None, False, False))
    assert executed(layer, x) == {"e2m1 x e2m1"}
    with autocast(enabled=False):
        assert executed(layer, x) == {"high_precision"}
    told = []
    thread = threading.Thread(target=lambda: told.append(Manager.get_autocast_state()))
    thread.start()
    thread.join()
    assert told == [OUTSIDE] and executed(layer, x) == {"e2m1 x e2m1"}
    Manager.set_autocast_state(OUTSIDE)
    assert state.current_state() is None and executed(layer, x) == {"high_precision"}
    with fp4engine.autocast():
        assert Manager.AUTOCAST_DEPTH == 1 and Manager.is_fp8_enabled()


def test_delayed_scaling_goes_on_in_regions_by_hand() -> None:
    def steps(enter, leave) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x, outputs = Linear(32, 32), torch.randn(16, 32), []
        for step in range(3):
            enter()
            output = layer(x * 2.0**step)
            leave()
            output.sum().backward()
            outputs.append(output.detach())
        return outputs

    recipe, region = DelayedScaling(), []

    def leave_with() -> None:
        region.pop().__exit__(None, None, None)

    by_with = steps(lambda: region.append(autocast(recipe=recipe).__enter__()), leave_with)
    by_hand = steps(lambda: Manager.autocast_enter(True, fp8_recipe=recipe), lambda: Manager.autocast_exit(True, False))
    for ours, expected in zip(by_hand, by_with, strict=True):
        assert torch.equal(ours, expected)


def test_a_step_of_buffers_ends_as_it_is_told() -> None:
    layer = Linear(32, 32)
    recipe = DelayedScaling(amax_history_len=4)
    with autocast(recipe=recipe):
        layer(torch.randn(16, 32)).sum().backward()
    meta = layer.fp8_meta
    Manager.add_fp8_tensors_to_global_buffer(meta)
    Manager.add_fp8_tensors_to_global_buffer(meta)  # once
    made = meta["scaling_fwd"]
    made.amax_history.zero_()
    made.amax_history[0].fill_(7.0)
    backward = meta["scaling_bwd"].amax_history.clone()
    Manager.reduce_and_update_fp8_tensors(forward=True)
    assert torch.equal(made.scale, torch.full_like(made.scale, 448.0) / 7.0)
    assert made.amax_history[0].eq(0).all() and made.amax_history[-1].eq(7.0).all()
    assert torch.equal(meta["scaling_bwd"].amax_history, backward)
    Manager.copy_forward_fp8_meta_tensors_for_recompute(meta)
    made.scale.fill_(3.0)
    Manager.get_old_fp8_meta_tensors_for_recompute(meta)
    assert made.scale[0] == 64.0
    Manager.restore_fp8_meta_tensors(meta)
    assert made.scale[0] == 3.0
    with pytest.raises(NotImplementedError, match="is_first_microbatch=False"):
        Manager.set_skip_fp8_weight_update_tensor(True)
    Manager.reset()
    assert not Manager.quantization_state.global_amax_buffer
