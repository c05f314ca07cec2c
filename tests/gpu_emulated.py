"""One program's PTX carried out in NumPy, as far as kernels of this package need it.

The interpreter of Triton does not run Gluon; this runs what the compiler made of it. `ex2`, `rsqrt` and `div.full` are
NumPy's, not a card's: two kernels that are compared have the same ones. A product's sixteen terms are added in float64.
All lanes act together and copies are done at once: a barrier or a wait that is missing is not found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]
TYPES = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32, "s64": np.int64, "u64": np.uint64,
         "b64": np.uint64, "b16": np.uint16}  # fmt: skip
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or,
    "and": np.bitwise_and, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift, "div": np.divide,
}  # fmt: skip
REDUCED: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "add": np.sum}
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def rounded(value: Lanes) -> Lanes:
    """float32 as the bits of bfloat16, nearest even; no NaN."""
    bits = value.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Program:
    """Program `block` of a grid. Arguments are arrays, which it fills, and numbers."""

    def __init__(self, ptx: str, *arguments: Any, block: tuple[int, int] = (0, 0)) -> None:
        self.block = block
        self.threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
        self.registers = dict[str, Lanes]()
        self.shared = np.zeros(1 << 18, np.uint8)
        self.at, whole, bases = 256, [np.zeros(256, np.uint8)], list[Any]()
        places = dict[int, int]()  # of what is given twice, as an output that is also an input
        for argument in arguments:
            if isinstance(argument, np.ndarray) and argument.ctypes.data in places:
                bases.append(places[argument.ctypes.data])
            elif isinstance(argument, np.ndarray):
                places[argument.ctypes.data] = self.at
                bases.append(self.at)
                room = -(-argument.nbytes // 256) * 256 + 256
                whole.append(np.zeros(room, np.uint8))
                whole[-1][: argument.nbytes] = argument.reshape(-1).view(np.uint8)
                self.at += room
            else:
                bases.append(argument)
        self.memory, self.arguments = np.concatenate(whole), bases
        with np.errstate(all="ignore"):
            self.run(re.split(r"\n|;", ptx))
        for argument, base in zip(arguments, bases, strict=True):
            if isinstance(argument, np.ndarray):
                argument.reshape(-1).view(np.uint8)[:] = self.memory[base : base + argument.nbytes]

    def run(self, lines: list[str]) -> None:
        form = re.compile(r"\s*(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*$")
        found = [form.match(line) for line in lines]
        labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$")}
        at = 0
        while at < len(lines):
            one, at = found[at], at + 1
            if one is None or one[2].startswith(("bar", "cp.async.wait", "griddepcontrol", "fence")):
                continue
            if one[2] == "ret":
                break
            if one[2].startswith("bra"):
                taken = self.registers[one[1].lstrip("!")] ^ one[1].startswith("!") if one[1] else np.ones(1, bool)
                assert taken.all() == taken.any(), lines[at - 1]
                at = labels[one[3]] if taken.all() else at
            else:
                self.step(one[1], one[2], [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", one[3])])

    def get(self, name: str, kind: str) -> Lanes:
        of = TYPES[kind]
        if name.startswith("%tid.x"):
            return np.arange(self.threads).astype(of)
        if name.startswith("%ctaid"):
            return np.full(self.threads, self.block["xy".index(name[-1])]).astype(of)
        if name == "global_smem":
            return np.zeros(self.threads, of)
        if name.startswith("%") or name in self.registers:
            value = self.registers[name]
            return value if value.dtype == bool else self.as_kind(value, of)
        if name.startswith("0f"):
            return np.full(self.threads, int(name[2:], 16), np.uint32).view(np.float32)
        return np.full(self.threads, int(name, 0)).astype(of)

    @staticmethod
    def as_kind(value: Lanes, of: Any) -> Lanes:
        return value.view(of) if value.dtype.itemsize == np.dtype(of).itemsize else value.astype(of)

    def put(self, name: str, value: Lanes, mask: Lanes | None) -> None:
        if mask is not None and name in self.registers:
            value = np.where(mask, value, self.as_kind(self.registers[name], value.dtype.type))
        self.registers[name] = value

    def step(self, guard: str | None, name: str, operands: list[str]) -> None:
        op, kind, mask = name.split("."), name.split(".")[-1], None
        if guard:
            mask = self.registers[guard.lstrip("!")] ^ guard.startswith("!")
        if op[0] in ("ld", "st") and op[1] != "param":
            return self.move(op, operands, mask)
        if op[0] in ("cp", "ldmatrix", "mma"):
            return {"cp": self.copy, "ldmatrix": self.matrices, "mma": self.multiply}[op[0]](operands)
        if op[0] == "mov" and operands[0].startswith("{"):
            low, high = (half.strip() for half in operands[0].strip("{}").split(","))
            whole = self.get(operands[1], "b32")
            self.put(low, (whole & 0xFFFF).astype(np.uint16), mask)
            return self.put(high, (whole >> 16).astype(np.uint16), mask)
        into, rest = operands[0], operands[1:]
        if op[0] == "ld":
            value = self.arguments[int(re.findall(r"param_(\d+)", rest[0])[0])]
            made = np.full(self.threads, value)
            made = made.view(TYPES[kind]) if isinstance(value, np.float32) else made.astype(TYPES[kind])
        elif op[0] == "mov" and kind == "pred":
            made = np.full(self.threads, rest[0] != "0", bool)
        elif op[0] == "mov":
            made = self.get(rest[0], kind)
        elif name == "cvt.f32.bf16":
            made = (self.get(rest[0], "b16").astype(np.uint32) << 16).view(np.float32)
        elif name == "cvt.rn.bf16.f32":
            made = rounded(self.get(rest[0], "f32")).astype(np.uint16)
        elif name == "cvt.rn.bf16x2.f32":
            high, low = (rounded(self.get(one, "f32")) for one in rest)
            made = low | (high << 16)
        elif op[0] == "cvt":
            made = self.get(rest[0], kind).astype(TYPES[op[-2]])
        elif op[0] == "setp":
            made = COMPARED[op[1]](self.get(rest[0], kind), self.get(rest[1], kind))
        elif op[0] == "selp":
            made = np.where(self.registers[rest[2]], self.get(rest[0], kind), self.get(rest[1], kind))
        elif op[0] == "redux":
            lanes = self.get(rest[0], kind).reshape(-1, 32)
            made = np.repeat(REDUCED[op[2]](lanes, axis=1).astype(TYPES[kind]), 32)
        elif op[0] == "shfl":
            made = self.get(rest[0], kind)[np.arange(self.threads) ^ int(rest[1])]
        elif op[0] == "bfe":
            made = (self.get(rest[0], kind) >> int(rest[1])) & ((1 << int(rest[2])) - 1)
        elif name == "shf.r.wrap.b32":
            low, high = (self.get(one, "b32") for one in rest[:2])
            made = (low >> int(rest[2])) | (high << (32 - int(rest[2])))
        elif op[0] == "lop3":
            made, inputs = np.zeros(self.threads, np.uint32), [self.get(one, "b32") for one in rest[:3]]
            for case in range(8):
                if int(rest[3], 0) >> case & 1:
                    terms = [one if case >> (2 - i) & 1 else ~one for i, one in enumerate(inputs)]
                    made |= terms[0] & terms[1] & terms[2]
        elif op[0] == "ex2":
            made = np.exp2(self.get(rest[0], kind))
        elif op[0] in ("mul", "mad") and op[1] == "wide":
            wide = np.int64 if kind == "s32" else np.uint64
            made = self.get(rest[0], kind).astype(wide) * self.get(rest[1], kind).astype(wide)
            if op[0] == "mad":
                made = made + self.get(rest[2], "s64" if kind == "s32" else "u64")
        elif op[0] == "fma":
            a, b, c = (self.get(one, kind).astype(np.float64) for one in rest)
            made = (a * b + c).astype(np.float32)
        elif op[0] == "rsqrt":
            made = (1 / np.sqrt(self.get(rest[0], kind))).astype(np.float32)
        elif op[0] == "neg":
            made = -self.get(rest[0], kind)
        elif kind == "pred":
            made = TWO[op[0]](self.registers[rest[0]], self.registers[rest[1]])
        elif op[0] == "mad":
            made = self.get(rest[0], kind) * self.get(rest[1], kind) + self.get(rest[2], kind)
        else:
            made = TWO[op[0]](self.get(rest[0], kind), self.get(rest[1], kind)).astype(TYPES[kind])
        self.put(into, made, mask)
        return None

    def address(self, place: str, kind: str) -> npt.NDArray[np.int64]:
        base, _, offset = place.strip("[] ").partition("+")
        return self.get(base.strip(), kind).astype(np.int64) + int(offset or 0)

    def copy(self, operands: list[str]) -> None:
        """cp.async, done at once; of a size of 0: zeros."""
        if len(operands) > 1:
            size = np.arange(int(operands[2], 0))
            live = (self.get(operands[3], "u32") > 0)[:, None] & (size >= 0)
            source = np.where(live, self.address(operands[1], "s64")[:, None] + size, 0)
            self.shared[self.address(operands[0], "s32")[:, None] + size] = np.where(live, self.memory[source], 0)

    def matrices(self, operands: list[str]) -> None:
        """ldmatrix.x4: lanes 8 i .. 8 i + 7 point at the rows of matrix i."""
        at = self.address(operands[1], "s32").reshape(-1, 4, 8)
        lane = np.arange(32)
        for i, name in enumerate(operands[0].strip("{} ").split(",")):
            place = (at[:, i, lane // 4] + lane % 4 * 4).reshape(-1, 1) + np.arange(4)
            self.put(name.strip(), self.shared[place].reshape(-1).view(np.uint32), None)

    def multiply(self, operands: list[str]) -> None:
        """mma.m16n8k16 of bfloat16."""
        d, a, b, c = ([name.strip() for name in one.strip("{} ").split(",")] for one in operands)
        g, t = np.arange(32) // 4, np.arange(32) % 4
        left, right, out = (np.zeros((self.threads // 32, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
        for i, name in enumerate(a):
            for half, value in enumerate(self.halves(name)):
                left[:, g + i % 2 * 8, i // 2 * 8 + 2 * t + half] = value
        for i, name in enumerate(b):
            for half, value in enumerate(self.halves(name)):
                right[:, i * 8 + 2 * t + half, g] = value
        for i, name in enumerate(c):
            out[:, g + i // 2 * 8, 2 * t + i % 2] = self.get(name, "f32").reshape(-1, 32)
        out += left @ right
        for i, name in enumerate(d):
            self.put(name, out[:, g + i // 2 * 8, 2 * t + i % 2].astype(np.float32).reshape(-1), None)

    def halves(self, name: str) -> list[Lanes]:
        """[warps, 32] of both bfloat16 of a register."""
        whole = self.get(name, "b32")
        return [(one.view(np.float32)).reshape(-1, 32) for one in (whole << 16, whole & np.uint32(0xFFFF0000))]

    def move(self, op: list[str], operands: list[str], mask: Lanes | None) -> None:
        registers, place = operands if op[0] == "ld" else operands[::-1]
        names = [name.strip() for name in registers.strip("{} ").split(",")]
        memory, of = self.memory if op[1] == "global" else self.shared, TYPES[op[-1]]
        size, at = np.dtype(of).itemsize, self.address(place, "s64" if op[1] == "global" else "s32")
        live = np.ones(self.threads, bool) if mask is None else mask
        for j, name in enumerate(names):
            bytes_of = np.where(live, at + j * size, 0)[:, None] + np.arange(size)
            if op[0] == "ld":
                self.put(name, memory[bytes_of].reshape(-1).view(of), mask)
            else:
                value = self.get(name, op[-1]).astype(of, copy=False)
                memory[bytes_of[live]] = np.ascontiguousarray(value[live]).view(np.uint8).reshape(-1, size)
