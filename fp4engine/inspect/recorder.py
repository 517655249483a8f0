"""Statistics of a training run, step by step, as JSON lines.

A run is a folder with ``record.jsonl``: one object per line, and the first line says what was recorded. The kinds of
rows are described at :func:`record`.
"""

import json
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fp4engine.accounting.planned import linear_shape
from fp4engine.arguments import require_bool, require_integer, require_model, require_path, require_patterns
from fp4engine.formats import CastSpec
from fp4engine.inspect import statistics
from fp4engine.inspect.reading import FILE, append, cut_unfinished_line, stamp
from fp4engine.inspect.rows import Part, Row, described, has_process_group
from fp4engine.inspect.statistics import Counted, Figures
from fp4engine.inspect.watch import Seen, Spread, drawn, layers_of, watching
from fp4engine.modules import Gemms
from fp4engine.names import covers
from fp4engine.roles import TensorType
from fp4engine.steps import ends_step, hearing_steps, hooked
from fp4engine.version import __version__

_UNSEEN = "no forward pass in training mode and with gradients went through it in this step"
_encode = json.JSONEncoder(allow_nan=False).encode


class _Stance:
    """Makes compiled functions run eagerly while any region records a step.

    PyTorch's stances must end in reverse order, but the recorded steps of several regions end in any order.
    """

    def __init__(self) -> None:
        self._regions = 0
        self._forced = ExitStack()
        self._lock = Lock()  # the stance is the process's, and threads may record

    @contextmanager
    def eager(self) -> Generator[None]:
        """A region of a step that is recorded.

        Raises:
            RuntimeError: it begins inside compiled code, where PyTorch takes no stance.
        """
        with self._lock:
            if not self._regions:
                try:
                    self._forced.enter_context(torch.compiler.set_stance("force_eager"))
                except RuntimeError as error:
                    raise RuntimeError(
                        "inspect.record can begin no step inside compiled code, as where torch.compile runs the "
                        "optimizer's step: pass optimizer='by hand', and call the recorder's step() after that code"
                    ) from error
            self._regions += 1
        try:
            yield
        finally:
            with self._lock:
                self._regions -= 1
                if not self._regions:
                    self._forced.close()


_stance = _Stance()
eager_stance = _stance.eager


def _rounds_alike(spec: CastSpec) -> bool:
    """Whether a stochastic cast's draws are of one tensor: fresh signs rotate it anew at each."""
    return spec.is_stochastic and not (spec.rotation and spec.rotation.signs.is_fresh)


class Recorder:
    """What :func:`record` yields.

    Attributes:
        step_number: the step that is running, from ``first_step``.
        path: the file that rows are appended to.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        out: Path,
        every: int,
        patterns: Sequence[str],
        first_step: int,
        draws: int,
        shadow_rows: int,
        writer: Any,
    ) -> None:
        self.path = out / FILE
        self.step_number = first_step
        self._layers = _chosen(model, patterns)
        self._every, self._draws, self._shadow_rows, self._writer = every, draws, shadow_rows, writer
        self._heard: Heard | None = None
        self._left: tuple[int, int] | None = None  # what the file was after the last rows
        self._unwritten: tuple[int, Iterator[dict[str, Any]]] | None = None
        self._active = ExitStack()
        self._recorded = self._ended = False

    @property
    def is_recording(self) -> bool:
        """Whether the step that is running is recorded."""
        return self._heard is not None

    def step(self) -> None:
        """End a step, and begin the next; an optimizer's step does so by itself unless ``optimizer="by hand"``.

        Raises:
            RuntimeError: the region has ended.
        """
        if self._ended:
            raise RuntimeError("the region of inspect.record has ended, so it has no further steps; call step() inside")
        self._end()
        self.step_number += 1
        self._begin()

    def _begin(self) -> None:
        with _stance.eager():
            pass  # raises at the first step that is told by compiled code, and not at a later one that is recorded
        if self.step_number % self._every:
            return
        self._heard = Heard(self._draws, self._shadow_rows)
        self._active.enter_context(_stance.eager())
        self._active.enter_context(watching(self._layers, self._heard))

    def _end(self, abandoned: bool = False) -> None:
        """End a step. Its rows are written when the next one ends, since the device has computed them by then."""
        heard, self._heard = self._heard, None
        unwritten, self._unwritten = self._unwritten, None
        self._ended = abandoned  # only the step that the end of the region cuts off is abandoned
        self._active.close()
        try:
            if heard is not None and not abandoned:
                self._unwritten = self.step_number, chain(self._refused(heard), described(heard.rows))
                self._recorded = True
        finally:
            if unwritten is not None:
                self._write(*unwritten)

    def _refused(self, heard: "Heard") -> Iterator[dict[str, Any]]:
        told = {row.fields["layer"] for row in heard.rows} | heard.refusals.keys()
        unseen = dict.fromkeys([name for name in self._layers if name not in told], _UNSEEN)
        for layer, reason in (heard.refusals | unseen).items():
            yield {"kind": "refusal", "layer": layer, "reason": reason}

    def _write(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, making one at a time, since thousands of lists at once would set off the garbage collector."""
        if _rank() != 0:
            return
        lines: list[str] = []
        for row in rows:
            lines.append(_encode({"step": step, **row}) + "\n")
            if self._writer is not None:
                for tag, value in scalars(row):
                    self._writer.add_scalar(tag, value, step)
        if self._left is not None and stamp(self.path) != self._left:
            raise RuntimeError(
                f"{self.path} is not as this region of inspect.record left it: another one writes there too, or the "
                "file was moved; runs at the same time need folders of their own"
            )
        self._left = append(self.path, lines)
        if self._writer is not None:
            self._writer.flush()


class Heard:
    """Collects the rows of a recorded step: the listener of its layers.

    Attributes:
        rows: in the order of the record.
        refusals: why a layer was not seen.
    """

    def __init__(self, draws: int, shadow_rows: int) -> None:
        self.rows: list[Row] = []
        self.refusals: dict[str, str] = {}
        self._draws, self._shadow_rows = draws, shadow_rows
        self._tensors: dict[tuple[str, TensorType], Row] = {}  # rows that wait for the first product of their tensor
        self._operands: dict[tuple[str, TensorType, str], tuple[Figures, int]] = {}

    def refuse(self, layer: str, reason: str) -> None:
        self.refusals[layer] = reason

    def made(self, layer: str, tensors: dict[TensorType, Tensor], operands: Sequence[Seen]) -> None:
        """Count the tensors and the operands of a pass."""
        cast = [seen for seen in operands if seen.spec is not None]
        counted = [Counted(seen.source, seen.operand, seen.rng, seen.stream) for seen in cast]
        figures = statistics.figures_of(list(tensors.values()), counted)
        spread = operands[0].spread
        wholes = {role: None if spread is None else spread.whole(role, "rowwise") for role in tensors}
        for number, role in enumerate(tensors):
            if spread is not None and (whole := wholes[role]) is not None:
                figures = figures.among_channels(number, spread.place(role, "rowwise")[1], whole[1])
        for number, (role, matrix) in enumerate(tensors.items()):
            fields = {"kind": "tensor", "layer": layer, "role": role, "shape": list(wholes[role] or matrix.shape)}
            row = Row(fields, figures, number, part=Part(elements=matrix.numel()))
            self._tensors[layer, role] = _spread_row(row, spread, role, "rowwise")
        for number, seen in enumerate(cast, len(tensors)):
            self._operands[layer, seen.role, seen.side] = figures, number

    def multiplied(self, layer: str, gemm: str, operands: tuple[Seen, Seen]) -> None:
        """Add the rows of a product: of its tensors, unless they are there already, of its operands, and its own."""
        for seen in operands:
            if row := self._tensors.pop((layer, seen.role), None):
                self.rows.append(row)
        for seen in operands:
            if seen.spec is None:
                continue
            fields = {"layer": layer, "gemm": gemm, "role": seen.role, "side": seen.side}
            figures, number = self._operands[layer, seen.role, seen.side]
            row = Row({"kind": "operand", **fields, "cast": seen.spec.label}, figures, number, seen.spec)
            self.rows.append(_spread_row(row, seen.spread, seen.role, seen.side))
            if self._draws and _rounds_alike(seen.spec) and seen.quantizer.columnwise_source == "original":
                decoded = list(drawn(seen, self._draws))
                figures = statistics.rounding_figures(seen.prepared()[:, : decoded[0].shape[1]], decoded)
                row = Row({"kind": "rounding", **fields, "draws": self._draws}, figures)
                self.rows.append(_spread_row(row, seen.spread, seen.role, seen.side))
        if any(seen.spec is not None for seen in operands):
            self.rows.append(self._product_row(layer, gemm, *operands))

    def _product_row(self, layer: str, gemm: str, left: Seen, right: Seen) -> Row:
        spread, rows, first = left.spread, left.source.shape[0], 0
        terms: tuple[Any, ...] = ()  # groups whose ranks hold other terms of the sums
        parts: tuple[Any, ...] = ()  # groups whose ranks hold other rows or columns of the product
        if spread is not None:
            whole = spread.whole(left.role, left.side)
            if whole is not None:
                rows, (first, _) = whole[0], spread.place(left.role, left.side)
            terms = spread.groups(left.role, left.side, 1)
            parts = spread.groups(left.role, left.side, 0) + spread.groups(right.role, right.side, 0)
        count, chosen = min(self._shadow_rows, rows), None
        if count < rows:  # those of the evenly spread ones that this rank has
            begin, end = (-(-row * count // rows) for row in (first, first + left.source.shape[0]))
            chosen = torch.arange(begin, end, device=left.source.device) * rows // count - first
        sources, made = (left.source, right.source), (left.operand, right.operand)
        fields = {"kind": "gemm", "layer": layer, "gemm": gemm, "rows": count, "of_rows": rows}
        figures = statistics.product_figures(sources, made, chosen, terms)
        return Row(fields, figures, part=Part(counts=spread is None or spread.is_first(*parts)))


@contextmanager
def record(
    model: torch.nn.Module,
    out: str | Path,
    *,
    every: int = 100,
    layers: str | Sequence[str] = "**",
    optimizer: Optimizer | Literal["by hand"] | None = None,
    first_step: int = 0,
    draws: int = 0,
    shadow_rows: int = 256,
    tensorboard: bool = False,
) -> Generator[Recorder]:
    """Region around a training loop in which every ``every``-th step is recorded in the folder ``out``::

        with inspect.record(model, "runs/look", every=100, layers="**.mlp.*"):
            for batch in data: ...

    Training goes on with the same bytes: nothing is drawn from any random stream, and the layers compute as ever. What
    is recorded are the operands of the step itself, made once more by the layers' own quantizers with the step's own
    draw. Of each layer the first forward pass of a step that is in training mode and with gradients, and its backward
    pass, are recorded, not further microbatches.
    A step of a compiled model that is recorded runs eagerly. The rows of a step are written when the next one ends, or
    the region, so that the step does not wait for the device. Ranks of ``torch.distributed`` all have to record; sums
    and maxima are taken over all of them, and rank 0 writes. A weight that has the same figures on every rank counts
    once. Under tensor parallelism the figures are those of one process: what several ranks hold counts once, rows and
    columns are those of the whole tensor, and a product is the sum of its parts.

    Rows have ``step``, ``kind``, and by kind:

    - ``run`` (the first line of each region): versions, ``every``, ``layers``, the ``roles`` in which recipes see them,
      ``world_size``;
    - ``tensor``, per layer and role: ``shape`` on one rank, or of a DTensor's whole, ``amax``, ``rms``, ``nonfinite``
      elements, and ``channels``, the largest of its last axis as ``[index, amax over the median channel's amax]``;
    - ``operand``, per layer, GEMM, role and side: the ``cast``; ``nonfinite`` elements; ``amax`` of the outer scales
      (None if one is not finite); ``sqnr_db``, signal over error; shares of elements that are ``zeros``,
      ``rounded_to_zero`` (None beside what is not finite) and ``saturated``; of ``blocks``, shares whose scale
      underflows to zero or overflows its bound; ``scale_spread_octaves``, the standard deviation of log2 of the nonzero
      block scales, and their ``scale_range_octaves``; ``codes`` and ``scale_codes``, histograms; ``worst``, blocks as
      ``[row, col, share of the operand's error, sqnr_db, rank]``;
    - ``gemm``, per layer: ``snr_db`` and ``relative_error`` of the product of the operands against the product of the
      tensors that were cast, both summed in FP32, over ``rows`` evenly chosen rows of ``of_rows``;
    - ``rounding``, per stochastic operand and only with ``draws``, unless each draw rotates it otherwise: ``bias``, an
      estimate of ``|E[x_hat] - x|^2 / |x|^2``, and ``noise``, the mean over draws of ``|x_hat - x|^2 / |x|^2``;
    - ``refusal``: a layer that was asked for and not seen in this step, or a product of it, and why.

    Args:
        model: a converted model, also one compiled or wrapped for data-parallel training.
        out: a folder; rows are appended to its ``record.jsonl``.
        every: steps from one recorded step to the next, counted from step 0.
        layers: patterns over the names of the layers, see :func:`fp4engine.names.covers`. A name is the layer's path
            in ``model`` without what wrappers add to it, such as ``module`` and ``_orig_mod``.
        optimizer: whose ``step()`` ends a step; None is the one optimizer that holds parameters of the model, and
            ``"by hand"`` means that the loop calls :meth:`Recorder.step`.
        first_step: number of the first step, for a run that is resumed.
        draws: how many draws of each stochastic cast to average, 0 or at least 2.
        shadow_rows: how many rows of each product are computed in high precision.
        tensorboard: also write scalars as TensorBoard events into ``out``.

    Raises:
        ValueError: an argument outside its words, a pattern that matches no layer, a model without layers, an ``out``
            that cannot be made.
        ImportError: ``tensorboard=True`` where ``torch.utils.tensorboard`` cannot be imported.
        RuntimeError: a second optimizer that holds parameters of the model takes a step while ``optimizer`` is None;
            compiled code runs the step of ``optimizer``; a recorded step is captured in a CUDA graph; the ranks
            recorded different layers; another region writes into ``out`` at the same time.

    Warns:
        UserWarning: the region ends without a recorded step.
    """
    every, first_step = require_integer("every", every, 1), require_integer("first_step", first_step, 0)
    draws, shadow_rows = require_integer("draws", draws, 0), require_integer("shadow_rows", shadow_rows, 1)
    if draws == 1:
        raise ValueError("draws must be 0, or 2 or more whose mean says something, got 1")
    if optimizer is not None and optimizer != "by hand" and not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be an optimizer, 'by hand' or None, got {optimizer!r}")
    require_model(model)
    require_bool("tensorboard", tensorboard)
    folder = require_path("out", out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, and {str(folder)!r} is a file")
    patterns = [layers] if isinstance(layers, str) else require_patterns("layers", layers)
    writer = _tensorboard(folder) if tensorboard and _rank() == 0 else None
    recorder = Recorder(model, folder, every, patterns, first_step, draws, shadow_rows, writer)
    with _steps_told_by(optimizer, model, recorder):
        _make_folder(folder)
        if _rank() == 0:
            cut_unfinished_line(recorder.path)
        recorder._write(first_step, [_header(recorder, every)])
        recorder._begin()
        try:
            yield recorder
        except BaseException:
            try:
                recorder._end(abandoned=True)
            except Exception as error:  # the exception that ended the region says more
                warnings.warn(f"inspect.record could not write its last step: {error}", stacklevel=3)
            raise
    recorder._end(abandoned=True)  # a step that no optimizer ended
    if writer is not None:
        writer.close()
    if not recorder._recorded:
        warnings.warn(
            f"inspect.record ended without a recorded step: no step that is a multiple of every={every} was ended by "
            "an optimizer; with optimizer='by hand' the loop calls step()",
            stacklevel=3,
        )


def _make_folder(folder: Path) -> None:
    """Make ``folder``, which is to hold a record.

    Raises:
        ValueError: it cannot be made, or a folder has the record's name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder, and {str(folder)!r} cannot be made: {error}") from error
    if (folder / FILE).is_dir():
        raise ValueError(f"out must be a folder for the file {FILE}, and in {str(folder)!r} that is a folder")


@contextmanager
def _steps_told_by(
    optimizer: Optimizer | Literal["by hand"] | None, model: torch.nn.Module, recorder: Recorder
) -> Generator[None]:
    if optimizer == "by hand":
        yield
        return
    told_by: list[Optimizer] = []

    def after_step(stepped: Optimizer, *_: Any) -> None:
        if not ends_step(stepped):
            return
        if optimizer is not None or stepped in told_by:
            recorder.step()
        elif _holds(stepped, model):
            if told_by:
                raise RuntimeError(
                    "two optimizers hold parameters of the model, so it is not known which one ends a step; "
                    "pass inspect.record(optimizer=...) one of them, or optimizer='by hand' and call step()"
                )
            told_by.append(stepped)
            recorder.step()

    if optimizer is None:
        with hearing_steps(after_step):
            yield
        return
    handle = hooked(optimizer).register_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()


def _holds(optimizer: Optimizer, model: torch.nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _chosen(model: torch.nn.Module, patterns: Sequence[str]) -> dict[str, Gemms]:
    layers = layers_of(model)
    if not patterns:
        raise ValueError("layers must have at least one pattern, got none")
    for pattern in patterns:
        if not any(covers(pattern, name) for name in layers):
            raise ValueError(
                f"layers pattern {pattern!r} matches none of the model's layers, which are called, for example, "
                f"{', '.join(map(repr, list(layers)[:3]))}"
            )
    return {name: layer for name, layer in layers.items() if any(covers(pattern, name) for pattern in patterns)}


def _header(recorder: Recorder, every: int) -> dict[str, Any]:
    return {
        "kind": "run",
        "fp4engine": __version__,
        "torch": str(torch.__version__),
        "every": every,
        "world_size": dist.get_world_size() if has_process_group() else 1,
        "layers": list(recorder._layers),
        "roles": {
            name: {"module_type": layer.module_type, "name": layer.name, "shape": linear_shape(layer)}
            for name, layer in recorder._layers.items()
        },
    }


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ImportError("inspect.record(tensorboard=True) needs the package tensorboard; install it") from error
    return SummaryWriter(str(folder))


def _rank() -> int:
    return dist.get_rank() if has_process_group() else 0


def _spread_row(row: Row, spread: Spread | None, role: TensorType, side: str) -> Row:
    """``row`` with this rank's place in the whole operand or tensor, and whether this rank counts it.

    Of several ranks of a mesh that hold the same, the first counts it. Weights are counted by all and compared when
    ranks are merged (:func:`fp4engine.inspect.rows.described`), since data-parallel ranks off the mesh hold them too.
    """
    if spread is None:
        return row
    parts = [group for axis in (0, 1) for group in spread.groups(role, side, axis)]
    counts = role == "weight" or spread.is_first(*parts)
    return row._replace(part=row.part._replace(place=spread.place(role, side), counts=counts))


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """``(tag, value)`` of the numbers of a row that can be drawn over time."""
    if row["kind"] == "run":
        return
    place = "/".join(str(row[name]) for name in ("layer", "gemm", "role", "side") if name in row)
    for name, value in row.items():
        if name not in ("step", "kind", "elements", "blocks", "rows", "of_rows", "draws") and isinstance(
            value, (int, float)
        ):
            yield f"{place}/{name}", float(value)
