"""Tiny models through the real transformers.Trainer and Accelerate."""

import pytest
import torch

import fp4engine
from fp4engine.integrations import TrainingState
from fp4engine.recipe import NVFP4BlockScaling

transformers = pytest.importorskip("transformers", reason="needs transformers")
accelerate = pytest.importorskip("accelerate", reason="needs the extra `integrations`")

from fp4engine.integrations.transformers import NVFP4Callback  # noqa: E402 (after the skip)

RECIPE = NVFP4BlockScaling()


@pytest.fixture(autouse=True)
def stream():
    fp4engine.manual_seed(4)


def make_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    fp4engine.convert(model, RECIPE, keep_high_precision=["lm_head"])
    return model


def tokens():
    """Sequences that count up."""
    rows = (torch.arange(9) + 5 * torch.arange(24)[:, None]) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder, steps, resume_from=None, **arguments):
    model = make_model()
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
        callbacks=[NVFP4Callback(resume_from)],
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
        for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(left, right)

    def test_gradient_checkpointing_and_accumulation_change_nothing_they_should_not(self, tmp_path):
        plain, _ = train(tmp_path / "plain", 2, gradient_accumulation_steps=2)
        fp4engine.manual_seed(4)
        checkpointed, _ = train(
            tmp_path / "checkpointed", 2, gradient_accumulation_steps=2, gradient_checkpointing=True
        )
        for left, right in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            assert torch.equal(left, right)

    def test_saved_model_loads_without_fp4engine(self, tmp_path):
        model = make_model()
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
        for left, right in zip(model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(left, right)


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
