"""Will a model train in low precision? Paired runs of recipes beside a baseline, their verdict, and a page about them.

``fp4engine compare`` makes runs and page; :class:`Recorder` lets any training loop write the files of runs that
``fp4engine compare --runs`` reads.
"""

from fp4engine.compare.files import InputError
from fp4engine.compare.recorder import HIGH_PRECISION, Recorder, Run
from fp4engine.compare.results import Result, read, read_folders

__all__ = ["HIGH_PRECISION", "InputError", "Recorder", "Result", "Run", "read", "read_folders"]
