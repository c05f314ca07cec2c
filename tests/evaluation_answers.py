"""Right answers to the tasks of `hedgerow eval`, and one wrong answer to each that is nearly right."""

from __future__ import annotations

RIGHT = {
    "sum_of_squares": """
def sum_of_squares(numbers):
    return sum(n * n for n in numbers)
""",
    "reads_the_same": """
def reads_the_same(text):
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]
""",
    "run_lengths": """
from itertools import groupby
def run_lengths(text):
    return [(c, len(list(run))) for c, run in groupby(text)]
""",
    "join_spans": """
def join_spans(spans):
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined
""",
    "nested_well": """
def nested_well(text):
    stack, quoted = [], False
    for c in text:
        if c == '"':
            quoted = not quoted
        elif not quoted and c in "([{":
            stack.append(")]}"["([{".index(c)])
        elif not quoted and c in ")]}" and (not stack or stack.pop() != c):
            return False
    return not stack and not quoted
""",
    "to_roman": """
def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(number)
    out = ""
    for value, text in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
                           "M CM D CD C XC L XL X IX V IV I".split()):
        out += text * (number // value)
        number %= value
    return out
""",
    "seconds_of": r"""
import re
def seconds_of(text):
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text, re.A)
    if not text or not found:
        raise ValueError(text)
    return sum(int(n or 0) * size for n, size in zip(found.groups(), (86400, 3600, 60, 1)))
""",
    "Recent": """
from collections import OrderedDict
class Recent:
    def __init__(self, capacity):
        self.capacity, self.kept = capacity, OrderedDict()
    def get(self, key):
        if key not in self.kept:
            return None
        self.kept.move_to_end(key)
        return self.kept[key]
    def put(self, key, value):
        self.kept[key] = value
        self.kept.move_to_end(key)
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
""",
    "typing_distance": """
def typing_distance(a, b):
    d = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d[i][j] = min(d[i-1][j] + 1, d[i][j-1] + 1, d[i-1][j-1] + (a[i-1] != b[j-1]))
            if i > 1 and j > 1 and a[i-1] == b[j-2] and a[i-2] == b[j-1]:
                d[i][j] = min(d[i][j], d[i-2][j-2] + 1)
    return d[-1][-1]
""",
    "value_of": r"""
import re
def value_of(expression):
    parts = re.findall(r"\s*(\d+|\S)", expression)
    if "".join(parts) != re.sub(r"\s", "", expression):
        raise ValueError(expression)
    parts.append("")
    def value():
        part = parts.pop(0)
        if part in "+-" and part:
            return value() if part == "+" else -value()
        if part == "(":
            found = sums()
            if parts.pop(0) != ")":
                raise ValueError(expression)
            return found
        if not part.isdigit():
            raise ValueError(expression)
        return int(part)
    def products():
        found = value()
        while parts[0] in ("*", "/"):
            found = found * value() if parts.pop(0) == "*" else found / value()
        return found
    def sums():
        found = products()
        while parts[0] in ("+", "-"):
            found = found + products() if parts.pop(0) == "+" else found - products()
        return found
    found = sums()
    if parts != [""]:
        raise ValueError(expression)
    return found
""",
    "build_order": """
import heapq
def build_order(needs):
    waits = {name: set(before) for name, before in needs.items()}
    for before in list(needs.values()):
        for name in before:
            waits.setdefault(name, set())
    ready, order = sorted(n for n, before in waits.items() if not before), []
    while ready:
        name = heapq.heappop(ready)
        order.append(name)
        for other, before in waits.items():
            if name in before:
                before.discard(name)
                if not before:
                    heapq.heappush(ready, other)
    return order if len(order) == len(waits) else None
""",
    "steps_out": """
from collections import deque
def steps_out(maze):
    at = {c: (y, x) for y, row in enumerate(maze) for x, c in enumerate(row) if c in "SE"}
    seen, queue = {at["S"]: 0}, deque([at["S"]])
    while queue:
        y, x = queue.popleft()
        if (y, x) == at["E"]:
            return seen[y, x]
        for to in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            if 0 <= to[0] < len(maze) and 0 <= to[1] < len(maze[0]) and maze[to[0]][to[1]] != "#" and to not in seen:
                seen[to] = seen[y, x] + 1
                queue.append(to)
    return -1
""",
    "fill_lines": """
def fill_lines(text, width):
    lines = []
    for word in text.split():
        if lines and len(word) <= width and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines += [word[i:i + width] for i in range(0, len(word), width)]
    return lines
""",
    "clockwise": """
def clockwise(rows):
    out, rows = [], [list(row) for row in rows]
    while rows:
        out += rows.pop(0)
        rows = [list(column) for column in zip(*rows)][::-1]
    return out
""",
    "differences": """
def differences(old, new):
    found = []
    def walk(a, b, path):
        if type(a) is not type(b):
            found.append(path)
        elif isinstance(a, dict) or isinstance(a, list):
            a = a if isinstance(a, dict) else dict(enumerate(a))
            b = b if isinstance(b, dict) else dict(enumerate(b))
            for key in a.keys() | b.keys():
                below = f"{path}/{key}" if path else str(key)
                if key in a and key in b:
                    walk(a[key], b[key], below)
                else:
                    found.append(below)
        elif a != b:
            found.append(path)
    walk(old, new, "")
    return sorted(found)
""",
    "by_version": """
def by_version(versions):
    def key(version):
        numbers, dash, suffix = version.partition("-")
        parts = [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in suffix.split(".")] if dash else []
        return [int(n) for n in numbers.split(".")], not dash, parts
    return sorted(versions, key=key)
""",
}
# each is RIGHT with one thing changed
SLIPS = {
    "sum_of_squares": ("n * n", "n * abs(n)"),
    "reads_the_same": (".lower()", ""),
    "run_lengths": ("groupby(text)", "groupby(sorted(text))"),
    "join_spans": ("max(joined[-1][1], end)", "end"),
    "nested_well": ("not stack and not quoted", "not stack"),
    "to_roman": ("3999:", "4000:"),
    "seconds_of": ("not text or ", ""),
    "Recent": ("        self.kept.move_to_end(key)\n        return", "        return"),
    "typing_distance": ("a[i-2] == b[j-1]:", "False:"),
    "value_of": ("found - products()", "found + products()"),
    "build_order": ("len(order) == len(waits)", "order or not waits"),
    "steps_out": ("return -1", "return None"),
    "fill_lines": ("+ 1 + len(word) <= width", "+ len(word) <= width"),
    "clockwise": ("[::-1]", ""),
    "differences": ("type(a) is not type(b)", "type(a) is not type(b) and a != b"),
    "by_version": ("not dash, parts", "bool(dash), parts"),
}


def wrong(name: str) -> str:
    """A nearly right answer."""
    right, slip = SLIPS[name]
    assert RIGHT[name].count(right) >= 1, f"{name}: {right!r} is not in its answer"
    return RIGHT[name].replace(right, slip)
