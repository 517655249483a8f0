"""Weights that are stored as codes, through save_pretrained / from_pretrained, adapters on top, and DCP."""

import copy
import json
import re
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fp4engine
from fp4engine import qat
from fp4engine.export import SHARED_SCALES, ServedCheckpoint, TensorFolder, export_checkpoint
from fp4engine.recipe import NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests.tiny import CONFIGURATIONS, MORE_CONFIGURATIONS, architecture, head, llama, tokens, transformers

import fp4engine.integrations.transformers  # isort: skip (after the skip)

RECIPE = NVFP4BlockScaling()
ONE_DIMENSIONAL = NVFP4BlockScaling(disable_2d_quantization=True)
LAYER = "model.layers.1.mlp.up_proj"


def stored(recipe=RECIPE, seed=0, **changes):
    torch.manual_seed(seed)
    model = llama(**changes).eval()
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    fp4engine.quantize_weights(model)
    return model


def converted(name, recipe):
    torch.manual_seed(0)
    model = architecture(name)
    fp4engine.convert(model, recipe, keep_high_precision=head(model))
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


def assert_same(left, right) -> None:
    assert torch.equal(logits(left), logits(right))
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert type(one) is type(other) and one.requires_grad == other.requires_grad, name
        if isinstance(one, fp4engine.QuantizedWeight):
            assert other.is_frozen and one.description() == other.description()
            for mine, its in zip(one.tensors(), other.tensors(), strict=True):
                assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        zoo.make("nvfp4_1d_weight"),  # stored for both directions
        RuledRecipe(RECIPE, (Rule(zoo.make("nvfp4_weight_only"), "model.layers.0.mlp"),)),
    ],
)
def test_saved_and_loaded_by_transformers(tmp_path, recipe, dtype) -> None:
    model = llama(tie_word_embeddings=True)
    for parameter in model.parameters():  # .to(dtype) would round what rotates positions too
        parameter.data = parameter.data.to(dtype)
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    fp4engine.quantize_weights(model)
    model.save_pretrained(tmp_path, max_shard_size=8000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name in (LAYER, "model.layers.0.mlp.down_proj"):
        files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert f"{name}.weight_codes" in files and f"{name}.weight" not in files
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype and loaded.get_submodule(LAYER).recipe == recipe
    assert loaded.get_submodule(LAYER).weight.dtype == dtype
    assert_same(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(model, type(model).from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize("recipe", [RECIPE, ONE_DIMENSIONAL], ids=["16x16", "1x16"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_architecture_is_stored_saved_and_filled_from_files_with_the_same_logits(tmp_path, name, recipe) -> None:
    model = converted(name, recipe)
    expected, keys = logits(model), list(model.state_dict())
    model.save_pretrained(tmp_path / "plain")
    report = fp4engine.quantize_weights(model)
    assert report.left_alone == {} and list(model.state_dict()) == keys
    assert torch.equal(logits(model), expected)

    model.save_pretrained(tmp_path / "stored")
    loaded = type(model).from_pretrained(tmp_path / "stored", attn_implementation="eager")
    assert_same(model, loaded)

    with torch.device("meta"):
        empty = type(model)(type(model.config).from_pretrained(tmp_path / "plain"))
    empty.set_attn_implementation("eager")
    fp4engine.convert(empty, recipe, keep_high_precision=head(empty))
    fp4engine.quantize_weights(empty, weights=TensorFolder(tmp_path / "plain"))
    assert_same(model, empty)

    fp4engine.revert(model)
    assert not any(isinstance(parameter, fp4engine.QuantizedWeight) for parameter in model.parameters())
    assert {type(module).__module__.partition(".")[0] for module in model.modules()} <= {"torch", "transformers"}
    with torch.no_grad(), fp4engine.autocast(enabled=False):
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", [RECIPE, ONE_DIMENSIONAL], ids=["16x16", "1x16"])
@pytest.mark.parametrize(
    ("name", "module", "parameter"),
    [
        ("mixtral", "model.layers.1.mlp.experts", "gate_up_proj"),
        ("gpt_oss", "model.layers.1.mlp.experts", "down_proj"),
        ("gpt2", "transformer.h.1.attn.c_attn", "weight"),
    ],
)
def test_stacks_hold_each_matrix_as_the_recipe_multiplies_it(name, module, parameter, recipe) -> None:
    model = converted(name, recipe)
    values = model.get_submodule(module).get_parameter(parameter).detach().clone()
    fp4engine.quantize_weights(model)
    weight = model.get_submodule(module).get_parameter(parameter)
    assert weight.is_frozen and weight.shape == values.shape and weight.transposed == (name != "mixtral")
    sides = 1 if recipe is RECIPE else 2
    matrices = len(weight.matrices())
    assert weight.nbytes == sides * (values.numel() * 9 // 16 + 4 * matrices)  # 4.5 bits, and an amax each
    kind = "linear" if name == "gpt2" else "grouped_linear"
    experts = values if values.ndim == 3 else values[None]
    assert matrices == len(experts)
    for matrix, value in zip(weight.matrices(), experts, strict=True):
        value = value.T if weight.transposed else value
        quantizer = fp4engine.make_quantizer(recipe, fp4engine.QuantizerRole(kind, "weight", module, value.shape))
        for got, wanted in zip(
            (matrix.rowwise, matrix.columnwise),
            (quantizer.quantize(value).rowwise, quantizer.quantize(value).columnwise),
            strict=True,
        ):
            for mine, its in zip(got.tensors, wanted.tensors, strict=True):
                assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


def test_experts_are_filled_one_matrix_at_a_time(tmp_path) -> None:
    plain = architecture("mixtral")
    plain.save_pretrained(tmp_path)
    empty = copy.deepcopy(plain).to("meta")
    fp4engine.convert(empty, RECIPE, keep_high_precision=head(empty))
    alive = weakref.WeakSet()

    class Watched(TensorFolder):
        most = 0

        def __getitem__(self, name):
            value = super().__getitem__(name)
            if ".experts." in name:
                alive.add(value)
                self.most = max(self.most, len(alive))
            return value

    folder = Watched(tmp_path)
    fp4engine.quantize_weights(empty, weights=folder)
    assert 1 <= folder.most <= 3  # gate and up, and one that is not collected yet; there are 24
    with pytest.raises(ValueError, match=r"weights lacks '.*experts\.1\.w3\.weight'"):
        again = copy.deepcopy(plain).to("meta")
        fp4engine.convert(again, RECIPE, keep_high_precision=head(again))
        lacking = {
            n: value for n, value in folder.items() if not n.endswith("layers.0.block_sparse_moe.experts.1.w3.weight")
        }
        fp4engine.quantize_weights(again, weights=lacking)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_stored_experts_are_exported_with_the_bytes_of_plain_ones(tmp_path, form) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    for shared in ((), SHARED_SCALES):
        folders = []
        for stored in (False, True):
            model = converted("qwen3_moe", RECIPE)
            if stored:
                fp4engine.quantize_weights(model)
            folders.append(tmp_path / f"{stored}{len(shared)}")
            arguments = {"inputs": "high_precision", "shared_scales": shared, "verify": "files", "force": True}
            report = export_checkpoint(model, folders[-1], form, **arguments)
            assert bool(report.rescaled) == bool(shared)
        if not shared:  # with shared scales, decoded codes are cast again, and not the weights that they came from
            left, right = (ServedCheckpoint(folder).tensors for folder in folders)
            assert set(left) == set(right)
            assert all(torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)) for key in left)


def test_what_is_not_stored_is_said_with_its_reason() -> None:
    model = torch.nn.Sequential(
        torch.nn.MultiheadAttention(32, 2),
        fp4engine.GroupedLinear(2, 32, 32, device="cpu"),
        fp4engine.LayerNormMLP(32, 64, device="cpu"),
    )
    fp4engine.convert(model, RECIPE)
    report = fp4engine.quantize_weights(model)
    assert report.quantized == ("0.out_proj.weight",)
    assert {*report.left_alone} == {"0.in_proj_gemms", "1", "2.fc1", "2.fc2"}
    assert {*report.left_alone.values()} == {"only weights of nn.Linear, Conv1D and experts are stored as codes"}


def test_a_gradient_of_a_stack_is_refused() -> None:
    for name in ("mixtral", "gpt2"):
        model = converted(name, RECIPE)
        fp4engine.quantize_weights(model)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"frozen and have no gradient; call weight\.requires_grad_\(False\)"):
            model(tokens())
        with torch.no_grad():
            model(tokens())


def test_crafted_stacks_are_refused() -> None:
    model = converted("mixtral", RECIPE)
    fp4engine.quantize_weights(model)
    weight = model.model.layers[0].mlp.experts.down_proj
    rebuild, (*described, shape, dtype, is_parameter, requires_grad, tensors, transposed, frozen) = (
        weight.__reduce_ex__(2)
    )
    rest = (dtype, is_parameter, requires_grad, tensors, transposed, frozen)
    assert torch.equal(rebuild(*described, shape, *rest).codes, weight.codes)
    for wrong in ((10**12, *shape[1:]), (3, *shape[1:]), (0, *shape[1:]), (1, *shape), shape[1:]):
        with pytest.raises(ValueError, match=r"stored"):
            rebuild(*described, wrong, *rest)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_a_model_is_loaded_without_its_head_and_with_one(tmp_path, name) -> None:
    model = converted(name, RECIPE)
    fp4engine.quantize_weights(model)
    model.save_pretrained(tmp_path / "whole")
    body = transformers.AutoModel.from_pretrained(tmp_path / "whole", attn_implementation="eager").eval()
    body.save_pretrained(tmp_path / "body")
    again = type(model).from_pretrained(tmp_path / "body", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model.base_model(tokens()).last_hidden_state
        for loaded in (body, again.base_model):
            assert any(isinstance(parameter, fp4engine.QuantizedWeight) for parameter in loaded.parameters())
            assert torch.equal(loaded(tokens()).last_hidden_state, expected)


def test_of_a_model_with_a_head_the_head_alone_may_be_stored(tmp_path) -> None:
    """It was looked for below the model's body, as if the file held a body alone; and a body by itself asked for it."""
    model = transformers.BertForMaskedLM(MORE_CONFIGURATIONS["bert"]()).eval()
    fp4engine.convert(model, RECIPE, keep_high_precision=["bert", "cls.predictions.decoder"])
    fp4engine.quantize_weights(model)
    model.save_pretrained(tmp_path)
    assert_same(model, transformers.BertForMaskedLM.from_pretrained(tmp_path).eval())
    body, expected = transformers.BertModel.from_pretrained(tmp_path).eval(), model.bert(tokens()).last_hidden_state
    assert torch.equal(body(tokens()).last_hidden_state, expected)


def test_siblings_keep_the_amax_that_they_share(tmp_path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    model = llama()
    qat.prepare(model, keep_high_precision=["lm_head"])
    qat.finalize(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(model, loaded)
    assert not export_checkpoint(loaded, tmp_path / "served", inputs="high_precision", verify=True).rescaled


def test_decoded_or_exported_a_model_is_described_as_what_it_is(tmp_path) -> None:
    model = stored(zoo.make("nvfp4_weight_only"))
    export_checkpoint(model, tmp_path / "served", "modelopt")
    assert "quantization_config" not in json.loads((tmp_path / "served" / "config.json").read_text())
    assert ServedCheckpoint(tmp_path / "served").layers
    for undo in (fp4engine.dequantize_weights, fp4engine.revert):
        model = stored()
        undo(model)
        model.save_pretrained(tmp_path / undo.__name__)
        assert "quantization_config" not in json.loads((tmp_path / undo.__name__ / "config.json").read_text())
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / undo.__name__)
        assert torch.equal(plain.get_submodule(LAYER).weight, model.get_submodule(LAYER).weight)


@pytest.mark.filterwarnings("ignore")
def test_adapters_train_on_a_loaded_base_by_the_trainer_and_are_loaded_onto_it(tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra `integrations`")
    pytest.importorskip("accelerate", reason="needs the extra `integrations`")
    stored().save_pretrained(tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    codes = base.get_submodule(LAYER).weight.codes.clone()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    assert trainer.train().training_loss > 0
    assert torch.equal(base.get_submodule(LAYER).weight.codes, codes)
    model.save_pretrained(tmp_path / "adapter")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(again), logits(model))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")), logits(model))


def test_modules_with_recipes_of_their_own_are_refused(tmp_path) -> None:
    model = stored()
    model.get_submodule(LAYER).recipe = zoo.make("nvfp4_1d_weight")
    with pytest.raises(ValueError, match="follow 2 recipes, and its checkpoint holds one"):
        model.save_pretrained(tmp_path)


def test_a_model_with_experts_is_unpickled_where_nothing_was_converted(tmp_path) -> None:
    model = converted("mixtral", RECIPE)
    torch.save((model, tokens(), logits(model)), tmp_path / "model.pt")
    load = f"import torch; model, ids, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    check = "with torch.no_grad(): assert torch.equal(model(ids).logits, expected)"
    subprocess.run([sys.executable, "-c", f"{load}\n{check}"], check=True)


class TestHostile:
    @pytest.fixture
    def folder(self, tmp_path):
        stored().save_pretrained(tmp_path)
        return tmp_path

    def change(self, folder, change) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def load(self, folder):
        return transformers.LlamaForCausalLM.from_pretrained(folder)

    def test_a_part_that_is_missing(self, folder) -> None:
        self.change(folder, lambda tensors: tensors.pop(f"{LAYER}.weight_amax"))
        with pytest.raises(ValueError, match=rf"lacks '{LAYER}\.weight_amax'"):
            self.load(folder)

    @pytest.mark.filterwarnings("ignore")
    def test_a_part_of_another_shape(self, folder) -> None:
        self.change(folder, lambda tensors: tensors.update({f"{LAYER}.weight_codes": torch.zeros(3, 3)}))
        with pytest.raises(
            (RuntimeError, ValueError), match=r"ignore_mismatched_sizes|codes of a weight .* must be torch\.uint8"
        ):
            self.load(folder)  # newer transformers refuse it themselves

    def test_a_truncated_file(self, folder) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(Exception, match=r"truncated|incomplete|HeaderTooLarge|MetadataIncomplete"):
            self.load(folder)

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("weights", [{"rowwise": "os.system", "modules": [LAYER]}], "has no casts of stored weights"),
            ("weights", ["os.system"], "has no casts of stored weights"),
            ("recipe", {"recipe": "Evil"}, "Evil"),
        ],
    )
    def test_a_description_of_something_else(self, folder, key, value, words) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"][key] = value
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=words):
            self.load(folder)

    @pytest.mark.parametrize("weights", ["absent", None, [], "some", "these", 3])
    def test_codes_that_are_not_described(self, folder, weights) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        said = config["quantization_config"]
        if weights == "absent":
            del said["weights"]
        elif weights == "some":
            said["weights"][0]["modules"].remove(LAYER)
        else:
            said["weights"] = weights
        path.write_text(json.dumps(config))
        refused = r"codes of 14 weights, '.*\.weight_codes' among them, .* 0 are stored: save the model anew"
        if weights == "some":
            refused = rf"'{re.escape(LAYER)}\.weight_codes' among them, .* 13 are stored"
        elif weights in ("these", 3):
            refused = rf"{weights!r} is no list"
        with pytest.raises(ValueError, match=refused):
            self.load(folder)

    def test_a_layer_that_is_none(self, folder) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["weights"][0]["modules"].append("model.embed_tokens")
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"'model\.embed_tokens' is stored as codes, and it is no linear module"):
            self.load(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_1d_weight"])
def test_distributed_checkpoints_hold_the_codes(tmp_path, recipe) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    saved, loaded = (stored(zoo.make(recipe), seed, **sizes) for seed in (0, 1))
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 0.5 * sum(parameter.numel() * 4 for parameter in saved.parameters())
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(loaded, state["model"])
    assert_same(saved, loaded)
    with pytest.raises(CheckpointException, match="would round what is written into it"):
        other = stored(zoo.make("nvfp4_1d_weight" if recipe == "nvfp4" else "nvfp4"), **sizes)
        dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt2"])
def test_distributed_checkpoints_hold_stacks(tmp_path, name) -> None:
    saved, loaded = converted(name, RECIPE), architecture(name)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.01)
    fp4engine.convert(loaded, RECIPE, keep_high_precision=head(loaded))
    for model in (saved, loaded):
        fp4engine.quantize_weights(model)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=tmp_path)
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(loaded, state["model"])
    assert_same(saved, loaded)
