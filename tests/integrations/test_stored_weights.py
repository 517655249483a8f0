"""Weights that are stored as codes, through save_pretrained / from_pretrained, adapters on top, and DCP."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fp4engine
from fp4engine import qat
from fp4engine.export import ServedCheckpoint, export_checkpoint
from fp4engine.recipe import NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests.tiny import architecture, head, llama, tokens, transformers

import fp4engine.integrations.transformers  # isort: skip (after the skip)

RECIPE = NVFP4BlockScaling()
LAYER = "model.layers.1.mlp.up_proj"


def stored(recipe=RECIPE, seed=0, **changes):
    torch.manual_seed(seed)
    model = llama(**changes).eval()
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    fp4engine.quantize_weights(model)
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
    assert_same(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(model, type(model).from_pretrained(tmp_path / "again"))


def test_experts_and_conv1d_go_along_converted(tmp_path) -> None:
    model = architecture("mixtral")
    fp4engine.convert(model, RECIPE, keep_high_precision=head(model))
    fp4engine.quantize_weights(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in file.keys()  # noqa: SIM118 (no mapping)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(model), logits(loaded))


def test_siblings_keep_the_amax_that_they_share(tmp_path) -> None:
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
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own
            self.load(folder)

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
