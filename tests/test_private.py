"""Layers run, eagerly and compiled, where PyTorch lacks any of the private names that the package uses."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[1] / "fp4engine"
RUN = """
import json, os, sys, tempfile, traceback
import torch
import torch.distributed.tensor, torch.utils.checkpoint
from torch.distributed import distributed_c10d

with torch.no_grad():  # PyTorch refuses a backward pass in a fork of a process that had one
    torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.zeros(2, 2))  # what this imports is imported once
assert not any(module.partition(".")[0] == "fp4engine" for module in sys.modules)

def run(owner, name):
    kept = getattr(owner, name)
    delattr(owner, name)
    import fp4engine.private
    setattr(owner, name, kept)  # PyTorch needs it too

    import fp4engine
    from fp4engine import ops
    from fp4engine.recipe import zoo

    layer, x = fp4engine.Linear(32, 16), torch.randn(8, 32, requires_grad=True)

    def step(layer, recipe):
        fp4engine.manual_seed(0)
        x.grad = layer.weight.grad = None
        with fp4engine.autocast(recipe=zoo.make(recipe)):
            y = fp4engine.checkpoint(layer, x) if layer is plain else layer(x)
        y.sum().backward()
        return y, x.grad, layer.weight.grad

    plain, compiled = layer, torch.compile(layer, backend="aot_eager", fullgraph=True)
    for recipe in ("fp8_current",) if name == "_scaled_mm" else ("nvfp4",):
        for eager, traced in zip(step(plain, recipe), step(compiled, recipe), strict=True):
            assert torch.equal(eager, traced)
    assert ops.largest_magnitudes([torch.tensor([[-3.0, 2.0]])]).tolist() == [3.0]

told = {}
for owner, name in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as said:
        process = os.fork()
        if process == 0:
            os.dup2(said.fileno(), 2)
            try:
                run(eval(owner), name)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stderr.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said.seek(0)
        told[name] = code, said.read()
print(json.dumps(told))
"""
NAMES = [
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_will_engine_execute_node"),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
    ("torch._C", "_disabled_torch_function_impl"),
    ("torch", "_scaled_mm"),
    ("torch", "_foreach_norm"),
]


@pytest.fixture(scope="module")
def told():
    """Exit code and errors of a process without each of the names, forked so that PyTorch is imported once."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(NAMES)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [name for _, name in NAMES])
def test_layers_run_without(told, name):
    code, said = told[name]
    assert code == 0, said[-3000:]
    assert ("not recognised" in said) == (name == "_current_graph_task_id")


def test_process_groups_are_found_by_their_names(monkeypatch):
    from torch.distributed import distributed_c10d

    from fp4engine import ops

    class Group:
        group_name = "some"

    groups = (Group(),)
    monkeypatch.delattr(distributed_c10d, "_resolve_process_group")
    with pytest.raises(NotImplementedError, match="which process group is called 'some'"):
        ops.groups_named("some")
    assert ops.groups_named(ops.names_of(groups)) == groups


def test_a_distributed_tensor_keeps_its_part_where_it_is_looked_for():
    from fp4engine import private

    with pytest.raises(NotImplementedError, match="under another name"):
        private.local_tensor(object())


def test_classes_are_left_alone_where_operators_take_no_values(monkeypatch):
    from torch._library import opaque_object

    from fp4engine import private

    for name in ("register_custom_class", "register_opaque_type"):
        monkeypatch.delattr(opaque_object, name, raising=False)
    kind = type("Kind", (private.Value,), {})
    private.register_value(kind)
    assert not opaque_object.is_opaque_value_type(kind)


def test_a_stream_is_found_by_its_public_name_where_pytorch_has_no_other(monkeypatch):
    from fp4engine import private

    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=40 + index))
    again = importlib.util.module_from_spec(private.__spec__)
    private.__spec__.loader.exec_module(again)
    assert again.current_stream(2) == 42


def test_values_need_no_base_class_where_pytorch_has_none(monkeypatch):
    from fp4engine import private

    monkeypatch.delitem(sys.modules, "torch._opaque_base", raising=False)
    again = importlib.util.module_from_spec(private.__spec__)
    private.__spec__.loader.exec_module(again)
    assert again.Value is object


DOCUMENTED = ("torch._foreach_", "torch._subclasses.fake_tensor", "torch.__version__", "triton.__version__")
PRIVATE = ("torch._", "triton.runtime", "triton.compiler", "triton._")


def test_no_other_file_uses_private_names_of_pytorch_or_triton():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            name = node.module or "" if isinstance(node, ast.ImportFrom) else name
            if name.startswith(PRIVATE) and not name.startswith(DOCUMENTED):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")
    assert not found
