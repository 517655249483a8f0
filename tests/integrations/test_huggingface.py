"""Tiny models through the real transformers.Trainer and Accelerate."""

import json
import shutil

import pytest
import torch

import fp4engine
from fp4engine.integrations import TrainingState
from fp4engine.recipe import NVFP4BlockScaling
from tests.tiny import architecture, converted, llama

transformers = pytest.importorskip("transformers", reason="needs transformers")
accelerate = pytest.importorskip("accelerate", reason="needs the extra `integrations`")

from fp4engine.integrations.transformers import NVFP4Callback  # noqa: E402 (after the skip)

RECIPE = NVFP4BlockScaling()


@pytest.fixture(autouse=True)
def stream():
    fp4engine.manual_seed(4)


def make_model():
    torch.manual_seed(0)
    model = llama(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    fp4engine.convert(model, RECIPE, keep_high_precision=["lm_head"])
    return model


def assert_same(left, right):
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other)


def tokens():
    """Sequences that count up."""
    rows = (torch.arange(9) + 5 * torch.arange(24)[:, None]) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder, steps, resume_from=None, callbacks=None, model=None, **arguments):
    model = make_model() if model is None else model
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=tokens(),
        callbacks=[NVFP4Callback()] if callbacks is None else callbacks,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")  # notes about pinned memory and data loaders
class TestTrainer:
    def test_trains_in_fp4_and_resumes_bit_for_bit(self, tmp_path):
        whole, losses = train(tmp_path / "whole", 6)
        assert losses[-1] < losses[0]
        fp4engine.assert_quantized(whole, min_fraction=0.5)
        fp4engine.manual_seed(4)
        train(tmp_path / "half", 3)
        fp4engine.manual_seed(777)
        resumed, _ = train(tmp_path / "half", 6, str(tmp_path / "half" / "checkpoint-3"))
        assert_same(whole, resumed)
        with open(tmp_path / "half" / "checkpoint-6" / "trainer_state.json") as file:  # of this step, not of step 3
            draws = json.load(file)["stateful_callbacks"]["NVFP4Callback"]["attributes"]["saved"]["ranks"][0]["rng"]
        assert draws == fp4engine.get_rng_state()

    def test_resumes_with_experts_that_were_loaded_before(self, tmp_path):
        """The Trainer of transformers 5.23 does not load them, since its files hold them one by one."""
        whole, _ = train(tmp_path, 6, model=converted(architecture("mixtral"), RECIPE))
        checkpoint = str(tmp_path / "checkpoint-3")
        loaded = transformers.MixtralForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        resumed, _ = train(tmp_path, 6, checkpoint, model=converted(loaded, RECIPE))
        assert_same(whole, resumed)

    @pytest.mark.parametrize("restores_callbacks", [False, True])
    def test_resumes_from_wherever_the_trainer_does(self, tmp_path, restores_callbacks):
        """The Trainer names the folder to nobody; a folder of that name in ``output_dir`` may be another run's."""
        whole, _ = train(tmp_path / "whole", 6)
        fp4engine.manual_seed(4)
        train(tmp_path / "half", 3)
        shutil.move(tmp_path / "half" / "checkpoint-3", tmp_path / "kept")
        fp4engine.manual_seed(99)
        train(tmp_path / "half", 3)
        fp4engine.manual_seed(777)
        resumed, _ = train(
            tmp_path / "half", 6, str(tmp_path / "kept"), restore_callback_states_from_checkpoint=restores_callbacks
        )
        assert_same(whole, resumed)
        fp4engine.manual_seed(777)
        resumed, _ = train(tmp_path / "whole", 6, str(tmp_path / "whole" / "checkpoint-3"))
        assert_same(whole, resumed)

    def test_a_checkpoint_without_it_warns(self, tmp_path):
        train(tmp_path, 3, callbacks=[])
        with pytest.warns(UserWarning, match="checkpoint of step 3 has no FP4 training state"):
            train(tmp_path, 6, str(tmp_path / "checkpoint-3"))

    def test_a_run_that_died_while_it_saved_warns(self, tmp_path):
        """The Trainer's own state is written first; the one of the checkpoint before must not stand in for ours."""

        class Dies(NVFP4Callback):
            def on_save(self, args, state, control, **arguments):
                if state.global_step == 6:
                    raise KeyboardInterrupt
                super().on_save(args, state, control, **arguments)

        Dies.__name__ = NVFP4Callback.__name__
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, 6, callbacks=[Dies()])
        with pytest.warns(UserWarning, match="checkpoint of step 6 has no FP4 training state"):
            train(tmp_path, 7, str(tmp_path / "checkpoint-6"))

    def test_gradient_checkpointing_and_accumulation_change_nothing_they_should_not(self, tmp_path):
        plain, _ = train(tmp_path / "plain", 2, gradient_accumulation_steps=2)
        fp4engine.manual_seed(4)
        checkpointed, _ = train(
            tmp_path / "checkpointed", 2, gradient_accumulation_steps=2, gradient_checkpointing=True
        )
        assert_same(plain, checkpointed)

    def test_saved_model_loads_without_fp4engine(self, tmp_path):
        model = make_model()
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert_same(model, loaded)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_trains_saves_and_resumes(tmp_path):
    def run(first, last):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the Trainer leaves its own
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(TrainingState(model))
        if first:
            accelerator.load_state(tmp_path / "half")
        losses = []
        for batch in list(torch.stack([row["input_ids"] for row in tokens()]).split(3))[first:last]:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if last == 4:
            accelerator.save_state(tmp_path / "half")
        fp4engine.assert_quantized(accelerator.unwrap_model(model), min_fraction=0.5)
        return losses

    whole = run(0, 8)
    fp4engine.manual_seed(4)
    run(0, 4)
    fp4engine.manual_seed(31)
    assert run(4, 8) == whole[4:]


@pytest.mark.filterwarnings("ignore")
def test_accelerate_refuses_a_checkpoint_without_it(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    accelerator.save_state(tmp_path)
    accelerator.register_for_checkpointing(TrainingState(model))
    with pytest.raises(RuntimeError, match="Number of custom checkpoints"):
        accelerator.load_state(tmp_path)
