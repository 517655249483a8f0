"""Looking inside a training run: statistics of operands and products, and which of them cost accuracy."""

from fp4engine.inspect.one_pass import Effect, OnePass, one_pass
from fp4engine.inspect.reading import read
from fp4engine.inspect.recorder import Recorder, record
from fp4engine.inspect.report import html
from fp4engine.inspect.search import Advice, Culprit, Findings, bisect, sensitivity

__all__ = [
    "Advice",
    "Culprit",
    "Effect",
    "Findings",
    "OnePass",
    "Recorder",
    "bisect",
    "html",
    "one_pass",
    "read",
    "record",
    "sensitivity",
]
