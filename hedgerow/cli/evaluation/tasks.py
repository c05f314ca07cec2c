"""The coding tasks of `hedgerow eval`, written for this project: these, then those of `larger.py`."""

from __future__ import annotations

from hedgerow.cli.evaluation.larger import LARGER
from hedgerow.cli.evaluation.task import RAISES, Task, task

TASKS: tuple[Task, ...] = (
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    *LARGER,
)  # fmt: skip
