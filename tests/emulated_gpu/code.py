"""What ptxas has made of a kernel, as nvdisasm prints it."""

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import numpy as np
from triton import knobs

SECTION = re.compile(r"\s*\.section\s+([\w.$]+)")
BYTES = re.compile(r"\.byte\s+(.*)")
LABEL = re.compile(r"\s*(\.L_x_\d+|\$[\w$]+):")
INSTRUCTION = re.compile(
    r"\s+/\*(?P<place>[0-9a-f]{4,})\*/\s+(?:@(?P<negated>!?)(?P<guard>U?P\d|U?PT)\s+)?"
    r"(?P<name>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)


class Line(NamedTuple):
    """An instruction.

    Attributes:
        name: with its modifiers, split at the points.
        guard: the predicate that decides whether it is obeyed, with a "!" if it must be false; "" for none.
        place, following: addresses of this instruction and of the next.
    """

    name: tuple[str, ...]
    operands: list[str]
    guard: str
    place: int
    following: int


class Code:
    """A kernel's instructions.

    Args:
        cubin: of the kernel.
        capability: of the GPU, as 10 * major + minor.

    Attributes:
        lines: the instructions by their addresses.
        labels: the addresses of what can be jumped to.
        constants: bytes that the compiler has put beside the code, constant bank 2.
    """

    def __init__(self, cubin: bytes, capability: int) -> None:
        self.capability = capability
        self.labels: dict[str, int] = {}
        found: list[tuple[int, Any]] = []
        waiting: list[str] = []
        self.constants = np.zeros(0, np.uint8)
        section = ""
        for text in disassembled(cubin).splitlines():
            if match := SECTION.match(text):
                section = match[1]
            if section.startswith(".nv.constant2") and (match := BYTES.search(text)):
                values = [int(value, 0) for value in match[1].split(",")]
                self.constants = np.append(self.constants, np.array(values, np.uint8))
            if not section.startswith(".text"):
                continue
            if label := LABEL.match(text):
                waiting.append(label[1])
            match = INSTRUCTION.match(text)
            if match is None:
                continue
            place = int(match["place"], 16)
            self.labels |= dict.fromkeys(waiting, place)
            waiting = []
            operands = [part.strip().replace(".reuse", "") for part in match["operands"].split(",") if part.strip()]
            guard = match["negated"] + match["guard"] if match["guard"] else ""
            found.append((place, (tuple(match["name"].split(".")), operands, guard)))
        following = [place for place, _ in found[1:]] + [-1]
        self.lines = {place: Line(*rest, place, after) for (place, rest), after in zip(found, following, strict=True)}


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
