"""The training state of every rank, saved and found again by rank, through DCP, Accelerate, Lightning and the Trainer.

Two processes, by gloo on the CPU. They draw different numbers of times, and what they remember differs.
"""

import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fp4engine
from fp4engine import ops
from fp4engine.integrations import TrainingState
from fp4engine.ops import rng
from fp4engine.recipe import DelayedScaling, NVFP4BlockScaling
from tests.ranks import process_group, spawn, tell_accelerate

NEEDED = ("accelerate", "lightning", "transformers")
# Not imported here: a fresh process imports this file, and would take seconds to.
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs the extra `integrations`")

WORLD = 2
DELAYED = DelayedScaling(amax_history_len=3)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(fp4engine.Linear(16, 32), fp4engine.Linear(32, 16))


def use(model, rank):
    """Draw 3 times on rank 0 and 7 times on rank 1, after amaxes of 1 and 2."""
    fp4engine.manual_seed(5)
    for _ in range(4 * rank + 3):
        ops.next_draw(torch.device("cpu"))
    with fp4engine.autocast(recipe=DELAYED):
        model(torch.full((4, 16), rank + 1.0)).sum().backward()


def forget():
    """What a fresh process knows: nothing."""
    rng._states.clear()
    fp4engine.manual_seed(0)


def remembered(model):
    """This rank's own draw, and the amax of the first layer's input."""
    values = fp4engine.get_amax_history(model).get("0:input", {"values": [None]})["values"]
    return fp4engine.get_rng_state()["draws"].get("cpu"), values[0]


def saved_and_loaded(save, load, rank):
    model = make_model()
    use(model, rank)
    want = remembered(model)
    save(model)
    dist.barrier()
    forget()
    model = make_model()
    load(model)
    return want, remembered(model)


def by_dcp(rank, folder):
    return saved_and_loaded(
        lambda model: dcp.save({"fp4": TrainingState(model)}, checkpoint_id=f"{folder}/dcp"),
        lambda model: dcp.load({"fp4": TrainingState(model)}, checkpoint_id=f"{folder}/dcp"),
        rank,
    )


def by_accelerate(rank, folder):
    import accelerate

    def accelerator(model):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerate.Accelerator(cpu=True)
        assert made.num_processes == WORLD
        made.register_for_checkpointing(TrainingState(model))
        return made

    return saved_and_loaded(
        lambda model: accelerator(model).save_state(f"{folder}/accelerate"),
        lambda model: accelerator(model).load_state(f"{folder}/accelerate"),
        rank,
    )


def by_lightning(rank, folder):
    import lightning.pytorch as lightning

    from fp4engine.integrations.lightning import NVFP4Precision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.losses = []

        def training_step(self, batch, index):
            if self.global_rank:  # one draw more than rank 0 takes
                ops.next_draw(torch.device("cpu"))
            loss = self.model(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps, ckpt_path=None):
        """Every batch is the same: a run that resumes at the end of an epoch counts its batches otherwise."""
        module = Module()
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            plugins=NVFP4Precision(NVFP4BlockScaling()),
            max_steps=steps,
            accelerator="cpu",
            devices=WORLD,
            strategy="ddp",
            use_distributed_sampler=False,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            module, torch.utils.data.DataLoader(torch.randn(2, 16).repeat(3, 1), batch_size=2), ckpt_path=ckpt_path
        )
        return module, trainer

    fp4engine.manual_seed(5)
    whole, _ = fit(6)
    want = whole.losses[3:], fp4engine.get_rng_state()
    fp4engine.manual_seed(5)
    _, trainer = fit(3)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    forget()
    resumed, _ = fit(6, f"{folder}/half.ckpt")
    return want, (resumed.losses, fp4engine.get_rng_state())


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        fp4engine.convert(self.model, NVFP4BlockScaling())

    def forward(self, x):
        if dist.get_rank():
            ops.next_draw(torch.device("cpu"))
        output = self.model(x)
        return {"loss": output.square().mean(), "output": output}


def by_trainer(rank, folder):
    import accelerate
    import transformers

    from fp4engine.integrations.transformers import NVFP4Callback

    def train(name, steps, resume_from=None):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(2)
        trainer = transformers.Trainer(
            Regression(),
            transformers.TrainingArguments(
                output_dir=f"{folder}/{name}",
                max_steps=steps,
                per_device_train_batch_size=2,
                save_steps=3,
                lr_scheduler_type="constant",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=[{"x": row} for row in torch.randn(24, 16)],
            callbacks=[NVFP4Callback()],
        )
        assert trainer.args.world_size == WORLD
        trainer.train(resume_from_checkpoint=resume_from)
        return [parameter.detach() for parameter in trainer.model.parameters()], fp4engine.get_rng_state()

    fp4engine.manual_seed(5)
    want = train("whole", 6)
    fp4engine.manual_seed(5)
    train("half", 3)
    forget()
    return want, train("half", 6, f"{folder}/half/checkpoint-3")


def of_one_process(rank, folder):
    """What the one process that started these saved: both ranks say what they do, and go on after it."""
    forget()
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load({"fp4": TrainingState(model)}, checkpoint_id=f"{folder}/one")
    messages = [str(warning.message) for warning in caught if "training state" in str(warning.message)]
    return remembered(model), messages


CHECKS = {
    "dcp": by_dcp,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "trainer": by_trainer,
    "one": of_one_process,
}


def run(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    tell_accelerate(rank, WORLD)
    with process_group(rank, WORLD, f"{folder}/store"):
        results = {name: check(rank, folder) for name, check in CHECKS.items()}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each rank found, after one process has saved its state too."""
    model = make_model()
    use(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it saves in one process
        dcp.save({"fp4": TrainingState(model)}, checkpoint_id=folder / "one")
    spawn(run, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("library", ["dcp", "accelerate"])
def test_every_rank_finds_its_own_state(ranks, library):
    (want, got), (want_1, got_1) = (rank[library] for rank in ranks)
    assert got == want == (3, 1.0)
    assert got_1 == want_1 == (7, 2.0)


def test_lightning_resumes_every_rank_bit_for_bit(ranks):
    for (losses, state), (resumed, resumed_state) in (rank["lightning"] for rank in ranks):
        assert resumed == losses and resumed_state == state
    assert ranks[0]["lightning"][0][1] != ranks[1]["lightning"][0][1]


def test_the_trainer_resumes_every_rank_bit_for_bit(ranks):
    for (parameters, state), (resumed, resumed_state) in (rank["trainer"] for rank in ranks):
        assert all(torch.equal(left, right) for left, right in zip(parameters, resumed, strict=True))
        assert resumed_state == state
    assert ranks[0]["trainer"][0][1] != ranks[1]["trainer"][0][1]


def test_two_ranks_go_on_after_one_and_say_so(ranks):
    for rank, (state, messages) in enumerate(result["one"] for result in ranks):
        assert state == (3, 1.0)
        assert len(messages) == 1 and f"saved by 1 ranks and is loaded by 2: rank {rank} continues" in messages[0]


def load_alone(rank: int, path: str) -> None:
    """Load into a model that has done nothing, in a process that has done nothing else."""
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load({"fp4": TrainingState(model)}, checkpoint_id=path)
    messages = [str(warning.message) for warning in caught if "training state" in str(warning.message)]
    torch.save((remembered(model), messages), f"{path}.pt")


@pytest.mark.parametrize(
    ("name", "state", "warns"), [("one", (3, 1.0), []), ("dcp", (7, 2.0), ["saved by 2 ranks and is loaded by 1"])]
)
def test_a_fresh_process_finds_what_its_template_lacks(ranks, folder, name, state, warns):
    """Alone, it goes on after the latest draw of both ranks, with the larger amaxes."""
    spawn(load_alone, (str(folder / name),), 1)
    got, messages = torch.load(folder / f"{name}.pt", weights_only=True)
    assert got == state and len(messages) == len(warns)
    assert all(part in message for part, message in zip(warns, messages, strict=True))
