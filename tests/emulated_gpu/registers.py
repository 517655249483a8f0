"""The operands of instructions: registers, predicates, constants and numbers of all threads of a program."""

import re

import numpy as np

from tests.emulated_gpu.rounding import from_bf16, from_fp16

WARP = 32
MASK = np.uint64(0xFFFFFFFF)
NUMBER = re.compile(r"[-+]?(\d|INF|QNAN)")
"""How an operand begins that is a floating-point number."""
FLAG = re.compile(r"!?U?P(\d|T)")


class Registers:
    """What the threads of a program hold. Bits are in unsigned integers of 64, one per thread.

    Attributes:
        threads: how many.
        constants: the bytes of constant banks 0 and 2.
    """

    def __init__(self, threads: int, constants: dict[int, np.ndarray], seed: int) -> None:
        self.threads, self.constants = threads, constants
        self._held: dict[str, np.ndarray] = {}
        self._junk = np.random.default_rng(seed)

    def register(self, name: str) -> np.ndarray:
        if name in ("RZ", "URZ"):
            return np.zeros(self.threads, np.uint64)
        if name not in self._held:
            self._held[name] = self._junk.integers(0, 1 << 32, self.threads, dtype=np.uint64)
        return self._held[name]

    def flag(self, operand: str) -> np.ndarray:
        """A predicate."""
        name = operand.lstrip("!")
        if name in ("PT", "UPT"):
            found = np.ones(self.threads, bool)
        else:
            if name not in self._held:
                self._held[name] = self._junk.integers(0, 2, self.threads).astype(bool)
            found = self._held[name]
        return ~found if operand[0] == "!" else found

    def write(self, name: str, found: np.ndarray, mask: np.ndarray) -> None:
        """Give a register or predicate to the threads of ``mask``.

        What a warp shares (``UR4``, ``UP0``) its threads must agree on.
        """
        if name in ("RZ", "URZ", "PT", "UPT"):
            return
        if found.dtype == np.float32:
            found = found.view(np.uint32)
        if found.dtype != bool:
            found = found.astype(np.int64).view(np.uint64) & MASK
        if name[0] == "U":
            found, mask = found.copy(), mask.copy()
            for warp in np.unique(np.flatnonzero(mask) // WARP):
                threads = slice(warp * WARP, (warp + 1) * WARP)
                ours = found[threads][mask[threads]]
                assert (ours == ours[0]).all(), f"threads of a warp have different {name}"
                found[threads], mask[threads] = ours[0], True
        before = self.flag(name) if found.dtype == bool else self.register(name)
        self._held[name] = np.where(mask, found, before)

    def write_pair(self, name: str, found: np.ndarray, mask: np.ndarray) -> None:
        self.write(name, found & MASK, mask)
        self.write(after(name), found >> np.uint64(32), mask)

    def value(self, operand: str, bits: int = 32) -> np.ndarray:
        """An integer."""
        if operand[0] in "-~" and not re.match(r"-\d", operand):
            found = self.value(operand[1:], bits)
            return (~found if operand[0] == "~" else np.uint64(0) - found) & np.uint64((1 << bits) - 1)
        if match := re.fullmatch(r"c\[(0x[02])\]\[(0x[0-9a-f]+)\]", operand):
            word = self.constants[int(match[1], 16)][int(match[2], 16) :][: bits // 8]
            return np.full(self.threads, int.from_bytes(word.tobytes(), "little"), np.uint64)
        if operand.lstrip("U").startswith("R"):
            return self.register(operand)
        return np.full(self.threads, int(operand, 0) % (1 << bits), np.uint64)

    def signed(self, operand: str) -> np.ndarray:
        return self.value(operand).astype(np.uint32).view(np.int32).astype(np.int64)

    def pair(self, operand: str) -> np.ndarray:
        """64 bits: of two registers, of a constant or of a number."""
        name = operand.removesuffix(".64")
        if name in ("RZ", "URZ") or not name.lstrip("U").startswith("R"):
            return self.value(name, 64)
        return self.register(name) | (self.register(after(name)) << np.uint64(32))

    def number(self, operand: str, dtype: type = np.float32) -> np.ndarray:
        """FP32, or FP64 in two registers."""
        if NUMBER.match(operand) and not operand.startswith("0x"):
            return np.full(self.threads, float(operand.replace("QNAN", "nan")), dtype)
        if operand[0] == "-":
            return -self.number(operand[1:], dtype)
        if operand[0] == "|":
            return np.abs(self.number(operand.strip("|"), dtype))
        if dtype == np.float64:
            return self.pair(operand).view(dtype)
        return self.value(operand).astype(np.uint32).view(dtype)

    def halves(self, operands: list[str], is_bf16: bool) -> list[list[np.ndarray]]:
        """Of each operand its lower and its upper number, in FP64. Two constants in a row are one operand."""
        found: list[list[np.ndarray]] = []
        waiting = list(operands)
        while waiting:
            operand = waiting.pop(0)
            if NUMBER.match(operand) and not operand.startswith("0x"):
                pair = (waiting.pop(0), operand)
                found.append([np.full(self.threads, float(one.replace("QNAN", "nan"))) for one in pair])
                continue
            match = re.fullmatch(r"(-?)(\|?)(\w+)\|?(?:\.H([01])_H([01]))?", operand)
            assert match is not None, operand
            bits = self.value(match[3])
            both = []
            for half in (int(match[4] or 0), int(match[5] or 1)):
                word = bits >> np.uint64(16 * half) & np.uint64(0xFFFF)
                number = from_bf16(word) if is_bf16 else from_fp16(word)
                number = np.abs(number) if match[2] else number
                both.append(-number if match[1] else number)
            found.append(both)
        return found


def after(register: str, count: int = 1) -> str:
    """The register ``count`` places on."""
    if register in ("RZ", "URZ"):
        return register
    kind, number = register.rstrip("0123456789"), register.lstrip("UR")
    return f"{kind}{int(number) + count}"


def warps_of(mask: np.ndarray) -> np.ndarray:
    """All threads of the warps that have one in ``mask``."""
    return mask.reshape(-1, WARP).any(1).repeat(WARP)


def require_whole_warps(mask: np.ndarray) -> None:
    """For what the threads of a warp do together."""
    assert (mask == warps_of(mask)).all(), "threads of a warp part"
