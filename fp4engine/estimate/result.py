"""What an estimate says."""

from dataclasses import dataclass, field

from fp4engine.estimate.gpus import CUDA_RESERVE, GPU


@dataclass(frozen=True)
class Estimate:
    """What one GPU holds and does in a step; bytes, seconds and FLOPs. ``print(estimate)`` shows all of it.

    Attributes:
        label: model, recipe and sizes, in one line.
        parameters: number of parameters of the whole model, adapters left out.
        trained: how many parameters of the whole model, or of its adapters, get gradients.
        parameter_bytes, gradient_bytes, optimizer_bytes: on one GPU.
        saved_by_linears: what linear layers keep from forward to backward, beyond parameters.
        saved_by_rest: what everything else keeps.
        temporary: what is alive at the peak beyond parameters, optimizer and what is kept; gradients too, as far as
            they are there by then. These add up to the peak.
        peak: the most that is allocated at once.
        tokens: in one step of one GPU.
        seconds: time of one step, without communication.
        share_of_peak: FLOPs of the model, 6 per parameter of a linear layer and token, fewer where a gradient is not
            made, and the causal attention, without what runs again in the backward pass, over what the BF16 tensor
            cores could do in ``seconds``.
        wire: bytes that one GPU sends in a step, by what they are.
        gpu: see :class:`GPU`.
        notes: what is not measured in this estimate, in whole sentences.
        has_adapters: whether adapters are trained beside a frozen model.
    """

    label: str
    parameters: int
    trained: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_by_linears: int
    saved_by_rest: int
    temporary: int
    peak: int
    tokens: int
    seconds: float
    share_of_peak: float
    wire: dict[str, int]
    gpu: GPU
    notes: tuple[str, ...] = field(default=())
    has_adapters: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds

    @property
    def wire_bytes(self) -> int:
        """What one GPU sends in a step."""
        return sum(self.wire.values())

    @property
    def fits(self) -> bool:
        """Whether ``peak`` leaves :data:`CUDA_RESERVE` of the GPU's memory free."""
        return self.peak + CUDA_RESERVE <= self.gpu.memory

    @property
    def answer(self) -> str:
        """One line: whether it fits, with the two numbers."""
        verdict = "fits" if self.fits else "does not fit"
        reserve = (
            "" if self.fits or self.peak > self.gpu.memory else f", of which CUDA itself takes {gib(CUDA_RESERVE)}"
        )
        return f"{self.label}: {verdict}, peak {gib(self.peak)} of {gib(self.gpu.memory)} on {self.gpu.name}{reserve}"

    def __str__(self) -> str:
        trained = f", of which {self.trained:,} are trained" if self.trained != self.parameters else ""
        trained = f" frozen, {self.trained:,} of adapters trained" if self.has_adapters else trained
        rows = [
            ("parameters", f"{gib(self.parameter_bytes)}  ({self.parameters:,}{trained})"),
            ("gradients", gib(self.gradient_bytes)),
            ("optimizer", gib(self.optimizer_bytes)),
            ("kept by linears", gib(self.saved_by_linears)),
            ("kept by the rest", gib(self.saved_by_rest)),
            ("temporary", f"{gib(self.temporary)}  (at the peak, with the gradients that are there by then)"),
            ("peak", gib(self.peak)),
            ("step", f"{self.seconds * 1e3:,.1f} ms, {self.tokens:,} tokens"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s, {self.share_of_peak:.0%} of the BF16 peak"),
            ("on the wire", f"{gib(self.wire_bytes)} sent per step"),
            *((f"  {name}", gib(size)) for name, size in self.wire.items() if size),
        ]
        table = "\n".join(f"  {name.ljust(20)}  {value}" for name, value in rows)
        return "\n".join([self.answer, table, *(f"  note: {note}" for note in self.notes)])


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"
