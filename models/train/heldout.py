"""Prompts from held-out files: function heads with and without file context, and chat requests. The files' names.

python -m models.train.heldout           # -> models/heldout/{heads,chat}.jsonl and files.tsv
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from models.train.chat import FUNCTION
from models.train.installed import write_list
from models.train.tokenizer import load

WORK = Path(".work/train")
CONTEXT_TOKENS = 256
HEAD_TOKENS = 160


def heads(record: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(text before, head) of each documented function with a body of 4 lines or more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(record["text"])
    except (SyntaxError, ValueError):
        return
    lines = record["text"].split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTION) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        end = node.body[0].end_lineno or node.body[0].lineno
        if node.body[0].lineno > node.lineno and (node.end_lineno or 0) - end >= 4:
            yield "".join(f"{line}\n" for line in lines[:start]), "".join(f"{line}\n" for line in lines[start:end])


def context_of(before: str, encoding: tiktoken.Encoding) -> str:
    """The last whole lines before the head that fit into CONTEXT_TOKENS."""
    lines, kept = before[-6000:].splitlines(keepends=True), ""
    for line in reversed(lines):
        if len(encoding.encode_ordinary(line + kept)) > CONTEXT_TOKENS:
            break
        kept = line + kept
    return kept


def pick_heads(records: list[dict[str, str]], encoding: tiktoken.Encoding, count: int) -> list[dict[str, object]]:
    """At most one head per file, files in random order."""
    draw = random.Random(7)
    draw.shuffle(records)
    out: list[dict[str, object]] = []
    for record in records:
        found = [(b, h) for b, h in heads(record) if len(encoding.encode_ordinary(h)) <= HEAD_TOKENS]
        if not found:
            continue
        before, head = draw.choice(found)
        out.append({
            "id": f"h{len(out):03d}", "package": f"{record['package']} {record['version']}",
            "licence": record["licence"], "path": record["path"], "head": head,
            "prompt": context_of(before, encoding) + head,
        })  # fmt: skip
        if len(out) == count:
            break
    return out


def pick_chat(count: int) -> list[dict[str, object]]:
    records = [json.loads(line) for line in (WORK / "heldout_chat.jsonl").read_text().splitlines()]
    random.Random(7).shuffle(records)
    by_package: dict[str, dict[str, str]] = {}
    for record in records:
        by_package.setdefault(record["package"], record)
    chosen = (list(by_package.values()) + records)[:count]
    keys = ("package", "licence", "path", "request", "answer")
    return [{"id": f"c{i:02d}", **{k: r[k] for k in keys}} for i, r in enumerate(chosen)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/heldout"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in (WORK / "heldout.jsonl").read_text().splitlines()]
    write_list(records, args.out / "files.tsv")
    for name, rows in (("heads", pick_heads(records, load(Path("models/sapling")), 200)), ("chat", pick_chat(50))):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        print(f"{name}: {len(rows)} prompts, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
