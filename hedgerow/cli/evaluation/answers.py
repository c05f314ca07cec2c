"""From what a model wrote to the code that is judged, and from a task to what a model is asked."""

from __future__ import annotations

import re

from hedgerow.cli.evaluation.task import Task

FENCE = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.M | re.S)
THINKING_ENDS = "</think>"


def question(task: Task) -> str:
    """The one message of a chat."""
    return (
        "Complete this Python code. Use the standard library only. Answer with one Python code block that holds all of "
        f"it, imports included.\n\n```python\n{task.stub}\n```"
    )


def opening(task: Task) -> str:
    """The text that a base model continues."""
    return task.stub + "\n"


def code_of_chat(task: Task, text: str) -> str:
    """The last code block that defines what was asked for, else the last one, else all of a text that defines it; "".

    What stands before the end of the model's reasoning does not count.
    """
    said = text.rpartition(THINKING_ENDS)[2]
    blocks = FENCE.findall(said)
    wanted = re.compile(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(task.name)}\b", re.M)
    defining = [block for block in blocks if wanted.search(block)]
    if defining or blocks:
        return str((defining or blocks)[-1])
    return said if wanted.search(said) else ""


def code_of_completion(task: Task, text: str) -> str:
    """The stub and its continuation up to the first line that is not indented."""
    body = []
    for line in text.split("\n"):
        if line.strip() and not line[0].isspace():
            break
        body.append(line)
    return opening(task) + "\n".join(body) + "\n"
