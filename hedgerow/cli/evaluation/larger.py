"""Coding tasks that take an algorithm."""

from __future__ import annotations

from hedgerow.cli.evaluation.task import RAISES, Task, task

LARGER: tuple[Task, ...] = (
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
    task(
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
