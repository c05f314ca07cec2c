"""The coding tasks of `hedgerow eval`: what the model is told, and the calls by which its code is judged.

Written for this project. A model sees `stub`, a signature and a docstring; never the calls or their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """`name` is the function or class asked for. `calls` are expressions with the values that they must have, evaluated
    beside the answer after `driver`; the values stay outside the sandbox."""

    name: str
    stub: str
    calls: Sequence[tuple[str, Any]]
    driver: str = ""


RAISES = """
def refused(function, *arguments):
    try:
        function(*arguments)
    except ValueError:
        return True
    return False
"""


def _task(name: str, stub: str, *calls: tuple[str, Any], driver: str = "") -> Task:
    return Task(name, stub.strip("\n"), calls, driver)


TASKS: tuple[Task, ...] = (
    _task(
        "sum_of_squares",
        '''
def sum_of_squares(numbers):
    """Return the sum of the squares of a list of numbers; 0 for an empty list."""
''',
        ("sum_of_squares([])", 0),
        ("sum_of_squares([3])", 9),
        ("sum_of_squares([1, -2, 3, 0])", 14),
        ("sum_of_squares([0.5, 0.5])", 0.5),
    ),
    _task(
        "reads_the_same",
        '''
def reads_the_same(text):
    """Tell whether text is the same backwards, ignoring case and everything but letters and digits."""
''',
        ("reads_the_same('')", True),
        ("reads_the_same('Never odd or even!')", True),
        ("reads_the_same('1, 2 ... 31')", False),
        ("reads_the_same('ab')", False),
        ("reads_the_same('Was it a car, or a cat I saw?')", True),
    ),
    _task(
        "run_lengths",
        '''
def run_lengths(text):
    """Return [character, count] for each run of equal characters, in order.

    run_lengths("aabc") is [["a", 2], ["b", 1], ["c", 1]].
    """
''',
        ("run_lengths('')", []),
        ("run_lengths('z')", [["z", 1]]),
        ("run_lengths('aabaaa')", [["a", 2], ["b", 1], ["a", 3]]),
        ("run_lengths('  \\n')", [[" ", 2], ["\n", 1]]),
    ),
    _task(
        "join_spans",
        '''
def join_spans(spans):
    """Join closed spans [start, end] that overlap or share an end point; return the result sorted by start.

    The argument is not changed. [1, 2] and [3, 4] stay apart.
    """
''',
        ("join_spans([])", []),
        ("join_spans([[5, 8], [1, 2], [2, 4]])", [[1, 4], [5, 8]]),
        ("join_spans([[1, 2], [3, 4]])", [[1, 2], [3, 4]]),
        ("join_spans([[0, 10], [2, 3], [10, 10]])", [[0, 10]]),
        ("unchanged()", True),
        driver="""
def unchanged():
    spans = [[3, 4], [1, 3]]
    join_spans(spans)
    return spans == [[3, 4], [1, 3]]
""",
    ),
    _task(
        "nested_well",
        '''
def nested_well(text):
    """Tell whether (), [] and {} in text are closed in the right order.

    Other characters do not matter. Brackets between double quotes do not count; a quote that is never closed makes it
    False.
    """
''',
        ("nested_well('')", True),
        ("nested_well('f(a[1], {2: (3)})')", True),
        ("nested_well('(]')", False),
        ("nested_well('((')", False),
        ("nested_well(')(')", False),
        ("nested_well('(\"]}\")')", True),
        ("nested_well('(\"')", False),
        ("nested_well('() \"and')", False),
    ),
    _task(
        "to_roman",
        '''
def to_roman(number):
    """Return a number from 1 to 3999 as a Roman numeral. Raise ValueError for any other."""
''',
        ("[to_roman(n) for n in (1, 4, 9, 14, 40, 90, 400)]", ["I", "IV", "IX", "XIV", "XL", "XC", "CD"]),
        ("to_roman(1994)", "MCMXCIV"),
        ("to_roman(3888)", "MMMDCCCLXXXVIII"),
        ("to_roman(3999)", "MMMCMXCIX"),
        ("[refused(to_roman, n) for n in (0, 4000, -1)]", [True, True, True]),
        driver=RAISES,
    ),
    _task(
        "seconds_of",
        '''
def seconds_of(text):
    """Return the seconds of a duration such as "1d2h30m5s".

    Units are d, h, m and s, in this order, each at most once and at least one; each follows a whole number.
    Anything else raises ValueError.
    """
''',
        ("seconds_of('90s')", 90),
        ("seconds_of('1h30m')", 5400),
        ("seconds_of('1d2h30m5s')", 95405),
        ("seconds_of('0m')", 0),
        (
            "[refused(seconds_of, t) for t in ('', '5', 'h', '1m1h', '1s1s', '1.5h', '-1s', '1h ', '1 h', '1x')]",
            [True] * 10,
        ),
        driver=RAISES,
    ),
    _task(
        "Recent",
        '''
class Recent:
    """Keeps the values of the keys that were used last, at most `capacity` of them.

    Recent(capacity) starts empty. get(key) returns the value, or None where there is none; put(key, value) stores one.
    Both count as a use of the key. When there are too many, the key whose last use is longest ago is dropped.
    """
''',
        ("play(2, 'p1 p2 g1 p3 g2 g1 g3')", [None, None, 10, None, None, 10, 30]),
        ("play(1, 'p1 p2 g1 g2')", [None, None, None, 20]),
        ("play(2, 'p1 p2 p1 p3 g1 g2')", [None, None, None, None, 10, None]),
        ("play(3, 'g1 p1 g1')", [None, None, 10]),
        driver="""
def play(capacity, moves):
    kept, seen = Recent(capacity), []
    for move in moves.split():
        key = int(move[1:])
        if move[0] == "p":
            kept.put(key, key * 10)
        seen.append(kept.get(key) if move[0] == "g" else None)
    return seen
""",
    ),
    _task(
        "typing_distance",
        '''
def typing_distance(a, b):
    """Return the fewest edits that turn a into b.

    An edit inserts, deletes or replaces one character, or swaps two neighbours; no character is edited twice.
    """
''',
        ("typing_distance('', '')", 0),
        ("typing_distance('', 'abc')", 3),
        ("typing_distance('kitten', 'sitting')", 3),
        ("typing_distance('recieve', 'receive')", 1),
        ("typing_distance('ca', 'abc')", 3),
        ("typing_distance('a' * 60, 'b' * 60)", 60),
    ),
    _task(
        "value_of",
        '''
def value_of(expression):
    """Return the value of an arithmetic expression of whole numbers, + - * /, a sign before a value, and parentheses.

    The usual precedence holds, operators of one rank go from left to right, and / is true division. Spaces may stand
    between the parts. An expression that makes no sense raises ValueError, division by zero ZeroDivisionError.
    Without eval or exec.
    """
''',
        ("value_of('7')", 7),
        ("value_of('2 + 3 * 4')", 14),
        ("value_of('8 - 3 - 2')", 3),
        ("value_of('8 / 4 / 2')", 1.0),
        ("value_of('-(2 + 3) * -2')", 10),
        ("value_of('((1))+2*(3-1)')", 5),
        ("[refused(value_of, t) for t in ('', '1 +', '(1', '1)', '1 2', '2 * * 3', 'a')]", [True] * 7),
        ("by_zero()", True),
        driver=RAISES
        + """
def by_zero():
    try:
        value_of("1 / (2 - 2)")
    except ZeroDivisionError:
        return True
""",
    ),
    _task(
        "build_order",
        '''
def build_order(needs):
    """Put targets in an order in which each comes after all that it needs; None where that cannot be.

    needs maps a target to the list of targets that it needs; those may be missing as keys. Where several could come
    next, take the alphabetically first.
    """
''',
        ("build_order({})", []),
        ("build_order({'app': ['lib', 'data'], 'lib': ['core']})", ["core", "data", "lib", "app"]),
        ("build_order({'b': [], 'a': [], 'c': ['a']})", ["a", "b", "c"]),
        ("build_order({'a': ['b'], 'b': ['a']})", None),
        ("build_order({'a': ['a'], 'b': []})", None),
        ("build_order({'z': ['y', 'y'], 'x': []})", ["x", "y", "z"]),
    ),
    _task(
        "steps_out",
        '''
def steps_out(maze):
    """Return the fewest steps from S to E in a maze, or -1 where there is no way.

    maze is a list of lines of equal length; # is a wall. A step goes up, down, left or right.
    """
''',
        ("steps_out(['SE'])", 1),
        ("steps_out(['S#E'])", -1),
        ("steps_out(['S.#', '.#E', '...'])", 5),
        ("steps_out(['S.....', '#####.', 'E.....'])", 12),
        ("steps_out(['S' + '.' * 198] + ['.' * 199] * 150 + ['.' * 198 + 'E'])", 349),
    ),
    _task(
        "fill_lines",
        '''
def fill_lines(text, width):
    """Break text into lines of at most width characters, each with as many words as fit; return the list of lines.

    Words are separated by white space, on a line by one space. A word longer than width begins a line of its own and is
    cut into pieces of width characters; what follows goes on behind its last piece where it fits.
    """
''',
        ("fill_lines('', 5)", []),
        ("fill_lines('the  quick\\nbrown fox', 10)", ["the quick", "brown fox"]),
        ("fill_lines('a bb ccc', 4)", ["a bb", "ccc"]),
        ("fill_lines('x abcdefgh y', 3)", ["x", "abc", "def", "gh", "y"]),
        ("fill_lines('x abcdefg y', 3)", ["x", "abc", "def", "g y"]),
        ("fill_lines('ab abcdef cd', 3)", ["ab", "abc", "def", "cd"]),
    ),
    _task(
        "clockwise",
        '''
def clockwise(rows):
    """Return the values of a rectangular table in the order of a spiral from the top left, clockwise inwards."""
''',
        ("clockwise([])", []),
        ("clockwise([[1]])", [1]),
        ("clockwise([[1, 2, 3], [4, 5, 6], [7, 8, 9]])", [1, 2, 3, 6, 9, 8, 7, 4, 5]),
        ("clockwise([[1, 2, 3, 4]])", [1, 2, 3, 4]),
        ("clockwise([[1], [2], [3]])", [1, 2, 3]),
        ("clockwise([[1, 2], [3, 4], [5, 6]])", [1, 2, 4, 6, 5, 3]),
    ),
    _task(
        "differences",
        '''
def differences(old, new):
    """Return the sorted paths at which two nested structures of dicts, lists and plain values differ.

    A path is the keys and list indices on the way, with "/" between them; the whole is "". A key or index that only one
    side has is a difference at its path. True and 1 differ, as do a dict and a list.
    """
''',
        ("differences({'a': 1}, {'a': 1})", []),
        ("differences(1, 2)", [""]),
        ("differences({'a': [1, 2], 'b': 3}, {'a': [1, 5, 6], 'c': 3})", ["a/1", "a/2", "b", "c"]),
        ("differences({'a': {'b': None}}, {'a': {'b': False}})", ["a/b"]),
        ("differences([True], [1])", ["0"]),
        ("differences({'x': []}, {'x': {}})", ["x"]),
    ),
    _task(
        "by_version",
        '''
def by_version(versions):
    """Sort version numbers such as "1.10.0" or "2.0.0-rc.1", the lowest first.

    Three numbers, compared as numbers. A version with a suffix after "-" comes before the same one without. Suffixes
    are compared part by part between dots: numbers as numbers, before words; words as text; if all parts are equal, the
    shorter first.
    """
''',
        ("by_version([])", []),
        ("by_version(['1.10.0', '1.9.1', '1.9.0'])", ["1.9.0", "1.9.1", "1.10.0"]),
        ("by_version(['1.0.0', '1.0.0-rc.1'])", ["1.0.0-rc.1", "1.0.0"]),
        (
            "by_version(['2.0.0-rc.10', '2.0.0-rc.9', '2.0.0-rc', '2.0.0-beta.x', '2.0.0-beta.2', '2.0.0-7'])",
            ["2.0.0-7", "2.0.0-beta.2", "2.0.0-beta.x", "2.0.0-rc", "2.0.0-rc.9", "2.0.0-rc.10"],
        ),
    ),
)  # fmt: skip
