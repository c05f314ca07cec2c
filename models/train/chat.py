"""Chat pairs cut out of source files: a request made from a signature and its docstring, the code as answer."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

from models.train.sources import Source

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring on one line, or an empty string if it is no sentence."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    match = re.match(r"(.+?[.!?])(\s|$)", paragraph)
    sentence = match.group(1) if match else paragraph.rstrip(":") + "."
    return sentence if 20 <= len(sentence) <= 160 else ""


def answer_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], sentence: str) -> str:
    """The function's source, dedented, with its docstring cut down to the sentence of the request."""
    doc = node.body[0]
    head = lines[node.lineno - 1 : doc.lineno - 1]
    body = lines[(doc.end_lineno or doc.lineno) : node.end_lineno]
    indent = lines[node.lineno - 1][: node.col_offset] + "    "
    return textwrap.dedent("\n".join([*head, f'{indent}"""{sentence}"""', *body])).strip("\n") + "\n"


def pair_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """(request, answer) if the function is small, documented and undecorated."""
    docstring = ast.get_docstring(node)
    if node.decorator_list or not docstring or len(node.body) < 2 or node.name.startswith("__"):
        return None
    sentence = first_sentence(docstring)
    if not sentence or '"' in sentence or "\\" in sentence or node.body[0].lineno == node.lineno:
        return None
    if not 2 <= (node.end_lineno or 0) - (node.body[0].end_lineno or 0) <= 30:
        return None
    answer = answer_of(node, lines, sentence)
    request = f"Write a Python function `{node.name}({ast.unparse(node.args)})`: {sentence}"
    return (request, answer) if len(answer) <= 1500 and len(request) <= 400 else None


def pairs(source: Source, bodies: set[int]) -> Iterator[dict[str, str]]:
    """The chat pairs of one file; `bodies` holds what was seen, so that no answer comes twice."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.text.split("\n")
    for node in ast.walk(tree):
        pair = pair_of(node, lines) if isinstance(node, FUNCTION) else None
        if pair is None or hash(pair[1].split('"""', 2)[-1]) in bodies:
            continue
        bodies.add(hash(pair[1].split('"""', 2)[-1]))
        yield {"package": source.package, "licence": source.licence, "path": source.path,
               "request": pair[0], "answer": pair[1]}  # fmt: skip
