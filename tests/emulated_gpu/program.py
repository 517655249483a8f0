"""One program of a kernel: its threads, its memory, and which instruction comes next."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.emulated_gpu.code import Code, Line
from tests.emulated_gpu.instructions import Instructions
from tests.emulated_gpu.registers import FLAG, WARP, after, require_whole_warps, warps_of

SHARED = 1 << 16
STACK = 0x4000
"""Bytes of local memory; a stack grows downwards from its end."""
MOST_STEPS = 1_000_000
PARAMETERS = {80: 0x160, 86: 0x160, 89: 0x160, 90: 0x210}
"""Where the first parameter of a kernel is in constant bank 0, by compute capability."""
WITHOUT_EFFECT = ("NOP", "PREEXIT", "ACQBULK", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "YIELD")


class Copy(NamedTuple):
    """Bytes on their way from memory to shared memory.

    Attributes:
        threads: who copies.
        groups: of each thread's copies, the number of the group of this one.
        places, data: of each thread, where its bytes go, and what they are.
    """

    threads: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    data: np.ndarray


class Program(Instructions):
    """A program whose threads go on until all have ended.

    Args:
        code: of the kernel.
        arguments: bytes of the kernel's, in the order of its parameters; addresses are places in ``memory``.
        memory: bytes that the kernel reads and writes.
        number: of the program among ``programs``.
        threads: in the program.
    """

    def __init__(
        self, code: Code, arguments: Sequence[bytes], memory: np.ndarray, number: int, programs: int, threads: int
    ) -> None:
        constants = np.zeros(0x1000, np.uint8)
        for known, value in ((0x0, threads), (0xC, programs), (0x28, STACK)):
            constants[known : known + 4] = np.array([value], np.uint32).view(np.uint8)
        place = PARAMETERS[code.capability]
        for argument in arguments:
            place += -place % len(argument)
            constants[place : place + len(argument)] = np.frombuffer(argument, np.uint8)
            place += len(argument)
        super().__init__(threads, {0: constants, 2: code.constants}, number)
        self.code, self.memory, self.number_of_program = code, memory, number
        self._shared = np.zeros(SHARED, np.uint8)
        self._local = np.zeros((threads, STACK), np.uint8)
        self._copies: list[Copy] = []
        self._groups = np.zeros(threads, int)  # of copies that each thread has closed
        self._at = np.full(threads, next(iter(code.lines)))
        self._waits = np.full(threads, "", dtype="<U8")  # for what, if anything
        self._alive = np.ones(threads, bool)
        self._members: dict[str, np.ndarray] = {}  # of barriers within a warp
        self._barriers = 0  # of the program that have been passed
        self._writer = np.full((2, SHARED), -1)  # between which barriers, and which warp
        self._reader = np.full((2, SHARED), -1)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for _ in range(MOST_STEPS):
                if not self._alive.any():
                    return
                ready = self._alive & (self._waits == "")
                if ready.any():
                    place = int(self._at[ready].min())  # those who are behind come first, so that ways meet again
                    self._step(self.code.lines[place], ready & (self._at == place))
                else:
                    assert (self._waits[self._alive] == "BAR").all(), "threads wait for others that never come"
                    self._waits[:] = ""
                    self._barriers += 1
        raise AssertionError(f"the program does not end; its threads are at {np.unique(self._at[self._alive])}")

    def _step(self, line: Line, here: np.ndarray) -> None:
        mask = here & self.flag(line.guard) if line.guard else here
        self._at[here] = line.following
        kind = line.name[0]
        if kind == "EXIT":
            self._alive &= ~mask
        elif kind in ("BRA", "CALL"):
            for condition in filter(FLAG.fullmatch, line.operands[:-1]):  # beside the guard
                mask = mask & self.flag(condition)
            self._at[mask] = self.code.labels[line.operands[-1].strip("`()")]
        elif kind == "RET":
            self._at[mask] = self.value(line.operands[0].split()[0])[mask].astype(int)
        elif kind == "BAR":
            self._waits[mask] = "BAR"
        elif kind == "BSSY":
            members = self._members.setdefault(line.operands[0], np.zeros(self.threads, bool))
            members[warps_of(here)] = False
            members |= mask
        elif kind == "BREAK":
            self._members[line.operands[-1]] &= ~mask
        elif kind == "BSYNC":
            self._meet(line.operands[0], mask)
        elif kind == "WARPSYNC":
            assert line.name[1:] == ("ALL",) or line.operands == ["0xffffffff"], "only some threads of a warp meet"
            self._members["warp"] = np.ones(self.threads, bool)
            self._meet("warp", mask)
        elif kind in ("LDG", "STG", "LDS", "STS", "LDL", "STL"):
            self._move(line, mask)
        elif kind == "LDGSTS":
            self._begin_copy(line, mask)
        elif kind == "LDGDEPBAR":
            self._groups[mask] += 1
        elif kind == "DEPBAR":
            self._end_copies(int(line.operands[1], 0), mask)
        elif kind in ("LDSM", "STSM"):
            self._move_matrix(line, mask)
        elif kind in ("RED", "REDG"):
            assert line.name[2:4] == ("MAX", "S32"), line.name
            at = self._address(line, line.operands[0], mask, 4)[mask]
            np.maximum.at(self.memory.view(np.int32), at // 4, self.signed(line.operands[1])[mask])
        elif kind == "ATOMG":
            self._add(line, mask)
        elif kind not in WITHOUT_EFFECT:
            self.compute(line, mask)

    def _add(self, line: Line, mask: np.ndarray) -> None:
        """Threads add to memory one after the other, and each gets what was there before."""
        assert line.name[1:4] == ("E", "ADD", "64"), line.name
        _, target, address, source = line.operands
        at, added = self._address(line, address, mask, 8) // 8, self.pair(source)
        before, words = np.zeros(self.threads, np.uint64), self.memory.view(np.uint64)
        for thread in np.flatnonzero(mask):
            before[thread] = words[at[thread]]
            words[at[thread]] += added[thread]
        self.write_pair(target, before, mask)

    def _meet(self, name: str, mask: np.ndarray) -> None:
        """Threads of a warp wait until all of them that are to meet are here."""
        self._waits[mask] = name
        for warp in np.unique(np.flatnonzero(mask) // WARP):
            threads = slice(warp * WARP, (warp + 1) * WARP)
            missing = self._members[name][threads] & self._alive[threads] & (self._waits[threads] != name)
            if not missing.any():
                self._waits[threads][self._waits[threads] == name] = ""

    def _address(self, line: Line, operand: str, mask: np.ndarray, size: int) -> np.ndarray:
        found = np.zeros(self.threads, np.int64)
        for part in re.sub(r"desc\[\w+\]", "", operand).strip("[] ").split("+"):
            if part.startswith(("0x", "-0x")):
                found += int(part, 16)
            else:
                register, _, times = part.partition(".X")
                word = self.pair(register) if register.endswith(".64") else self.value(register)
                found += word.view(np.int64) * int(times or 1)
        assert not (found[mask] % size).any(), f"misaligned address at {line.place:#x}"
        return found

    def _move(self, line: Line, mask: np.ndarray) -> None:
        kind, *words = line.name
        loads = kind.startswith("LD")
        size = next((int(word.lstrip("US")) // 8 for word in words if re.fullmatch(r"[US]?(8|16|64|128)", word)), 4)
        register, address = line.operands if loads else reversed(line.operands)
        places = self._address(line, address, mask, size)[mask][:, None] + np.arange(size)
        threads = np.flatnonzero(mask)
        if kind[2] == "S":
            self._share(loads, places, threads)
        memory, index = {
            "G": (self.memory, places), "S": (self._shared, places), "L": (self._local, (threads[:, None], places)),
        }[kind[2]]  # fmt: skip
        assert ((places >= 0) & (places < memory.shape[-1])).all(), f"address out of bounds at {line.place:#x}"
        count = max(size // 4, 1)
        if loads:
            for word in range(count):
                found = np.zeros((self.threads, 8), np.uint8)
                found[mask, : min(size, 4)] = memory[index][:, 4 * word : 4 * word + 4]
                self.write(after(register, word), found.view(np.uint64)[:, 0], mask)
        else:
            data = np.stack([self.register(after(register, word)).astype(np.uint32) for word in range(count)], 1)
            memory[index] = data.view(np.uint8)[mask, :size]

    def _begin_copy(self, line: Line, mask: np.ndarray) -> None:
        """Begin to copy from memory to shared memory; zeros for threads whose predicate is false."""
        size = next((int(word) // 8 for word in line.name if word in ("64", "128")), 4)
        target, source, *condition = line.operands
        places, origins = (self._address(line, operand, mask, size)[mask][:, None] for operand in (target, source))
        places, origins = places + np.arange(size), origins + np.arange(size)
        threads, reads = np.flatnonzero(mask), self.flag(condition[0] if condition else "PT")[mask]
        assert ((places >= 0) & (places < SHARED)).all(), f"address out of bounds at {line.place:#x}"
        self._share(False, places, threads)
        data = np.zeros_like(places, np.uint8)
        data[reads] = self.memory[origins[reads]]
        self._copies.append(Copy(threads, self._groups[threads], places, data))

    def _end_copies(self, most: int, mask: np.ndarray) -> None:
        """Wait until threads have at most so many groups of copies on their way. No copy ends before it has to."""
        waiting = []
        for copy in self._copies:
            ends = mask[copy.threads] & (copy.groups < self._groups[copy.threads] - most)
            self._share(False, copy.places[ends], copy.threads[ends])
            self._shared[copy.places[ends]] = copy.data[ends]
            if not ends.all():
                waiting.append(Copy(*(field[~ends] for field in copy)))
        self._copies = waiting

    def _move_matrix(self, line: Line, mask: np.ndarray) -> None:
        """8x8 elements of 16 bits; lane 8 j + i has the address of row i of matrix j.

        A lane has two neighbours in a row; if the matrix is transposed (``MT88``), in a column.
        """
        require_whole_warps(mask)
        loads = line.name[0] == "LDSM"
        register, address = line.operands if loads else reversed(line.operands)
        at = self._address(line, address, mask, 16)
        thread = np.flatnonzero(mask)
        lane, first = thread % WARP, thread // WARP * WARP
        rows, cols = (lane // 4)[:, None], 2 * (lane % 4)[:, None] + np.arange(2)
        if "MT88" in line.name:
            rows, cols = cols, rows
        for index in range(int(line.name[-1]) if line.name[-1].isdigit() else 1):
            places = (at[first[:, None] + 8 * index + rows] + 2 * cols)[:, :, None] + np.arange(2)
            places = places.reshape(len(thread), 4)
            self._share(loads, places, thread)
            name = after(register, index)
            if loads:
                word = np.zeros(self.threads, np.uint64)
                word[mask] = self._shared[places].view(np.uint32)[:, 0]
                self.write(name, word, mask)
            else:
                self._shared[places] = self.register(name).astype(np.uint32).view(np.uint8).reshape(-1, 4)[mask]

    def _share(self, loads: bool, places: np.ndarray, threads: np.ndarray) -> None:
        """Warps that touch the same shared memory with no barrier between must only read.

        A copy touches it twice: when it begins and when it ends.
        """
        warp = np.broadcast_to(threads[:, None] // WARP, places.shape)
        for when, who in [self._writer] if loads else [self._writer, self._reader]:
            meet = (when[places] == self._barriers) & (who[places] != warp)
            assert not meet.any(), f"warp {warp[meet][0]} and another touch the same shared memory, and one writes"
        mine = self._reader if loads else self._writer
        mine[0][places], mine[1][places] = self._barriers, warp
