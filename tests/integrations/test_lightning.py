"""A tiny model through the real Lightning Trainer."""

import pytest
import torch

import fp4engine
from fp4engine.recipe import DelayedScaling, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe

lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra `integrations`")

from fp4engine.integrations.lightning import NVFP4Precision  # noqa: E402 (after the skip)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        self.head = torch.nn.Linear(16, 1)
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.head(self.layers(batch)) - batch.sum(-1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.head(self.layers(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, steps, plugin, resume_from=None):
    model = Model()
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(24, 16), batch_size=4)
    trainer = lightning.Trainer(
        plugins=plugin,
        max_steps=steps,
        accelerator="cpu",
        gradient_clip_val=1.0,
        val_check_interval=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, data, ckpt_path=resume_from)
    return model, trainer


@pytest.fixture(autouse=True)
def stream():
    fp4engine.manual_seed(9)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers
class TestLightning:
    def test_trains_in_fp4(self, tmp_path):
        plugin = NVFP4Precision(keep_high_precision=["head"])
        model, _ = fit(tmp_path, 12, plugin)
        assert model.losses[-1] < model.losses[0] / 2
        assert [module.name for module in plugin.plan.converted] == ["layers.0", "layers.2"]
        report = fp4engine.executed_gemms(model)
        assert report.fp4_gemms >= 12 * 5
        assert model.layers[0].weight.dtype == torch.float32
        assert list(model.state_dict()) == list(Model().state_dict())

    def test_is_the_loop_written_by_hand(self, tmp_path):
        model, _ = fit(tmp_path, 6, NVFP4Precision(NVFP4BlockScaling(), compute_dtype=None))
        fp4engine.manual_seed(9)
        mine = Model()
        fp4engine.convert(mine)
        torch.manual_seed(1)
        optimizer = mine.configure_optimizers()
        for index, batch in enumerate(torch.randn(24, 16).split(4)):
            optimizer.zero_grad()
            with fp4engine.autocast(recipe=NVFP4BlockScaling()):
                loss = mine.training_step(batch, index)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
            optimizer.step()
        assert mine.losses == model.losses

    @pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), DelayedScaling(amax_history_len=4)])
    def test_resumes_bit_for_bit(self, tmp_path, recipe):
        whole, _ = fit(tmp_path, 10, NVFP4Precision(recipe))
        fp4engine.manual_seed(9)
        _, trainer = fit(tmp_path, 6, NVFP4Precision(recipe))
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        fp4engine.manual_seed(12345)
        resumed, _ = fit(tmp_path, 10, NVFP4Precision(recipe), tmp_path / "half.ckpt")
        assert resumed.losses == whole.losses[6:]

    def test_a_checkpoint_without_the_stream_warns(self, tmp_path):
        _, trainer = fit(tmp_path, 6, None)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        with pytest.warns(UserWarning, match="the checkpoint has no FP4 training state.*NVFP4Precision"):
            fit(tmp_path, 10, NVFP4Precision(), tmp_path / "half.ckpt")

    def test_rules_that_match_nothing_are_refused(self, tmp_path):
        recipe = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "0"),))  # a name below `layers`
        with pytest.raises(ValueError, match=r"rules that match no module: name='0'; the modules are layers\.0, "):
            fit(tmp_path, 1, NVFP4Precision(recipe))

    @pytest.mark.parametrize("first", [DelayedScaling(), LinearRecipe()])
    def test_the_plan_shows_the_recipe_in_force(self, tmp_path, first):
        plugin = NVFP4Precision(RuledRecipe(NVFP4BlockScaling(), (Rule(first, "layers.0"),)))
        model, _ = fit(tmp_path, 1, plugin)
        ran = model.layers[0].executed.counts
        assert plugin.plan.modules[0].formats[0] in {formats for name, formats in ran if name == "fprop"}
        assert plugin.plan.modules[1].formats == ("e2m1 x e2m1",) * 3
        assert model.layers[0].recipe is None

    def test_arguments_of_another_kind_are_refused(self):
        with pytest.raises(ValueError, match=r"recipe must be an fp4engine\.recipe\.Recipe"):
            NVFP4Precision("nvfp4")
        with pytest.raises(ValueError, match=r"compute_dtype must be a torch\.dtype or None, got 'bf16'"):
            NVFP4Precision(compute_dtype="bf16")
