"""What instructions compute. A method has the name of its instruction, without the U of those that a warp shares."""

from collections.abc import Callable

import numpy as np

from tests.emulated_gpu.code import Line
from tests.emulated_gpu.registers import FLAG, MASK, WARP, Registers, after, require_whole_warps
from tests.emulated_gpu.rounding import (
    COMPARISONS,
    compared,
    extreme,
    flushed,
    from_bf16,
    from_e4m3,
    from_fp16,
    fused,
    joined,
    rounded,
    to_bf16,
    to_e4m3,
    toward_zero,
)

Words = tuple[str, ...]
"""The modifiers of an instruction."""
LOGIC = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
APPROXIMATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RCP": lambda a: 1 / a, "RSQ": lambda a: 1 / np.sqrt(a), "SQRT": np.sqrt, "EX2": np.exp2, "LG2": np.log2,
}  # fmt: skip
"""Functions whose last bits differ on GPUs; what is the same everywhere does not depend on them."""


class Instructions(Registers):
    """The arithmetic of the threads ``mask`` of program ``number``."""

    number_of_program: int

    def compute(self, line: Line, mask: np.ndarray) -> None:
        name = line.name[0]
        method = getattr(self, name.lower(), None) or getattr(self, name[1:].lower() if name[0] == "U" else "", None)
        if method is None:
            raise NotImplementedError(f"{'.'.join(line.name)} {', '.join(line.operands)}")
        method(line.name[1:], line.operands, mask)

    # Integers

    def mov(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        self.write(operands[0], self.value(operands[1]), mask)

    r2ur = mov

    def cs2r(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        for word in range(1 if "32" in words else 2):
            self.write(after(operands[0], word), np.zeros(self.threads, np.uint64), mask)

    def s2r(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        thread = np.arange(self.threads, dtype=np.uint64)
        known = {"SR_TID.X": thread, "SR_LANEID": thread % np.uint64(WARP), "SR_CgaCtaId": thread * np.uint64(0)}
        known["SR_LTMASK"] = (np.uint64(1) << known["SR_LANEID"]) - np.uint64(1)
        known["SR_CTAID.X"] = np.full(self.threads, self.number_of_program, np.uint64)
        known["SR_CTAID.Y"] = np.zeros(self.threads, np.uint64)
        self.write(operands[0], known[operands[1]], mask)

    s2ur = s2r

    def ldc(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        if "64" in words:
            self.write_pair(operands[0], self.value(operands[1], 64), mask)
        else:
            self.write(operands[0], self.value(operands[1]), mask)

    def iadd3(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """A sum with a carry to each predicate before its terms, and (``X``) from each after them."""
        target, *rest = operands
        is_flag = [FLAG.fullmatch(operand) is not None for operand in rest]
        first = is_flag.index(False)
        terms = [operand for operand, flag in zip(rest, is_flag, strict=True) if not flag]
        total = np.zeros(self.threads, np.uint64)
        for term in terms:
            if term[0] == "-" and not term[1].isdigit():
                total += (~self.value(term[1:]) & MASK) + np.uint64(1)  # -0 carries
            else:
                total += self.value(term)
        if "X" in words:
            for carry in rest[first + len(terms) :]:
                total += self.flag(carry).astype(np.uint64)
        self.write(target, total & MASK, mask)
        for carry in rest[:first]:
            self.write(carry, total >> np.uint64(32) > 0, mask)

    viadd = iadd3

    def lea(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """A sum whose first term is shifted to the left; ``HI``, its upper word."""
        target, flags, terms = parted(operands)
        count = np.uint64(int(terms[-1], 0))
        if "SX32" in words:
            shifted = self.signed(terms[0]).view(np.uint64) << count >> np.uint64(32) & MASK
        elif "HI" in words:
            shifted = (self.value(terms[0]) | (self.value(terms[2]) << np.uint64(32))) << count >> np.uint64(32)
        else:
            shifted = self.value(terms[0]) << count & MASK
        self._carrying(target, shifted + self.value(terms[1]), flags, words, mask)

    def imad(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, flags, (a, b, c) = parted(operands)
        is_wide, is_high = "WIDE" in words, "HI" in words
        read = self.signed if (is_wide or is_high) and "U32" not in words else self.value
        product = read(a).astype(np.uint64) * read(b).astype(np.uint64)
        if is_high:
            self.write(target, (product + self.pair(c)) >> np.uint64(32), mask)
        elif is_wide:
            total = product + self.pair(c)
            self.write_pair(target, total, mask)
            if flags:
                self.write(flags[0], total < product, mask)
        else:
            self._carrying(target, (product & MASK) + self.value(c), flags, words, mask)

    def _carrying(self, target: str, total: np.ndarray, flags: list[str], words: Words, mask: np.ndarray) -> None:
        """Write a sum that takes a carry (``X``) or gives one."""
        if "X" in words:
            total = total + self.flag(flags[-1]).astype(np.uint64)
        self.write(target, total & MASK, mask)
        if "X" not in words and flags:
            self.write(flags[0], total >> np.uint64(32) > 0, mask)

    def lop3(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Any function of three bits, by its table; a predicate before the target tells whether a bit is set."""
        flags = [operands[0]] if FLAG.fullmatch(operands[0]) else []
        target, a, b, c, table = operands[len(flags) :][:5]
        found = np.zeros(self.threads, np.uint64)
        terms = [self.value(term) for term in (a, b, c)]
        for case in range(8):
            if int(table, 16) >> case & 1:
                bits = [term if case >> place & 1 else ~term for term, place in zip(terms, (2, 1, 0), strict=True)]
                found |= bits[0] & bits[1] & bits[2]
        self.write(target, found & MASK, mask)
        for flag in flags:
            self.write(flag, found & MASK != 0, mask)

    def shf(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """A word out of two that are shifted together."""
        target, low, count, high = operands
        both = self.value(low) | (self.value(high) << np.uint64(32))
        by = self.value(count)
        by = by & np.uint64(31) if "W" in words else np.minimum(by, np.uint64(63))
        if words[0] == "L":
            is_long = {"HI", "U64", "S64"} & set(words)
            found = (both if is_long else both << np.uint64(32)) << by >> np.uint64(32)
        elif "HI" in words:
            of = self.signed(high) if "S32" in words else self.value(high).view(np.int64)
            found = of >> by.astype(np.int64)
        else:
            found = both.view(np.int64) >> by.astype(np.int64) if "S64" in words else both >> by
        self.write(target, found, mask)

    def flo(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """The place of the highest bit that is set."""
        assert words == ("U32",), words
        found = self.value(operands[1])
        place = np.frexp(found.astype(np.float64))[1] - 1
        self.write(operands[0], np.where(found == 0, -1, place).astype(np.int64).view(np.uint64) & MASK, mask)

    def popc(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """How many bits are set."""
        assert not words, words
        bits = np.unpackbits(self.value(operands[1]).view(np.uint8).reshape(-1, 8), axis=1)
        self.write(operands[0], bits.sum(1).astype(np.uint64), mask)

    def sgxt(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, source, count = operands
        bits = int(count, 0)
        found = self.value(source) & np.uint64((1 << bits) - 1)
        if "U32" not in words:
            negative = found >> np.uint64(bits - 1) & np.uint64(1) > 0
            found = found | np.where(negative, MASK << np.uint64(bits), np.uint64(0))
        self.write(target, found, mask)

    def prmt(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Bytes of two words, with the sign of a byte where bit 3 of its place in the selector says so."""
        target, low, chosen, high = operands
        both, selector = self.value(low) | (self.value(high) << np.uint64(32)), self.value(chosen)
        out = np.zeros(self.threads, np.uint64)
        for place in range(4):
            which = selector >> np.uint64(4 * place) & np.uint64(15)
            byte = both >> (np.uint64(8) * (which & np.uint64(7))) & np.uint64(255)
            byte = np.where(which > 7, np.where(byte > 127, 255, 0), byte).astype(np.uint64)
            out |= byte << np.uint64(8 * place)
        self.write(target, out, mask)

    def sel(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, a, b, choice = operands
        self.write(target, np.where(self.flag(choice), self.value(a), self.value(b)), mask)

    def iabs(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        self.write(operands[0], np.abs(self.signed(operands[1])), mask)

    def vimnmx(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        read = self.value if "U32" in words else self.signed
        target, flags, terms = parted(operands)
        numbers = [read(term) for term in terms]
        least = np.minimum.reduce(numbers), np.maximum.reduce(numbers)
        self.write(target, np.where(self.flag(flags[0]), *least), mask)

    imnmx = vimnmx3 = vimnmx

    def viaddmnmx(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, a, b, c, least = operands
        total = (self.value(a) + self.value(b)) & MASK
        if "U32" not in words:
            total = total.astype(np.uint32).view(np.int32).astype(np.int64)
        other = self.value(c) if "U32" in words else self.signed(c)
        self.write(target, np.where(self.flag(least), np.minimum(total, other), np.maximum(total, other)), mask)

    def redux(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """The least or largest of the threads of a warp that are here."""
        each, here = (self.signed if "S32" in words else self.value)(operands[1]), mask.reshape(-1, WARP)
        largest, least = each.max(), each.min()
        found = {
            "MAX": np.where(here, each.reshape(-1, WARP), least).max(1),
            "MIN": np.where(here, each.reshape(-1, WARP), largest).min(1),
        }[words[0]]
        self.write(operands[0], found.repeat(WARP), mask)

    def shfl(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        _, target, source, where, _ = operands
        thread, place = np.arange(self.threads), self.value(where).astype(int)
        partner = {"BFLY": thread ^ place, "IDX": thread // WARP * WARP + place % WARP}[words[0]]
        assert (mask[partner] | ~mask).all(), "a thread reads from one that is not here"
        self.write(target, self.value(source)[partner], mask)

    # Predicates

    def isetp(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        first, second, a, b, also, *lower = operands
        read = self.value if "U32" in words else self.signed
        how, x, y = words[0], read(a), read(b)
        found = COMPARISONS[how](x, y)
        if "EX" in words:  # of the upper words, where the lower ones are compared already
            strictly = {"LE": "LT", "GE": "GT"}.get(how, how)
            below = self.flag(lower[0])
            found = found & below if how == "EQ" else COMPARISONS[strictly](x, y) | (x == y) & below
        self._decide(first, second, found, also, words, mask)

    def fsetp(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        first, second, a, b, also = operands
        self._decide(first, second, compared(words[0], self.number(a), self.number(b)), also, words, mask)

    def fset(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """A comparison as 1 or 0 in FP32."""
        target, a, b, also = operands
        _, how, join = words
        found = LOGIC[join](compared(how, self.number(a), self.number(b)), self.flag(also))
        self.write(target, found.astype(np.float32), mask)

    def dsetp(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        first, second, a, b, also = operands
        found = compared(words[0], self.number(a, np.float64), self.number(b, np.float64))
        self._decide(first, second, found, also, words, mask)

    def _decide(self, first: str, second: str, found: np.ndarray, also: str, words: Words, mask: np.ndarray) -> None:
        """Write a predicate, and the one for the contrary."""
        join = LOGIC[next(word for word in words if word in LOGIC)]
        self.write(first, join(found, self.flag(also)), mask)
        self.write(second, join(~found, self.flag(also)), mask)

    def hsetp2(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """A predicate for the lower numbers, and one for the upper."""
        *targets, also = operands[:2] + operands[-1:]
        join = LOGIC[next(word for word in words if word in LOGIC)]
        a, b = self.halves(operands[2:-1], "BF16_V2" in words)
        for target, x, y in zip(targets, a, b, strict=True):
            self.write(target, join(compared(words[0], x, y), self.flag(also)), mask)

    def vote(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Whether a predicate is true of any thread of the warp that is here, or of all."""
        target, *joined, condition = operands
        assert len(operands) == 2 or (joined == ["UPT"] and condition == "PT"), operands
        warps = (self.flag(condition) & mask).reshape(-1, WARP), mask.reshape(-1, WARP)
        if len(operands) == 3:  # a word with a bit of each thread that is here
            found = (warps[0] * (np.uint64(1) << np.arange(WARP, dtype=np.uint64))).sum(1)
        else:
            found = {"ANY": warps[0].any(1), "ALL": (warps[0] == warps[1]).all(1)}[words[0]]
        self.write(target, found.repeat(WARP), mask)

    voteu = vote

    def plop3(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        *targets, a, b, c, first, second = operands
        case = self.flag(a) * 4 + self.flag(b) * 2 + self.flag(c)
        for target, table in zip(targets, (first, second), strict=True):
            self.write(target, (int(table, 16) >> case & 1).astype(bool), mask)

    def p2r(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Predicates as bits of a byte of a register."""
        target, which, source, chosen = operands
        found = self.value(source)
        for index in range(7):
            if int(chosen, 0) >> index & 1:
                bit = np.uint64(1 << index + (8 * int(words[0][1:]) if words else 0))
                found = found & ~bit | self.flag(f"{which.removesuffix('R')}{index}") * bit
        self.write(target, found, mask)

    up2ur = p2r

    def r2p(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        register, _, byte = operands[1].partition(".B")
        found = self.value(register) >> np.uint64(8 * int(byte or 0))
        for index in range(7):
            if int(operands[2], 0) >> index & 1:
                self.write(f"P{index}", found >> np.uint64(index) & np.uint64(1) > 0, mask)

    # FP32 and FP64

    def ffma(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        a, b, c = self._wide(operands[1:], words)
        self.write(operands[0], rounded(a * b + c, words), mask)

    def fmul(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        a, b = self._wide(operands[1:], words)
        self.write(operands[0], rounded(a * b, words), mask)

    def fadd(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        a, b = self._wide(operands[1:], words)
        self.write(operands[0], rounded(a + b, words), mask)

    def _wide(self, operands: list[str], words: Words) -> list[np.ndarray]:
        """FP32 in a format that holds every product."""
        numbers = [self.number(operand) for operand in operands]
        return [(flushed(number) if "FTZ" in words else number).astype(np.longdouble) for number in numbers]

    def fmnmx(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, a, b, least = operands
        numbers = [self.number(a), self.number(b)]
        self.write(target, extreme(self.flag(least), numbers, "NAN" in words), mask)

    def fsel(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, a, b, choice = operands
        self.write(target, np.where(self.flag(choice), self.number(a), self.number(b)), mask)

    def fchk(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Whether a division has to be done the long way, which is right for all numbers."""
        self.write(operands[0], np.ones(self.threads, bool), mask)

    def mufu(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        function = words[0].removesuffix("64H")
        if function != words[0]:  # the upper words of operand and result
            number = (self.value(operands[1]) << np.uint64(32)).view(np.float64)
            found = APPROXIMATE[function](number).view(np.uint64) >> np.uint64(32)
        else:
            number = flushed(self.number(operands[1]))
            found = flushed(APPROXIMATE[function](number.astype(np.float64)).astype(np.float32))
        self.write(operands[0], found, mask)

    def dadd(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        a, b = (self.number(operand, np.float64) for operand in operands[1:])
        self.write_pair(operands[0], (a + b).view(np.uint64), mask)

    def dmul(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        if words:
            raise NotImplementedError(f"DMUL.{words}")
        a, b = (self.number(operand, np.float64) for operand in operands[1:])
        self.write_pair(operands[0], (a * b).view(np.uint64), mask)

    def dfma(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        terms = [self.number(operand, np.float64) for operand in operands[1:]]
        found = np.array([fused(*each) for each in zip(*terms, strict=True)])
        self.write_pair(operands[0], found.view(np.uint64), mask)

    # Tensor cores

    def hmma(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """``a[16, 16] @ b[16, 8] + c[16, 8]`` of a warp, exact and then rounded once.

        A GPU rounds in between, in a way of its own; what is the same everywhere does not depend on it. Lane 4 g + t
        has rows g and g + 8 of c and of the target, in columns 2 t and 2 t + 1; rows g and g + 8 of a and column g of
        b, in terms 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the sum, two of them in a register.
        """
        assert words in (("16816", "F32", "BF16"), ("16816", "F32")), words
        require_whole_warps(mask)
        target, left, right, added = operands
        warps, lane = self.threads // WARP, np.arange(WARP)
        g, t = lane // 4, 2 * (lane % 4)
        a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        from_half = from_bf16 if "BF16" in words else from_fp16
        for half in range(2):
            for index, (row, term) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                bits = self.register(after(left, index)) >> np.uint64(16 * half) & np.uint64(0xFFFF)
                a[:, g + row, t + term + half] = from_half(bits).reshape(warps, WARP)
            for index, term in enumerate((0, 8)):
                bits = self.register(after(right, index)) >> np.uint64(16 * half) & np.uint64(0xFFFF)
                b[:, t + term + half, g] = from_half(bits).reshape(warps, WARP)
            for index, row in enumerate((0, 8)):
                c[:, g + row, t + half] = self.number(after(added, 2 * index + half)).reshape(warps, WARP)
        found = (a @ b + c).astype(np.float32)
        for half in range(2):
            for index, row in enumerate((0, 8)):
                self.write(after(target, 2 * index + half), found[:, g + row, t + half].reshape(-1), mask)

    # Conversions

    def i2f(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, source = operands
        found = (self.value if "U32" in words else self.signed)(source)
        found = found & (0xFFFF if "U16" in words else 0xFF) if {"U16", "U8"} & set(words) else found
        if "F64" in words:
            self.write_pair(target, found.astype(np.float64).view(np.uint64), mask)
        else:
            self.write(target, rounded(found.astype(np.longdouble), words), mask)

    i2fp = i2f

    def f2i(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        least, most = (0, 2**32 - 1) if "U32" in words else (-(2**31), 2**31 - 1)
        self.write(operands[0], np.trunc(self.number(operands[1]).astype(np.float64)).clip(least, most), mask)

    def f2f(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, source = operands
        if words == ("F64", "F32"):
            self.write_pair(target, self.number(source).astype(np.float64).view(np.uint64), mask)
        elif words == ("F64", "F16"):
            register, _, half = source.partition(".H")
            word = self.value(register) >> np.uint64(16 if half == "1" else 0)
            self.write_pair(target, from_fp16(word & np.uint64(0xFFFF)).view(np.uint64), mask)
        elif words == ("F32", "F64"):
            self.write(target, self.number(source, np.float64).astype(np.float32), mask)
        else:
            assert words in (("BF16", "F32"), ("F16", "F32")), words
            number = self.number(source)
            half = to_bf16(number.astype(np.float64)) if words[0] == "BF16" else joined(number, number * 0)
            self.write(target, half & np.uint64(0xFFFF), mask)

    def f2fp(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        """Two numbers in a word."""
        target, *sources = operands
        to = tuple(word for word in words if word != "F32")
        if to == ("F16", "E4M3", "UNPACK_B"):
            register, _, half = sources[0].partition(".H")
            codes = self.value(register) >> np.uint64(16 if half == "1" else 0)
            low, high = (from_e4m3(codes >> np.uint64(shift) & np.uint64(255)) for shift in (0, 8))
            found = joined(low, high)
        elif to[:2] == ("SATFINITE", "E4M3"):
            if "F16" in to:
                word = self.value(sources[0])
                low, high = (from_fp16(word >> np.uint64(shift) & np.uint64(0xFFFF)) for shift in (0, 16))
            else:
                high, low = (self.number(source) for source in sources[:2])
            found = to_e4m3(low) | (to_e4m3(high) << np.uint64(8)) | (self.value(sources[-1]) << np.uint64(16) & MASK)
        else:
            high, low = (self.number(source) for source in sources)
            if "RELU" in to:
                to = tuple(word for word in to if word != "RELU")
                high, low = (np.where(number > 0, number, np.float32(0)) for number in (high, low))
            if to == ("BF16", "PACK_AB"):
                found = to_bf16(low.astype(np.float64)) | (to_bf16(high.astype(np.float64)) << np.uint64(16))
            else:
                assert "PACK_AB" in to and not {"BF16", "E5M2"} & set(to), words
                found = joined(toward_zero(low), toward_zero(high)) if "RZ" in to else joined(low, high)
        self.write(target, found, mask)

    # Two numbers in a word

    def hmnmx2(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        target, *sources, least = operands
        signs = np.uint64(0)
        if "XORSIGN" in words:
            a, b = (self.value(source.strip("|")) for source in sources)
            signs = (a ^ b) & np.uint64(0x80008000)
        terms = self.halves(sources, "BF16_V2" in words)
        halves = [extreme(self.flag(least), list(numbers), "NAN" in words) for numbers in zip(*terms, strict=True)]
        word = self._word(halves, words)
        self.write(target, word & np.uint64(0x7FFF7FFF) | signs if "XORSIGN" in words else word, mask)

    vhmnmx = hmnmx2  # of three numbers

    def hfma2(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        terms = self.halves(operands[1:], "BF16_V2" in words)
        self.write(operands[0], self._word([a * b + c for a, b, c in zip(*terms, strict=True)], words), mask)

    def hmul2(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        terms = self.halves(operands[1:], "BF16_V2" in words)
        self.write(operands[0], self._word([a * b for a, b in zip(*terms, strict=True)], words), mask)

    def hadd2(self, words: Words, operands: list[str], mask: np.ndarray) -> None:
        terms = self.halves(operands[1:], "BF16_V2" in words)
        low, high = (a + b for a, b in zip(*terms, strict=True))
        self.write(operands[0], low.astype(np.float32) if "F32" in words else self._word([low, high], words), mask)

    def _word(self, halves: list[np.ndarray], words: Words) -> np.ndarray:
        low, high = halves
        if "BF16_V2" in words:
            return to_bf16(low) | (to_bf16(high) << np.uint64(16))
        return joined(low, high)


def parted(operands: list[str]) -> tuple[str, list[str], list[str]]:
    """The target, the predicates and the terms of an instruction."""
    target, *rest = operands
    flags = [operand for operand in rest if FLAG.fullmatch(operand)]
    return target, flags, [operand for operand in rest if operand not in flags]
