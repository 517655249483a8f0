"""PTX run on the CPU by NumPy: one program of a kernel that Triton has compiled, whose threads take each line together.

It knows the instructions that the casts use. What it is for: kernels with PTX of their own, which Triton's interpreter
does not run, are held to the reference where there is no GPU. It also notes threads that meet in shared memory.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WARP = 32
SHARED = 1 << 16
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
"""The magnitudes of E4M3, by their codes."""

Line = tuple[str, list[str], str, bool]
"""Instruction, operands, and the predicate that decides, which may be negated."""


class Program:
    """A program of ``128`` threads.

    Args:
        ptx: of one kernel.
        arguments: of the kernel, in the order of its parameters; addresses are places in ``memory``.
        memory: bytes that the kernel reads and writes.
        number: of the program in a one-dimensional grid.
    """

    def __init__(self, ptx: str, arguments: Sequence[int], memory: np.ndarray, number: int = 0) -> None:
        self.lines, self.labels = parsed(ptx)
        self.arguments, self.memory, self.number = arguments, memory, number
        self.shared = np.zeros(SHARED, np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.threads = np.arange(128, dtype=np.uint64)
        self.between = 0  # barriers that have been passed
        self.writer = np.full((2, SHARED), -1)  # between which barriers, and which warp
        self.reader = np.full((2, SHARED), -1)
        self.races: list[str] = []

    def run(self) -> None:
        place = 0
        with np.errstate(all="ignore"):
            while place < len(self.lines):
                place = self._step(place)

    def _step(self, place: int) -> int:
        name, operands, predicate, negated = self.lines[place]
        mask = np.ones(128, bool)
        if predicate:
            mask = self.registers[predicate].astype(bool) ^ negated
        kind, *words = name.split(".")
        if kind == "ret":
            return len(self.lines)
        if kind == "bra":
            assert mask.all() or not mask.any(), "threads part"
            return self.labels[operands[0]] if mask.all() else place + 1
        if kind == "bar":
            self.between += 1
        elif kind in ("ld", "st") and "param" not in words:
            self._move(kind, words, operands, mask)
        elif kind == "stmatrix":
            self._store_matrix(operands)
        elif kind != "griddepcontrol":
            self._compute(kind, words, operands, mask)
        return place + 1

    def value(self, operand: str, bits: int = 32) -> np.ndarray:
        """Bits of an operand, in unsigned integers of 64."""
        if operand in self.registers:
            found = self.registers[operand]
        elif operand == "%tid.x":
            found = self.threads
        elif operand == "%ctaid.x":
            found = np.full(128, self.number, np.uint64)
        elif operand.startswith("0f"):
            found = np.full(128, int(operand[2:], 16), np.uint64)
        else:
            number = 0 if operand == "global_smem" else int(operand.rstrip("U"), 0)
            found = np.full(128, number % (1 << 64), np.uint64)
        return found & np.uint64((1 << bits) - 1)

    def signed(self, operand: str, bits: int = 32) -> np.ndarray:
        found = self.value(operand, bits)
        return (found << np.uint64(64 - bits)).view(np.int64) >> (64 - bits)

    def number_of(self, operand: str) -> np.ndarray:
        """FP32."""
        return self.value(operand).astype(np.uint32).view(np.float32)

    def write(self, operand: str, found: Any, mask: np.ndarray | None = None) -> None:
        if found.dtype == np.float32:
            found = found.view(np.uint32)
        found = found.astype(np.int64).view(np.uint64) if found.dtype != np.uint64 else found
        if mask is not None and not mask.all() and operand in self.registers:
            found = np.where(mask, found, self.registers[operand])
        self.registers[operand] = found

    def _move(self, kind: str, words: list[str], operands: list[str], mask: np.ndarray) -> None:
        size = int(words[-1][1:]) // 8
        names, address = (operands[0], operands[1]) if kind == "ld" else (operands[1], operands[0])
        at = self._address(address)
        memory = self.shared if "shared" in words else self.memory
        registers = [name.strip() for name in names.strip("{} ").split(",")]
        assert not (at[mask] % (size * len(registers))).any(), "misaligned address"
        for index, register in enumerate(registers):
            places = (at + index * size)[:, None] + np.arange(size)
            if "shared" in words:
                self._meet(kind, places[mask], np.flatnonzero(mask) // WARP)
            if kind == "ld":
                found = np.zeros((128, 8), np.uint8)
                found[mask, :size] = memory[places[mask]]
                self.write(register, found.view(np.uint64)[:, 0], mask)
            else:
                memory[places[mask]] = self.value(register, 64).view(np.uint8).reshape(128, 8)[mask, :size]

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.value(base.strip(), 64).astype(np.int64) + int(offset or "0", 0)

    def _meet(self, kind: str, places: np.ndarray, warps: np.ndarray) -> None:
        """Note whether warps touch the same shared memory with no barrier between, and one of them writes."""
        for row, warp in zip(places, warps, strict=True):
            others = [self.writer] if kind == "ld" else [self.writer, self.reader]
            for when, who in others:
                if ((when[row] == self.between) & (who[row] != warp)).any():
                    self.races.append(f"{kind} by warp {warp}")
            self.writer[:, row] = self.writer[:, row] if kind == "ld" else [[self.between], [warp]]
            self.reader[:, row] = self.reader[:, row] if kind == "st" else [[self.between], [warp]]

    def _store_matrix(self, operands: list[str]) -> None:
        """``stmatrix``: 8x8 elements of 16 bits; lane 8 j + i has the address of row i of matrix j."""
        address = self._address(operands[0])
        assert not (address % 16).any(), "misaligned address"
        for index, register in enumerate(name.strip() for name in operands[1].strip("{} ").split(",")):
            for thread in range(128):
                warp, lane = divmod(thread, WARP)
                place = address[warp * WARP + 8 * index + lane // 4] + 4 * (lane % 4)
                word = np.array([self.value(register)[thread]], np.uint32)
                self._meet("st", np.arange(place, place + 4)[None], np.array([warp]))
                self.shared[place : place + 4] = word.view(np.uint8)

    def _compute(self, kind: str, words: list[str], operands: list[str], mask: np.ndarray) -> None:
        target, *sources = operands
        type_ = words[-1]
        if kind == "ld":  # of a parameter
            index = int(re.search(r"_param_(\d+)", sources[0])[1])
            self.write(target, np.full(128, self.arguments[index], np.int64))
        elif kind == "mov":
            self._mov(target, sources[0], 1 if type_ == "pred" else int(type_[1:]), mask)
        elif kind == "selp":
            self.write(target, np.where(self.value(sources[2], 1) > 0, *(self.value(s, 64) for s in sources[:2])), mask)
        elif kind == "setp":
            self.write(target, self._compare(words[0], type_, sources), mask)
        elif kind == "prmt":
            self.write(target, permuted(*(self.value(source) for source in sources)), mask)
        elif kind == "shfl":
            assert "bfly" in words, "lanes are exchanged otherwise"
            partner = self.threads ^ self.value(sources[1])
            self.write(target, self.value(sources[0])[partner.astype(int)], mask)
        elif kind == "redux":
            largest = self.signed(sources[0]).reshape(-1, WARP).max(1).repeat(WARP)
            self.write(target, largest & 0xFFFFFFFF, mask)
        elif kind == "cvt":
            self.write(target, self._converted(words, sources), mask)
        elif "bf16x2" in words or "f16x2" in words:
            self.write(target, self._halves(kind, words, sources), mask)
        elif type_ == "f32" or words[:1] == ["f32"]:
            self.write(target, floats(kind, words, [self.number_of(source) for source in sources]), mask)
        elif type_ == "pred":
            flags = [self.value(source, 1) > 0 for source in sources]
            self.write(target, {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[kind](*flags), mask)
        else:
            self.write(target, self._integers(kind, words, sources), mask)

    def _mov(self, target: str, source: str, bits: int, mask: np.ndarray) -> None:
        if source.startswith("{"):
            low, high = (self.value(part.strip(), bits // 2) for part in source.strip("{}").split(","))
            self.write(target, low | (high << np.uint64(bits // 2)), mask)
        elif target.startswith("{"):
            found = self.value(source, bits)
            for shift, part in enumerate(target.strip("{}").split(",")):
                half = (found >> np.uint64(shift * bits // 2)) & np.uint64((1 << bits // 2) - 1)
                self.write(part.strip(), half, mask)
        else:
            self.write(target, self.value(source, bits), mask)

    def _compare(self, how: str, type_: str, sources: list[str]) -> np.ndarray:
        if type_ == "f32":
            a, b = (self.number_of(source) for source in sources)
        elif type_ == "f16":
            a, b = (self.value(source, 16).astype(np.uint16).view(np.float16) for source in sources)
        else:
            read = self.signed if type_[0] == "s" else self.value
            a, b = (read(source, int(type_[1:])) for source in sources)
        if how in ("nan", "num"):
            return (np.isnan(a) | np.isnan(b)) == (how == "nan")
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        compare |= {"eq": np.equal, "ne": np.not_equal}
        found = compare[how[:2]](a, b)
        return found | np.isnan(a) | np.isnan(b) if type_[0] == "f" and how.endswith("u") else found

    def _converted(self, words: list[str], sources: list[str]) -> np.ndarray:
        name = ".".join(words)
        if name == "rn.satfinite.e4m3x2.f32":
            high, low = (to_e4m3(self.number_of(source)) for source in sources)
            return low | (high << np.uint64(8))
        if name == "rn.f16x2.e4m3x2":
            codes = self.value(sources[0], 16)
            return joined([from_e4m3(codes >> np.uint64(shift) & np.uint64(255)) for shift in (0, 8)], np.float16)
        if name == "rn.bf16x2.f32":
            high, low = (to_bf16(self.number_of(source).astype(np.float64)) for source in sources)
            return low | (high << np.uint64(16))
        if name == "rz.f16x2.f32":
            return joined([toward_zero(self.number_of(source)) for source in reversed(sources)], np.float16)
        if name == "f32.f16":
            return self.value(sources[0], 16).astype(np.uint16).view(np.float16).astype(np.float32)
        to, of = words[-2:]
        found = self.signed(sources[0], int(of[1:])) if of[0] == "s" else self.value(sources[0], int(of[1:]))
        bits = int(to[1:])
        return found.astype(np.int64).view(np.uint64) & np.uint64((1 << bits) - 1)

    def _halves(self, kind: str, words: list[str], sources: list[str]) -> np.ndarray:
        """Two numbers in a word, each rounded once."""
        is_bf16 = "bf16x2" in words
        out = np.zeros(128, np.uint64)
        for shift in (0, 16):
            bits = [(self.value(source) >> np.uint64(shift)) & np.uint64(0xFFFF) for source in sources]
            if is_bf16:
                numbers = [(b << np.uint64(16)).astype(np.uint32).view(np.float32).astype(np.float64) for b in bits]
            else:
                numbers = [b.astype(np.uint16).view(np.float16).astype(np.float64) for b in bits]
            signs = None
            if "xorsign" in words:
                signs = (bits[0] ^ bits[1]) & np.uint64(0x8000)
                numbers = [np.abs(number) for number in numbers]
            found = numbers[0] * numbers[1] + numbers[2] if kind == "fma" else extreme(kind, words, numbers)
            half = to_bf16(found) if is_bf16 else found.astype(np.float16).view(np.uint16).astype(np.uint64)
            out |= (half if signs is None else (half & np.uint64(0x7FFF)) | signs) << np.uint64(shift)
        return out

    def _integers(self, kind: str, words: list[str], sources: list[str]) -> np.ndarray:
        bits = int(words[-1][1:])
        read = self.signed if words[-1][0] == "s" else self.value
        if "wide" in words:
            a, b, *c = sources
            product = read(a, bits).astype(np.int64) * read(b, bits).astype(np.int64)
            return product + (self.value(c[0], 64).view(np.int64) if c else 0)
        if kind == "bfe":
            value, first, length = self.value(sources[0], bits), self.value(sources[1]), self.value(sources[2])
            found = value >> first & ((np.uint64(1) << length) - np.uint64(1))
            if words[-1][0] == "s":
                found = (found << (np.uint64(64) - length)).view(np.int64) >> (np.uint64(64) - length).astype(np.int64)
            return found.view(np.uint64) & np.uint64((1 << bits) - 1)
        operands = [read(source, bits) for source in sources]
        if kind == "shf":
            assert words[:2] == ["l", "wrap"], "words are shifted otherwise"
            low, high, count = operands
            return (high << np.uint64(32) | low) << (count & np.uint64(31)) >> np.uint64(32) & np.uint64(0xFFFFFFFF)
        if kind in ("shl", "shr"):
            operands[1] = self.value(sources[1]).astype(operands[0].dtype)
        if kind == "mul" and "hi" in words:
            return operands[0] * operands[1] >> np.uint64(bits)
        simple: dict[str, Callable[..., np.ndarray]] = {
            "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
            "shl": np.left_shift, "shr": np.right_shift, "min": np.minimum, "max": np.maximum, "mul": np.multiply,
            "mad": lambda a, b, c: a * b + c, "div": np.floor_divide, "rem": np.remainder, "neg": np.negative,
        }  # fmt: skip
        return simple[kind](*operands).astype(np.int64).view(np.uint64) & np.uint64((1 << bits) - 1)


def parsed(ptx: str) -> tuple[list[Line], dict[str, int]]:
    """The lines of the one kernel in ``ptx``, and where its labels stand."""
    lines: list[Line] = []
    labels: dict[str, int] = {}
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index("{", ptx.index(".entry")) + 1 :])
    body = re.sub(r"^\s*\.(loc|pragma|file)[^\n]*", "", body, flags=re.M).replace("::cta", "")
    for statement in re.split(r";|(?<=:)\n", body):
        text = statement.strip()
        while match := re.match(r"(\$\w+):\s*", text):
            labels[match[1]] = len(lines)
            text = text[match.end() :].strip()
        text = re.sub(r"^[{}\s]+(?=[a-z@.])", "", text)
        match = re.match(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)\s*(.*)", text, re.S)
        if match is None:
            continue
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", match[4]) if part.strip()]
        lines.append((match[3], operands, match[2] or "", match[1] == "!"))
    return lines, labels


def floats(kind: str, words: list[str], numbers: list[np.ndarray]) -> np.ndarray:
    """FP32, rounded once."""
    if kind == "fma":
        a, b, c = (number.astype(np.longdouble) for number in numbers)  # holds every product of FP32
        return (a * b + c).astype(np.float32)
    simple: dict[str, Callable[..., np.ndarray]] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "abs": np.abs, "neg": np.negative,
        "rcp": lambda a: np.float32(1) / a,
    }  # fmt: skip
    return simple[kind](*numbers) if kind in simple else extreme(kind, words, numbers)


def extreme(kind: str, words: list[str], numbers: list[np.ndarray]) -> np.ndarray:
    names = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[kind]
    return names["NaN" in words](*numbers)


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Bits of FP64 rounded to BF16 once, to nearest even; NaN is 0x7FFF."""
    single = numbers.astype(np.float32)
    odd = np.where(single.astype(np.float64) == numbers, 0, 1)  # what is cut off matters only where it makes a tie
    toward = np.where(np.abs(single.astype(np.float64)) > np.abs(numbers), -1, 1)
    bits = single.view(np.uint32).astype(np.int64)
    tie = (bits & 0xFFFF) == 0x8000
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) + np.where(tie, odd * toward, 0)) >> 16
    return np.where(np.isnan(numbers), 0x7FFF, rounded & 0xFFFF).astype(np.uint64)


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Codes of the nearest E4M3, ties to even, at most 448; NaN is 0x7F."""
    magnitudes = np.fmin(np.abs(numbers.astype(np.float64)), E4M3[-1])
    above = np.searchsorted(E4M3, magnitudes).clip(1, len(E4M3) - 1)
    down, up = magnitudes - E4M3[above - 1], E4M3[above] - magnitudes
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    codes = np.where(np.isnan(numbers), 0x7F, codes)
    return (codes | (np.signbit(numbers) * 0x80)).astype(np.uint64)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    magnitudes = np.append(E4M3, np.nan)[(codes & np.uint64(127)).astype(int)]
    return np.where(codes > 127, -magnitudes, magnitudes)


def toward_zero(numbers: np.ndarray) -> np.ndarray:
    """FP16 numbers, FP32 cut off."""
    near = numbers.astype(np.float16)
    return np.where(np.abs(near.astype(np.float32)) > np.abs(numbers), np.nextafter(near, np.float16(0)), near)


def joined(halves: list[np.ndarray], dtype: Any) -> np.ndarray:
    """A word of two numbers, the lower first."""
    low, high = (half.astype(dtype).view(np.uint16).astype(np.uint64) for half in halves)
    return low | (high << np.uint64(16))


def permuted(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt``: bytes of both words, with the sign of a byte where bit 3 of its place in the selector says so."""
    both, out = low | (high << np.uint64(32)), np.zeros(128, np.uint64)
    for place in range(4):
        which = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (np.uint64(8) * (which & np.uint64(7))) & np.uint64(255)
        byte = np.where(which > 7, np.where(byte > 127, 255, 0), byte).astype(np.uint64)
        out |= byte << np.uint64(8 * place)
    return out
