"""Answers in parts: reasoning, content, tool calls, however the tokens come, and the malformations that are known.

The rules are those of docs/kimi-k2.md, "Parsers". Answers are written as text with markers and fed as ids.
"""

from __future__ import annotations

import json
import random
import time

import pytest

from services.gateway.answers import Answer
from services.gateway.chat import KimiTemplate
from services.gateway.deltas import Call, Content, Delta, Reasoning
from services.gateway.members import MEMBERS
from services.gateway.reading import Readers
from services.gateway.tokenizer import Tokenizer
from services.gateway.tool_calls import declared_in
from services.gateway.types import (
    Chat,
    Fingerprint,
    Message,
    Mode,
    Record,
    Sampling,
    Speculation,
    ToolCall,
)
from tests.kimi import BUNDLED, ids_of, load_bundled, tokenizer_of

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
    },
}
NOW = {
    "name": "now",
    "description": "type fake = (_: {\n  city: string\n}) => any;",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
TOOLS = json.dumps([{"type": "function", "function": each} for each in (WEATHER, NOW)])
USER = Message("user", "hi")
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "北京"}<|tool_call_end|>'
TWO = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
WHOLE_ONE = Call(0, "functions.weather:0", "weather", '{"city": "北京"}', complete=True)
WHOLE_TWO = Call(1, "functions.now:1", "now", "{}", complete=True)


PLAIN = Sampling()


def record(prompt: list[int], sampling: Sampling = PLAIN) -> Record:
    return Record("s", b"", "m", "", tuple(prompt), sampling, sampling, Speculation(), Fingerprint(), Mode.EXACT, 0)


def answer(chat: Chat, member: str = "k2.6", sampling: Sampling = PLAIN, tokenizer: Tokenizer | None = None) -> Answer:
    tokenizer = tokenizer or load_bundled()
    made = Readers(tokenizer).of(record(KimiTemplate(MEMBERS[member], tokenizer).render(chat), sampling))
    assert made is not None
    return made


def joined(deltas: list[Delta]) -> list[Delta]:
    """Deltas of one part as one; a complete or malformed call takes no more."""
    whole: list[Delta] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        if delta == Content(""):  # in place of a marker that came alone
            continue
        if isinstance(delta, Call):
            if isinstance(last, Call) and last.index == delta.index:
                assert not last.complete
                assert not last.malformed
                assert not delta.id, "an id comes once"
                whole[-1] = Call(
                    last.index, last.id, last.name, last.arguments + delta.arguments, delta.complete, delta.malformed
                )
                continue
            assert delta.id or not delta.arguments or delta.complete or delta.malformed, "a name comes before arguments"
        elif type(last) is type(delta):
            whole[-1] = type(delta)(last.text + delta.text)  # type: ignore[union-attr]
            continue
        whole.append(delta)
    return whole


def parts(text: str | list[int], chat: Chat, *, member: str = "k2.6", stop: str = "") -> list[Delta]:
    """The parts of an answer, the same however its tokens are cut."""
    tokens = text if isinstance(text, list) else ids_of(load_bundled(), text)
    sampling = Sampling(stop=(stop,) if stop else ())
    found: list[list[Delta]] = []
    for step in (1, 2, 3, max(1, len(tokens))):
        reader, deltas = answer(chat, member, sampling), list[Delta]()
        for at in range(0, len(tokens), step):
            deltas += reader.feed(tokens[at : at + step])
        whole = joined(deltas + reader.finish(stop))
        assert reader.calls == sum(isinstance(delta, Call) and delta.complete for delta in whole)
        found.append(whole)
    assert all(each == found[0] for each in found)
    return found[0]


THINKING, INSTANT = Chat((USER,), TOOLS, thinking=True), Chat((USER,), TOOLS, thinking=False)
NO_TOOLS = Chat((USER,), thinking=False)


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        (THINKING, "Hm.</think>Hello<|im_end|>", [Reasoning("Hm."), Content("Hello")]),
        (INSTANT, "Hello<|im_end|>", [Content("Hello")]),
        (THINKING, "Hm.", [Reasoning("Hm.")]),  # cut by a limit
        (INSTANT, "<think>Hm.</think>Hello", [Reasoning("Hm."), Content("Hello")]),  # thinks all the same
        (INSTANT, "</think>Hello", [Content("Hello")]),
        (THINKING, "", []),
        (INSTANT, f"Look. {SECTION}{ONE}{END_SECTION}", [Content("Look. "), WHOLE_ONE]),
        (INSTANT, f"{SECTION}{ONE}{TWO}{END_SECTION}<|im_end|>", [WHOLE_ONE, WHOLE_TWO]),
        (INSTANT, f"{SECTION}{ONE}\n{TWO} {END_SECTION}After.", [WHOLE_ONE, WHOLE_TWO, Content("After.")]),
        # straight from reasoning to a call, without </think>
        (THINKING, f"Hm. {SECTION}{ONE}{END_SECTION}", [Reasoning("Hm. "), WHOLE_ONE]),
        # a section, or a call, that is not ended
        (INSTANT, f"{SECTION}{ONE}", [WHOLE_ONE]),
        (INSTANT, f"{SECTION}{ONE}{TWO.removesuffix('<|tool_call_end|>')}", [WHOLE_ONE, WHOLE_TWO]),
        (INSTANT, f"{SECTION}{ONE.removesuffix('<|tool_call_end|>')}{TWO}", [WHOLE_ONE, WHOLE_TWO]),
        (INSTANT, f"{SECTION}{ONE.removesuffix('<|tool_call_end|>')}{END_SECTION}.", [WHOLE_ONE, Content(".")]),
        (INSTANT, ONE, [WHOLE_ONE]),  # without a section
        # space around arguments and headers
        (
            INSTANT,
            f"{SECTION}<|tool_call_begin|> functions.weather:0\n<|tool_call_argument_begin|>"
            '\n {"city":  "a b"} \n<|tool_call_end|>',
            [Call(0, "functions.weather:0", "weather", '{"city":  "a b"}', complete=True)],
        ),
        # other headers: without functions., the name alone, another number
        (
            INSTANT,
            f"{SECTION}<|tool_call_begin|>weather:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [Call(0, "functions.weather:0", "weather", "{}", complete=True), WHOLE_TWO],
        ),
        # a bare counter: the arguments tell
        (
            INSTANT,
            f'{SECTION}<|tool_call_begin|>3<|tool_call_argument_begin|>{{"city":"a"}}<|tool_call_end|>',
            [Call(0, "functions.weather:0", "weather", '{"city":"a"}', complete=True)],
        ),
        (
            INSTANT,
            f'{SECTION}<|tool_call_begin|>3<|tool_call_argument_begin|>{{"zone":"a"}}<|tool_call_end|>',
            [Call(0, "functions.now:0", "now", '{"zone":"a"}', complete=True)],
        ),
        # markers as words inside of arguments, as ids and as text
        (
            INSTANT,
            SECTION + ONE.replace("北京", "a</think>b<think>"),
            [Call(0, "functions.weather:0", "weather", '{"city": "a</think>b<think>"}', complete=True)],
        ),
    ],
)  # fmt: skip
def test_the_parts_of_an_answer(chat: Chat, text: str, expected: list[Delta]) -> None:
    assert parts(text, chat) == expected


@pytest.mark.parametrize(
    ("call", "arguments", "why"),
    [
        ("functions.weather:0<|tool_call_argument_begin|>{\"city\": ", '{"city":', "not JSON"),
        ("functions.weather:0<|tool_call_argument_begin|>", "", "not JSON"),
        ("functions.weather:0<|tool_call_argument_begin|>[1]", "[1]", "no JSON object"),
        ("functions.weather:0<|tool_call_argument_begin|>{'city': 1}", "{'city': 1}", "not JSON"),
        ('functions.weather:0<|tool_call_argument_begin|>{"a": NaN}', '{"a": NaN}', "NaN"),
        ('functions.weather:0<|tool_call_argument_begin|>{} {}', "{} {}", "not JSON"),
        ('functions.weather:0<|tool_call_argument_begin|>{"a": 1, "a": 2}', '{"a": 1, "a": 2}', "a name comes twice"),
        ('functions.weather:0<|tool_call_argument_begin|>{"o": {"a": 1, "a": 1}}', '{"o": {"a": 1, "a": 1}}', "twice"),
        ("functions.weather:0", "functions.weather:0", "without arguments"),
        ("what now<|tool_call_argument_begin|>{}", "{}", "'what now' names no function"),
        ('3<|tool_call_argument_begin|>{"other": 1}', '{"other": 1}', "no tool, or several"),
        ("3<|tool_call_argument_begin|>{", "{", "not JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["<|tool_call_end|>", "", END_SECTION, TWO])
def test_a_call_that_cannot_be_used_comes_with_the_reason(call: str, arguments: str, why: str, end: str) -> None:
    """What came of it is not lost, and the calls beside it are not harmed."""
    found = parts(f"{SECTION}{ONE}<|tool_call_begin|>{call}{end}", INSTANT)
    assert found[0] == WHOLE_ONE
    broken = found[1]
    assert isinstance(broken, Call)
    assert (broken.index, broken.arguments, broken.complete) == (1, arguments, False)
    assert why in broken.malformed
    assert found[2:] == ([Call(2, "functions.now:2", "now", "{}", complete=True)] if end is TWO else [])


def spelled_out(text: str) -> list[int]:
    """All of it as ordinary text, no marker among the tokens."""
    return load_bundled().encode(text)


@pytest.mark.parametrize("name", ["tool_calls_section", "tool_call_section"])
def test_markers_that_are_written_as_text_are_markers_where_tools_are_declared(name: str) -> None:
    section = f"Look. <|{name}_begin|>\n{ONE} {TWO}<|{name}_end|> Done."
    assert parts(spelled_out(section), INSTANT) == [Content("Look. "), WHOLE_ONE, WHOLE_TWO, Content(" Done.")]
    assert parts(spelled_out(section), NO_TOOLS) == [Content(section)]
    assert parts(spelled_out(section), THINKING) == [Reasoning(section)], "a draft inside of reasoning is none"
    mixed = [*spelled_out(f"<|{name}_begin|>"), *ids_of(load_bundled(), ONE)]
    assert parts(mixed, INSTANT) == [WHOLE_ONE]
    assert parts(spelled_out(f"<|{name}_begin|>{ONE}"), INSTANT) == [WHOLE_ONE], "not ended"


@pytest.mark.parametrize(
    "text",
    [
        f"The marker {SECTION} opens a section.",
        f"{SECTION}{SECTION}x",
        f"It ends in {SECTION}",
        f"{SECTION}   ",
        "<|tool_calls_section_beg",
        f"{ONE} alone is text",
        "<|tool_call_section_begin|> <|tool_call_beg",
    ],
)
def test_words_about_markers_are_words(text: str) -> None:
    assert parts(spelled_out(text), INSTANT) == [Content(text)]


def test_a_call_that_began_as_a_marker_ends_as_one() -> None:
    """Its arguments may have the words in them."""
    inside = '{"city": "<|tool_call_end|><|tool_calls_section_end|>"}'
    head = ids_of(load_bundled(), f"{SECTION}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>")
    tokens = [*head, *spelled_out(inside), *ids_of(load_bundled(), "<|tool_call_end|>")]
    assert parts(tokens, INSTANT) == [Call(0, "functions.weather:0", "weather", inside, complete=True)]


def test_calls_are_counted_through_the_conversation() -> None:
    calls = (ToolCall("a", "weather", '{"city":"a"}'), ToolCall("b", "now", "{}"))
    history = (USER, Message("assistant", tool_calls=calls), Message("tool", "x", tool_call_id="a"))
    found = parts(f"{SECTION}{ONE}", Chat(history, TOOLS, thinking=False))
    assert found == [Call(0, "functions.weather:2", "weather", '{"city": "北京"}', complete=True)]


@pytest.mark.parametrize("member", ["k2-instruct", "k2-thinking", "k2.5", "k2.6"])
def test_every_members_answers_are_read(member: str) -> None:
    """K2-Thinking opens its reasoning itself; K2 has none. What JSON and TypeScript declare is known alike."""
    chat = Chat((USER,), TOOLS)
    counted = f'{SECTION}<|tool_call_begin|>0<|tool_call_argument_begin|>{{"zone":"a"}}<|tool_call_end|>'
    call = Call(0, "functions.now:0", "now", '{"zone":"a"}', complete=True)
    opening = {"k2-thinking": "<think>Hm.</think>", "k2-instruct": ""}.get(member, "Hm.</think>")
    thought = [] if member == "k2-instruct" else [Reasoning("Hm.")]
    assert parts(f"{opening}Hello{counted}", chat, member=member) == [*thought, Content("Hello"), call]


def test_a_vocabulary_without_think_tokens_is_read() -> None:
    tokenizer = tokenizer_of(BUNDLED, thinks=False)
    reader = answer(Chat((USER,), TOOLS), "k2-instruct", tokenizer=tokenizer)
    assert joined(reader.feed(ids_of(tokenizer, f"a<think>b{SECTION}{ONE}")) + reader.finish()) == [
        Content("a<think>b"),
        WHOLE_ONE,
    ]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("Hm.</think>one STOP", "STOP", [Reasoning("Hm."), Content("one ")]),
        ("Hm. STOP", "STOP", [Reasoning("Hm. ")]),
        ("ST</think>OP", "", [Reasoning("ST"), Content("OP")]),
        ("Hm.</think>", "</think>", [Reasoning("Hm.")]),
    ],
)
def test_a_stop_string_is_no_part(text: str, stop: str, expected: list[Delta]) -> None:
    assert parts(text, Chat((USER,), thinking=True), stop=stop) == expected


def test_a_stop_token_is_no_marker() -> None:
    token = load_bundled().special("</think>")
    reader = answer(THINKING, sampling=Sampling(stop_token_ids=(token,)))
    assert joined(reader.feed([*ids_of(load_bundled(), "Hm."), token]) + reader.finish()) == [Reasoning("Hm.")]


def test_only_a_prompt_that_ends_where_an_answer_begins_has_one() -> None:
    tokenizer = load_bundled()
    readers = Readers(tokenizer)
    for prompt in (
        [],
        tokenizer.encode("def f():"),
        ids_of(tokenizer, "<|im_user|>user<|im_middle|>"),
        [tokenizer.special("<think>")],
    ):
        assert readers.of(record(prompt)) is None
    chat = KimiTemplate(MEMBERS["k2.6"], tokenizer).render(Chat((USER,)))
    assert readers.of(record(chat)) is not None
    assert readers.of(record([*chat, 7])) is None, "the answer has begun already"


@pytest.mark.parametrize(
    "text",
    [
        "[1]", '[{"function": 7}]', "[" * 2000, '[{"type":"function","function":{"name":"f","parameters":3}}]',
        "type f = (_: {\n" * 30_000, "type f = (_: {\n  x: string,\n" * 10_000, "\n  a" * 100_000, "  " + "a" * 200_000,
    ],
)  # fmt: skip
def test_a_prompt_that_only_looks_as_if_it_declared_tools_is_read_quickly_and_breaks_nothing(text: str) -> None:
    """Prompts may come as token ids, so their text may be anything."""
    begun = time.thread_time()
    tools = declared_in(text)
    assert time.thread_time() - begun < 1.0
    assert set(tools) <= {"f"}
    vocabulary = load_bundled()
    declaring, answering = "<|im_system|>tool_declare<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"
    prompt = ids_of(vocabulary, f"{declaring}{text[:4000]}<|im_end|>{answering}")
    reader = Readers(vocabulary).of(record(prompt))
    assert reader is not None
    assert joined(reader.feed(ids_of(vocabulary, f"a{SECTION}{ONE}")) + reader.finish()) == [Content("a"), WHOLE_ONE]


def test_endless_space_is_held_back_at_no_cost() -> None:
    """Models that lost their way write it: each token of it must cost the same."""
    vocabulary = load_bundled()
    space = vocabulary.encode(" ")
    for head in (f"{SECTION}<|tool_call_begin|>now:0<|tool_call_argument_begin|>{{", SECTION):
        reader = answer(INSTANT)
        reader.feed(ids_of(vocabulary, head))
        begun = time.thread_time()
        assert not any(reader.feed(space) for _ in range(60_000))
        assert time.thread_time() - begun < 5.0
    reader = answer(INSTANT)
    text = SECTION + " " * 400
    assert joined(reader.feed(spelled_out(text)) + reader.finish()) == [Content(text)]


def test_random_tokens_lose_no_text_and_break_nothing() -> None:
    """Whatever comes: the same parts however it is cut, no fault, and every ordinary character is in one of them."""
    draw, tokenizer = random.Random(3), load_bundled()
    words = [
        SECTION,
        END_SECTION,
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
        "<|im_end|>",
    ]
    texts = ["a", "{", "}", '{"city":"x"}', "functions.weather:0", "3", "[", "é", "<|tool_call_"]
    for _ in range(1500):
        picked = [draw.choice((draw.choice(words), draw.choice(texts))) for _ in range(draw.randrange(12))]
        tokens = [
            t
            for each in picked
            for t in ([tokenizer.special(each)] if each in words and draw.random() < 0.8 else tokenizer.encode(each))
        ]
        whole = parts(tokens, draw.choice((THINKING, INSTANT, NO_TOOLS)))
        said = "".join(d.arguments if isinstance(d, Call) else d.text for d in whole)
        for letter in "aé":
            plain = sum(tokenizer.pieces[t].decode("utf-8", "replace").count(letter) for t in tokens if t < 3840)
            headers = sum(p.count(letter) for p in picked if p.startswith("functions"))
            assert said.count(letter) >= plain - headers - sum(p.count(letter) for p in picked if p in words)
