"""What the runs of a comparison share: a model, its loss, its batches, its settings."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4engine.accounting.planned import ConversionPlan
from fp4engine.arguments import one_line, shown
from fp4engine.checkpoint_names import VOCABULARY
from fp4engine.compare.checkpoint import file_digest
from fp4engine.compare.data import Encode, Tokens
from fp4engine.compare.files import INSTALLED, InputError, place_of
from fp4engine.compare.loop import learning_rate
from fp4engine.compare.recorder import Run
from fp4engine.convert import convert, convert_for_regions
from fp4engine.positions import positions_of, require_positions
from fp4engine.recipe import Recipe, RuledRecipe
from fp4engine.recipe.argument import imported

VALIDATION_TOKENS = 2**16
VALIDATION_SHARE = 8
"""The last validation loss is a mean over about ``VALIDATION_TOKENS`` tokens, or over an eighth of the trained tokens
if that is less. A validation before the end takes an eighth of them. The tokens are the same in every run."""

SEE_AHEAD = ("bert-generation", "cpmant", "xlnet")
"""Families whose tokens see those after them, as gradients show, and of which transformers 5.23 has no masked language
model, by which it tells the others."""

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Of a model and tokens int64 [batch, sequence + 1], the loss in nats per token: one number with a gradient."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything about a run but its recipe, its seed, and what it does of its own. It travels to other processes.

    Attributes:
        steps: how many steps the optimizer takes.
        batch: sequences of one forward pass.
        sequence: tokens of a sequence.
        accumulation: forward passes of a step.
        learning_rate: at its peak.
        evaluate_every: steps between two validations; there is one after the last step, too.
        device: ``"cpu"`` or ``"cuda"``.
        compile: whether ``torch.compile`` compiles the loss.
        cuda_graph: whether a step is captured in a CUDA graph, which gives the same bytes.
        start: a file of safetensors with the weights to begin from, and its digest; None begins from :meth:`model`'s
            own.
        short: one learning rate for all steps, no validation, and nothing is examined.
    """

    steps: int
    batch: int
    sequence: int
    accumulation: int = 1
    learning_rate: float
    evaluate_every: int
    device: str = "cpu"
    compile: bool = False
    cuda_graph: bool = False
    start: tuple[Path, str] | None = None
    short: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulation * self.sequence

    def setting(self) -> dict[str, Any]:
        """What the numbers of all runs depend on, as plain JSON values; what is usual goes without saying."""
        always = {
            "steps": self.steps, "batch": self.batch, "sequence": self.sequence, "learning_rate": self.learning_rate,
            "evaluate_every": self.evaluate_every, "on": "cpu" if self.device == "cpu" else "gpu",
        }  # fmt: skip
        seldom = {
            "accumulation": self.accumulation if self.accumulation > 1 else None,
            "compile": self.compile or None,
            "start": self.start and self.start[1],
            "short": self.short or None,
        }
        return always | {name: value for name, value in seldom.items() if value is not None}

    def model(self) -> nn.Module:
        """A new model on the current device, in training mode; what it draws, it draws from PyTorch's generator."""
        raise NotImplementedError

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """See :data:`Loss`."""
        raise NotImplementedError

    def tokens(self, seed: int, step: int) -> Tensor:
        """Tokens int64 [accumulation * batch, sequence + 1] of a step, on the CPU or the device."""
        raise NotImplementedError

    def validation(self, last: bool) -> Tensor:
        """Tokens int64 [passes, batch, sequence + 1] of the last validation, or of one on the way."""
        raise NotImplementedError

    def keep_high_precision(self, model: nn.Module) -> Sequence[str]:
        """Patterns over names of layers that no recipe reaches."""
        raise NotImplementedError

    def convert(self, model: nn.Module, run: Run) -> ConversionPlan:
        """Let the linear layers of ``model`` follow recipes.

        Raises:
            ValueError: a rule of the recipe, or a pattern, matches nothing.
        """
        keep = self.keep_high_precision(model)
        if isinstance(first := run.recipe.at(0), RuledRecipe):
            return convert_for_regions(model, first, None, keep)
        return convert(model, keep_high_precision=keep)

    def hooks(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> list[Any]:
        """What has ``after_step()``, ``state_dict()`` and ``load_state_dict()``, and is called after every step."""
        return []

    def phase(self, run: Run, step: int) -> Any:
        """What stands for all that a captured step must not change; another one is captured where it differs."""
        return run.recipe.at(step)

    def starts(self, recipe: Recipe) -> list[int]:
        """The steps of a run at which another recipe begins, if ``recipe`` has a schedule; 0 is the first."""
        return [step for step in recipe.starts if step < self.steps]

    def compute(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The loss of a model as a function of tokens, compiled if that is asked for."""
        of_model = self.loss

        def loss(tokens: Tensor) -> Tensor:
            return of_model(model, tokens)

        if not self.compile:
            return loss
        compiled = torch.compile(loss)

        def call(tokens: Tensor) -> Tensor:
            try:
                return compiled(tokens)
            except RuntimeError:  # of generated code, which knows no names: the loss itself says what it was given
                loss(tokens)
                raise

        return call

    def facts(self) -> dict[str, Any]:
        """What the header of a run says besides, on which no number depends."""
        return {}

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return self.learning_rate if self.short else learning_rate(step, self.steps, self.learning_rate)

    def precision(self) -> Any:
        """The context in which a run computes: ``torch.autocast`` to BF16 on a GPU, and nothing, so FP32, on a CPU."""
        if self.device == "cpu":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A language model on text.

    Attributes:
        name: a Hugging Face directory or ``config.json``, or ``module:function``.
        text: what is trained on.
        lora: above 0, the model is frozen, and adapters of this rank are trained.
        keep: patterns over names of layers that no recipe reaches; None is the output layer.
    """

    name: str
    text: Tokens
    lora: int = 0
    keep: tuple[str, ...] | None = None

    def setting(self) -> dict[str, Any]:
        seldom = {"lora": self.lora or None, "keep_high_precision": None if self.keep is None else list(self.keep)}
        own = {"model": source_of(self.name).digest(), "data": self.text.digest}
        return super().setting() | own | {name: value for name, value in seldom.items() if value is not None}

    def model(self) -> nn.Module:
        model = source_of(self.name).make(torch.bfloat16 if self.lora and self.device == "cuda" else torch.float32)
        return _with_adapters(model, self.lora) if self.lora else model

    @property
    def loss(self) -> Loss:  # pyright: ignore[reportIncompatibleMethodOverride]: Dynamo would look for the source anew
        return source_of(self.name).loss

    def tokens(self, seed: int, step: int) -> Tensor:
        return self.text.batch(seed, step, self.batch * self.accumulation, self.sequence + 1)

    def validation(self, last: bool) -> Tensor:
        tokens = min(VALIDATION_TOKENS, self.steps * self.tokens_per_step // VALIDATION_SHARE)
        passes = max(1, round(tokens / (self.batch * self.sequence)))
        held_out = self.text.held_out(passes * self.batch, self.sequence + 1)
        if len(held_out) < self.batch:
            return held_out[None]
        whole = held_out[: len(held_out) // self.batch * self.batch].unflatten(0, (-1, self.batch))
        return whole if last else whole[::VALIDATION_SHARE]

    def facts(self) -> dict[str, Any]:
        return {"unit": self.text.unit}

    def keep_high_precision(self, model: nn.Module) -> Sequence[str]:
        return head_of(model) if self.keep is None else self.keep


def head_of(model: nn.Module) -> list[str]:
    """The name of the output layer, of models that know it; else of what is called ``lm_head``, if anything is."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, module in linears.items() if module is output or name.rpartition(".")[2] == "lm_head"]


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise InputError("--lora needs peft: pip install 'fp4engine[integrations]'") from error
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        made: Any = peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # whatever a model that is not of transformers makes PEFT raise
        raise InputError(f"--lora: PEFT gives {type(model).__name__} no adapters: {one_line(error)}") from error
    return made


class Source:
    """Where a model is from: what :func:`source_of` returns."""

    is_trained = False
    """Whether it comes with weights."""

    def make(self, dtype: torch.dtype) -> nn.Module:
        """A new model, in training mode."""
        raise NotImplementedError

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """See :data:`Loss`."""
        raise NotImplementedError

    def digest(self) -> str:
        """Sixteen hexadecimal digits that stand for the model."""
        raise NotImplementedError

    def encoding(self) -> tuple[str, Encode]:
        """A name for how text becomes tokens, ``"bytes"`` for bytes, and the function that does it."""
        raise NotImplementedError

    def require_fit(self, sequence: int) -> None:
        """Raise a ValueError if the model does not take sequences of this many tokens."""


@cache
def source_of(name: str) -> Source:
    """The model that a name means.

    Raises:
        InputError: there is no such model.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _FromTransformers(path)
    if ":" in name:
        return _FromFunction(name)
    raise InputError(
        f"--model must be a directory with a config.json, a config.json, or module:function; there is no {name!r}"
    )


class _FromTransformers(Source):
    def __init__(self, path: Path) -> None:
        import transformers

        self.folder = path if path.is_dir() else path.parent
        self.file = path / "config.json" if path.is_dir() else path
        if not self.file.is_file():
            raise InputError(f"--model: there is no {self.file}")
        try:
            self.config: Any = transformers.AutoConfig.from_pretrained(self.file, local_files_only=True)
        except Exception as error:  # whatever a strange file makes transformers raise
            raise InputError(f"--model: transformers cannot read {self.file}: {one_line(error)}") from error
        patterns = ("*.safetensors", "pytorch_model*.bin") if path.is_dir() else ()
        self.weights = sorted(file for pattern in patterns for file in path.glob(pattern))
        self.is_trained = bool(self.weights)

    def make(self, dtype: torch.dtype) -> nn.Module:
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        if self.weights and torch.get_default_device().type != "meta":
            return self._load(auto, dtype).train().to(torch.get_default_device())  # which transformers does not ask for
        try:
            model = auto.from_config(self.config, dtype=dtype)
        except Exception as error:  # as above
            raise InputError(f"--model: {self.file} makes no causal language model: {one_line(error)}") from error
        switch = next((name for name in ("causal", "is_decoder") if hasattr(model.config, name)), None)
        sees_ahead = type(self.config) in transformers.AutoModelForMaskedLM._model_mapping
        sees_ahead |= self.config.model_type in SEE_AHEAD
        if sees_ahead and not (switch and getattr(model.config, switch)):
            raise InputError(
                f"--model: a token of {self.file} sees the tokens after it, which it is to predict; "
                + (f'set "{switch}": true there' if switch else "no setting of it changes that")
            )
        return model.train()

    def _load(self, auto: Any, dtype: torch.dtype) -> nn.Module:
        """The model with the weights of the folder, all of them: transformers would draw those that do not fit."""
        options = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, found = auto.from_pretrained(self.folder, dtype=dtype, **options)
        except Exception as error:  # as above
            raise InputError(f"--model: transformers cannot load {self.folder}: {one_line(error)}") from error
        odd = [*sorted(found["missing_keys"]), *(f"{name} of this shape" for name, *_ in found["mismatched_keys"])]
        if odd:
            raise InputError(
                f"--model: the weights in {self.folder} lack {odd[0]}{f' and {len(odd) - 1} more' * (len(odd) > 1)}; "
                f"put them there, or give {self.file} to draw all weights from the seed"
            )
        return model

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def digest(self) -> str:
        parts = [json.dumps(json.loads(self.file.read_text()), sort_keys=True), *map(_file_digest, self.weights)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def encoding(self) -> tuple[str, Encode]:
        vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
        if vocabulary is None:
            raise InputError(
                f"--model: {self.file} has no vocab_size, so it is no language model; give module:function, which "
                "returns a model and its loss"
            )
        found = [self.folder / name for name in VOCABULARY if (self.folder / name).is_file()]
        if not found:
            if vocabulary < 256:
                raise InputError(
                    f"--model: {self.folder} has no tokenizer, and its vocabulary of {vocabulary} is too small for "
                    "bytes, which need 256"
                )
            return "bytes", encode_bytes(256 if vocabulary > 256 else 0)
        import transformers

        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # as above
            raise InputError(f"--model: transformers cannot read {found[0]}: {one_line(error)}") from error
        if len(tokenizer) > vocabulary:
            raise InputError(
                f"--model: the tokenizer has {len(tokenizer):,} tokens, and the model's vocabulary {vocabulary:,}"
            )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def encode(texts: list[str]) -> list[Any]:
            try:
                ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
            except Exception as error:  # as above
                raise InputError(f"--model: the tokenizer {found[0]} fails: {one_line(error)}") from error
            made = [np.array([*of_one, *end], np.uint32) for of_one in ids]
            if (largest := max((int(each.max()) for each in made if len(each)), default=0)) >= vocabulary:
                raise InputError(
                    f"--model: the tokenizer gives token id {largest:,}, and the model's vocabulary is {vocabulary:,}"
                )
            return made

        return "tokenizer " + hashlib.sha256("".join(map(_file_digest, found)).encode()).hexdigest()[:16], encode

    def require_fit(self, sequence: int) -> None:
        require_positions("--sequence", sequence, positions_of(without_memory(lambda: self.make(torch.float32))))


class _FromFunction(Source):
    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.function = imported(name)
        except ValueError as error:
            raise InputError(f"--model: {error}") from error
        if not callable(self.function):
            raise InputError(f"--model: {name} must be a function that returns a model and its loss")
        self._loss: Loss | None = None
        self._made: WeakSet[nn.Module] = WeakSet()

    def _call(self) -> Sequence[Any]:
        try:
            made = self.function()
        except Exception as error:  # whatever somebody's function raises
            raise InputError(f"--model: {self.name}() fails: {one_line(error)}{place_of(error)}") from error
        parts = made if isinstance(made, tuple) else (made,)
        fits = len(parts) in (2, 3) and isinstance(parts[0], nn.Module) and all(map(callable, parts[1:]))
        if not fits:
            raise InputError(
                f"--model: {self.name}() must return (model, loss), where loss(model, tokens) is one number, or "
                f"(model, loss, encode), where encode(text) is a list of token ids; got {type(made).__name__}"
            )
        if not self._made.isdisjoint(modules := list(parts[0].modules())):
            raise InputError(
                f"--model: {self.name}() must make a new model each time, and returned what it had returned before, "
                "with which a run would begin where another has ended"
            )
        self._made.update(modules)
        return parts

    def make(self, dtype: torch.dtype) -> nn.Module:
        model, self._loss, *_ = self._call()
        return model.train().to(torch.get_default_device())

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        function = self._loss
        if function is None:
            function = self._loss = self._call()[1]
        try:
            loss = function(model, tokens)
        except (IndexError, RuntimeError) as error:  # on a CPU: it says neither which token nor how many rows
            if not isinstance(error, IndexError) and "out of bounds" not in str(error):
                raise
            most = int(tokens.max())
            raise InputError(
                f"--model: the loss of {self.name}() fails on a batch whose largest token id is {most} "
                f"({one_line(error)}); for it an embedding needs {most + 1} rows or more, and an output as many, or "
                f"{self.name}() an encode that makes smaller ids"
            ) from error
        is_tensor = isinstance(loss, Tensor)
        if is_tensor and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
            return loss
        without = "" if not is_tensor or loss.requires_grad else " without a gradient"
        what = f"a tensor of shape {list(loss.shape)}{without}" if is_tensor else f"a {type(loss).__name__}"
        raise InputError(
            f"--model: the loss of {self.name}() must be one number, in nats per token, with a gradient; got {what}"
        )

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sources = b"".join(dict.fromkeys(file.read_bytes() for file in self._files()))
        return hashlib.sha256(self.name.encode() + b"\n" + sources).hexdigest()[:16]

    def _files(self) -> list[Path]:
        """The sources of the function, of its model's classes and of its loss, without those of installed packages."""
        model, loss, *_ = without_memory(self._call)
        classes = {type(module) for module in model.modules()}
        where = self.name.rpartition(":")[0]
        first = where if where.endswith(".py") else inspect.getsourcefile(sys.modules[where])
        found = {file for made in (self.function, loss, *classes) if (file := _source(made))}
        files = dict.fromkeys(Path(file).resolve() for file in (first, *sorted(found)) if file)
        return [file for file in files if not any(file.is_relative_to(folder) for folder in INSTALLED)]

    def encoding(self) -> tuple[str, Encode]:
        with torch.device("cpu"):
            _, _, *rest = self._call()
        if not rest:
            return "bytes", encode_bytes(0)
        return f"{self.name} {self.digest()}", lambda texts: [self._ids(rest[0], text) for text in texts]

    def _ids(self, encode: Callable[[str], Any], text: str) -> Any:
        try:
            given = encode(text)
            ids = np.asarray(given)
        except Exception as error:  # as above
            raise InputError(f"--model: encode of {self.name}() fails: {one_line(error)}{place_of(error)}") from error
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32)):
            raise InputError(
                f"--model: encode of {self.name}() must return a list of integers of at least 0 and below 2**32, got "
                f"{shown(given)}"
            )
        return ids.astype(np.uint32)


def _source(made: Any) -> str | None:
    """The file in which a class, a function or the class of an object was written, below decorators and ``partial``."""
    made = made.func if isinstance(made, partial) else inspect.unwrap(made)
    with suppress(TypeError):  # of what is built in
        return inspect.getsourcefile(made if inspect.isroutine(made) or isinstance(made, type) else type(made))
    return None


_Made = TypeVar("_Made")


def without_memory(make: Callable[[], _Made]) -> _Made:
    """What ``make`` makes on ``meta``; elsewhere if that fails, such as where it looks at the values that it makes."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return make()


def encode_bytes(separator: int) -> Encode:
    """Texts with a character per byte to their bytes, and ``separator`` after each."""
    return lambda texts: [np.append(np.frombuffer(t.encode("latin-1"), np.uint8), np.uint32(separator)) for t in texts]


_file_digest = cache(file_digest)
