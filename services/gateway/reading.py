"""What reads the answers to a vocabulary's prompts. Everything about an answer is in its session's prompt.

So a stream that is resumed, here or at another gateway, has the same parts, and nothing has to be stored for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from services.gateway.answers import Answer, Mark
from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer
from services.gateway.tool_calls import Tools, declared_in
from services.gateway.types import Record


class Readers:
    """Makes them. `pieces` are the vocabulary's bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = tokenizer.pieces
        names = dict(zip(tokenizer.special_names, map(tokenizer.special, tokenizer.special_names), strict=True))
        self._marks = {names[mark.value]: mark for mark in Mark if mark.value in names}
        self._call, self._think, self._end_think = (
            names.get(mark.value, -1) for mark in (Mark.CALL, Mark.THINK, Mark.END_THINK)
        )
        self._end, middle = names.get("<|im_end|>", -1), names.get("<|im_middle|>", -1)
        assistant, system = names.get("<|im_assistant|>", -1), names.get("<|im_system|>", -1)
        self._answering = (assistant, *tokenizer.encode("assistant"), middle)
        self._declaring = (system, *tokenizer.encode("tool_declare"), middle)

    def of(self, record: Record) -> Answer | None:
        """What reads this session's answer; None: its prompt does not end where an assistant's turn begins."""
        prompt, sampling = record.prompt, record.resolved
        end = len(prompt)
        while end and prompt[end - 1] in (self._think, self._end_think):
            end -= 1
        if tuple(prompt[max(0, end - len(self._answering)) : end]) != self._answering:
            return None
        return Answer(
            self._marks,
            partial(Detokenizer, self.pieces, sampling.stop, sampling.stop_token_ids),
            frozenset(sampling.stop_token_ids),
            thinks=end < len(prompt) and prompt[-1] == self._think,
            first=prompt.count(self._call),
            tools=cache(partial(self._tools, prompt)),
        )

    def _tools(self, prompt: Sequence[int]) -> Tools:
        """What the first turn of the prompt declares."""
        begin = len(self._declaring)
        if tuple(prompt[:begin]) != self._declaring:
            return {}
        body = prompt[begin : prompt.index(self._end)] if self._end in prompt else ()
        return declared_in(b"".join(self.pieces[token] for token in body).decode("utf-8", "replace"))
