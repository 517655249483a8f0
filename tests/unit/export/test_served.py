"""The trained recipe and the served checkpoint on the same tokens, and what a token's score depends on."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4engine
from fp4engine.accounting import batch_dependence
from fp4engine.cli import main
from fp4engine.export import CheckpointError, calibrate, compare_served, export_checkpoint
from fp4engine.formats import E2M1, CastSpec, Correction, Outer, RoundingMode, mx
from fp4engine.recipe import Casts, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests.tiny import VOCABULARY, converted, llama, served_architecture, tokens, transformers

pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

BATCHES = [tokens(), {"input_ids": tokens() + 0}]


@pytest.fixture
def model():
    made = converted(llama().eval(), NVFP4BlockScaling())
    return made


@pytest.fixture
def served(tmp_path, model):
    """A checkpoint whose inputs are scaled by the amaxes of the very tokens that are compared."""
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "out", inputs=inputs, shared_scales=(), force=True)
    return tmp_path / "out"


def change(folder, name, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_is_served_is_what_trained_where_inputs_have_the_same_scales(model, served) -> None:
    model.train()
    found = compare_served(model, served, BATCHES, progress=False)
    assert model.training and found.positions == 2 * 48 and found.operands == 28 and not found.apart
    assert found.kl_max < 1e-12 and found.log_probability < 1e-6 and found.same_choice == 1 and found.logits < 1e-6
    trained, server = found.dependence["trained"], found.dependence["served"]
    assert set(trained) == {"the rest of the batch", "later tokens", "the cache of keys and values"}
    assert all(difference > 1e-3 for difference in trained.values())
    assert all(difference < 1e-6 for difference in server.values())
    assert "all 28 operands have the same codes" in str(found) and "96 positions: KL" in str(found)


def test_a_state_space_model_has_no_cache_of_keys_and_values(tmp_path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16}
    config = transformers.Mamba2Config(**sizes, n_groups=1, state_size=16, chunk_size=8)
    model = converted(transformers.Mamba2ForCausalLM(config), NVFP4BlockScaling())
    export_checkpoint(model, tmp_path / "out", inputs=calibrate(model, [tokens()], progress=False))
    found = compare_served(model, tmp_path / "out", [tokens()], progress=False)
    assert set(found.dependence["trained"]) == {"the rest of the batch", "later tokens"}


def test_the_first_operand_and_block_that_differ_are_named(model, served) -> None:
    layer = "model.layers.1.mlp.up_proj"

    def flip(codes):
        codes[5, 9] ^= 0x10  # element 19, in the second block of 16
        return codes

    change(served, f"{layer}.weight_packed", flip)
    found = compare_served(model, served, BATCHES, progress=False)
    first = found.apart[0]
    assert (first.layer, first.operand, first.row, first.block) == (layer, "weight", 5, 1)
    same = [got == pytest.approx(wanted, rel=1e-6) for wanted, got in zip(first.trained, first.served, strict=True)]
    assert [index for index in range(16) if not same[index]] == [3]
    assert first.share == 1 / (64 * 2) and 0 < found.log_probability < 0.1 and not found.is_exact
    assert f"the first is {layer}, weight: 0.78% of its blocks" in str(found)
    change(served, "model.layers.0.self_attn.o_proj.input_global_scale", lambda scale: scale * 1.5)
    first = compare_served(model, served, BATCHES, progress=False).apart[0]
    assert (first.layer, first.operand) == ("model.layers.0.self_attn.o_proj", "input")
    weights = compare_served(model, served, BATCHES, inputs=False, progress=False)
    assert [(each.layer, each.operand) for each in weights.apart] == [(layer, "weight")]


def test_the_figures_are_those_of_distributions_by_hand(model, served) -> None:
    change(served, "model.norm.weight", lambda weight: weight * 1.5)
    found = compare_served(model, served, [tokens()], progress=False)
    logits = model(tokens()).logits.double()
    wanted, got = logits.log_softmax(-1), (logits * 1.5).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - got)).sum(-1)
    assert found.kl_mean == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert found.kl_max == pytest.approx(float(divergence.max()), rel=1e-4)
    apart = (wanted - got).abs()
    assert found.log_probability == pytest.approx(float(apart.max()), rel=1e-4)
    _, sequence, position, token = found.where
    assert float(apart[sequence, position, token]) == pytest.approx(float(apart.max()), rel=1e-4)
    assert found.logits == pytest.approx(0.5, rel=1e-4) and found.same_choice == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_checkpoint_that_computes_a_nan_is_infinitely_far_away(model, served, value) -> None:
    change(served, "model.norm.weight", lambda weight: torch.full_like(weight, value))
    found = compare_served(model, served, [tokens()], progress=False)
    assert found.kl_mean == found.kl_max == found.log_probability == torch.inf and not found.is_exact


def test_checkpoints_of_other_models_and_no_data_are_refused(tmp_path, model, served) -> None:
    other = converted(llama(intermediate_size=80).eval(), NVFP4BlockScaling())
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \[64, 32\]"):
        compare_served(other, served, [tokens()])
    with pytest.raises(CheckpointError, match="is not in it"):
        compare_served(torch.nn.Sequential(model), served, [tokens()])
    with pytest.raises(ValueError, match="at least one batch"):
        compare_served(model, served, [])
    for batches in (tokens(), {"input_ids": tokens()}, None):
        with pytest.raises(ValueError, match="batches must be a sequence of batches"):
            compare_served(model, served, batches)


@pytest.mark.parametrize(
    ("recipe", "dependent"),
    [
        (NVFP4BlockScaling(), True),
        (NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True), False),
        (LinearRecipe(input=Casts(mx(E2M1)), weight=Casts(mx(E2M1))), False),
        (zoo.make("fp8_current"), True),
        (zoo.make("fp8_delayed"), False),
        (zoo.make("fp8_block"), False),
        (zoo.make("nvfp4_weight_only"), False),
        (LinearRecipe(input=Casts(CastSpec(outer=Outer.ROW, rounding=RoundingMode.STOCHASTIC))), True),
        (LinearRecipe(input=Casts(mx(E2M1, rows=32))), True),
    ],
    ids=["nvfp4", "row scaled", "mxfp4", "fp8 current", "fp8 delayed", "fp8 blocks", "weights", "drawn", "tiles"],
)
def test_a_recipe_whose_scores_depend_on_the_batch_is_refused_and_does(recipe, dependent) -> None:
    model = converted(llama(hidden_size=128, intermediate_size=128).eval(), None)
    with torch.no_grad(), fp4engine.autocast(recipe=recipe):
        whole, alone = model(tokens()).logits[:1], model(tokens()[:1]).logits
    spread = float((whole - alone).abs().max() / whole.std())
    assert (spread > 1e-3) == dependent, spread
    if not dependent:
        fp4engine.assert_batch_invariant(model, recipe)
        return
    with pytest.raises(AssertionError, match=r"q_proj \(.*and 11 more: evaluate one sequence at a time"):
        fp4engine.assert_batch_invariant(model, recipe)
    assert len(batch_dependence(model, recipe)) == 14


def test_invariance_is_asked_of_each_module() -> None:
    model = converted(llama().eval(), None)
    fp4engine.assert_batch_invariant(model)
    rules = RuledRecipe(zoo.make("nvfp4_row_scaled"), (Rule(NVFP4BlockScaling(), "**.down_proj"),))
    assert set(batch_dependence(model, rules)) == {f"model.layers.{index}.mlp.down_proj" for index in range(2)}
    assert CastSpec(outer=Outer.ROW, scale_bound=256.0, correction=Correction.EDEN16).mixes_rows


def test_the_command_says_it_and_exits_by_the_divergence(tmp_path, model, capsys) -> None:
    model.save_pretrained(tmp_path / "trained")
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "served", inputs=inputs)
    data = tmp_path / "tokens.json"
    data.write_text(json.dumps(tokens().tolist()))
    words = ["compare-served", str(tmp_path / "trained"), str(tmp_path / "served"), "--data", str(data)]
    assert main([*words, "--batch", "3", "--max-kl", "1"]) == 0
    said = capsys.readouterr().out
    assert "48 positions: KL" in said and "as served depend on the rest of the batch by 0.0e+00" not in said
    assert main([*words, "--max-kl", "0", "--weights-only"]) == 1
    for text, complaint in (
        ("[[1, 2], [3]]", "must hold lists of one length"),
        ("[[1, 2.5]]", "must hold a list of lists of token ids"),
        ("[]", "must hold a list of lists of token ids"),
        ("{", "is no JSON"),
        ("[[64]]", "token ids from 0 to 63, got 64"),
    ):
        data.write_text(text)
        with pytest.raises(SystemExit) as left:
            main([*words, "--length", "4000"])
        error = capsys.readouterr().err
        assert left.value.code == 2 and complaint in error and error.count("\n") == 1
    for limit in ("nan", "-1"):
        with pytest.raises(SystemExit):
            main([*words, "--max-kl", limit])
        assert "--max-kl must be a finite number of at least 0, got" in capsys.readouterr().err
    served_architecture("gpt2").save_pretrained(tmp_path / "gpt2")
    data.write_text(json.dumps([[1] * 3000]))
    with pytest.raises(SystemExit):
        main([words[0], str(tmp_path / "gpt2"), *words[2:], "--length", "4000"])
    assert "--length must be at most 64, the model's positions, got 3000" in capsys.readouterr().err
    served_architecture("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(SystemExit):
        main([words[0], str(tmp_path / "t5"), *words[2:]])
    assert "a T5ForConditionalGeneration takes more: call fp4engine.export.compare_served" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("words")
    words[-1] = str(tmp_path / "text.txt")
    with pytest.raises(SystemExit):
        main(words)
    assert "has no tokenizer that reads a text" in capsys.readouterr().err
    tensors = model.state_dict()
    for head, complaint in ((None, "weights lacks 'lm_head.weight'"), (torch.zeros(3, 3), "has shape (3, 3) in wei")):
        tensors["lm_head.weight"] = head
        save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "trained" / "model.safetensors")
        with pytest.raises(SystemExit):
            main(words)
        assert complaint in capsys.readouterr().err
