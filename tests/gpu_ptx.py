"""What a kernel's PTX computes: in which order each of its threads adds up a sum of squares."""

from __future__ import annotations

import re
from typing import NamedTuple

STEPS = re.compile(
    r"shfl\.sync\.bfly\.b32\s+%\w+, %\w+, (\d+)|(add\.f32|div\.\w+|rsqrt\.\S+|st\.shared\.b32|ld\.shared\.b32|bar)"
)


class Operation(NamedTuple):
    name: str
    place: int  # in a vector that is loaded; -1: not of one
    operands: list[str]


class Squares(NamedTuple):
    """A sum of squares of x + delta over a row."""

    columns: list[list[int]]  # of each of 128 threads, in the order in which it adds them
    steps: list[str]  # how lanes and warps are added, and what is made of the sum


def squares(ptx: str) -> Squares:
    """Of a kernel with one such sum. ValueError where it is not one chain of each thread, the same in every 128."""
    code, threads = _parse(ptx), int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    at = re.search(r"shfl\.sync\.bfly\.b32\s+%\w+, (%\w+), 16", ptx)
    if at is None:
        raise ValueError("no sum over a warp")
    squared, register, name = list[str](), at[1], ""
    while name != "mul.f32":
        name, _, operands = code[register]
        if name not in ("fma.rn.f32", "mul.f32") or operands[0] != operands[1]:
            raise ValueError(f"{name} of {operands} in a chain of squares")
        squared.append(operands[0])
        register = operands[-1]
    columns = [[_column(code, one, thread) for one in reversed(squared)] for thread in range(threads)]
    if any(columns[thread] != columns[thread % 128] for thread in range(threads)):
        raise ValueError("threads from 128 on hold other columns than those before")
    steps = [first or second for first, second in STEPS.findall(ptx[at.start() :])]
    return Squares(columns[:128], steps[: 1 + next(i for i, step in enumerate(steps) if step.startswith("rsqrt"))])


def _parse(ptx: str) -> dict[str, Operation]:
    """By the register that is written; of several writes, the last: a load under a predicate comes behind its zero."""
    code = dict[str, Operation]()
    for line in ptx.splitlines():
        found = re.match(r"\s*(?:@!?%\w+\s+)?([a-z]\S*)\s+(.*?);?$", line)
        if not found:
            continue
        name, rest = found.groups()
        vector = re.match(r"\{([^}]*)\},\s*(.*)", rest)
        if vector:
            for place, register in enumerate(vector[1].split(",")):
                code[register.strip()] = Operation(name, place, [vector[2].strip()])
        elif rest.startswith("%"):
            register, *operands = (part.strip() for part in rest.split(","))
            code[register] = Operation(name, -1, operands)
    return code


def _column(code: dict[str, Operation], register: str, thread: int) -> int:
    """That of x and delta, which are added."""
    name, _, operands = code[register]
    if name != "add.f32":
        raise ValueError(f"{name} is squared, a sum of two loads was expected")
    one, other = (_loaded(code, operand, thread) for operand in operands)
    if one != other or one % 4:
        raise ValueError(f"bytes {one} and {other} are added")
    return one // 4


def _loaded(code: dict[str, Operation], register: str, thread: int) -> int:
    """Bytes from a tensor's begin on."""
    name, place, operands = code[register]
    if name.startswith("mov"):
        return _loaded(code, operands[0], thread)
    found = re.match(r"\[\s*(%\w+)\s*\+\s*(\d+)\s*\]", operands[0])
    if not name.startswith("ld.global") or not found:
        raise ValueError(f"{name} {operands} is added, a load was expected")
    return _number(code, found[1], thread) + int(found[2]) + 4 * max(place, 0)


def _number(code: dict[str, Operation], operand: str, thread: int) -> int:
    """An address in the first program of a grid whose tensors all begin at 0."""
    if re.fullmatch(r"-?\d+", operand):
        return int(operand)
    if operand.startswith("%tid.x"):
        return thread
    if operand.startswith(("%ctaid", "[")):
        return 0
    name, _, operands = code[operand]
    values = [_number(code, one, thread) for one in operands]
    if name.startswith("add.s"):
        return values[0] + values[1]
    if name.startswith("mul."):
        return values[0] * values[1]
    if name.startswith("shl.b"):
        return values[0] << values[1]
    if name in ("or.b32", "and.b32"):
        return values[0] | values[1] if name == "or.b32" else values[0] & values[1]
    if name.startswith(("mov.", "cvt.", "ld.param")):
        return values[0]
    raise ValueError(f"an address by {name}")
