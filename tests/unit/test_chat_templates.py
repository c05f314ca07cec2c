"""Conversations and members of the family: what each published template makes of each conversation.

Where an expectation comes from:
- K2: moonshotai/Kimi-K2-Instruct's published chat template, as the PyPI package `renderers` 0.1.12 (kimi_k2) and
  MoonshotAI/Kimi-K2's tool_call_guidance.md have it: no reasoning, a made-up system turn with a line break behind it,
  tools as compact JSON with sorted keys.
- K2-Thinking: its published chat_template.jinja, as llama.cpp carries it (models/templates).
- K2.5: its published chat_template.jinja, as lightseekorg/smg carries it, and `renderers` 0.1.12 (kimi_k25).
- K2.6: tokenization_kimi.py and tool_declaration_ts.py in MoonshotAI/Kimi-Vendor-Verifier, and K2.6's model card on
  `preserve_thinking`; where neither speaks, K2.5's.
- ids: the published tokenizer encodes the whole text with all special tokens allowed. Nothing here is what ours gave.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hedgerow.weights.published import MINI, Member
from hedgerow.weights.published import config as published_config
from hedgerow.weights.vocabulary import write_vocabulary
from services.gateway.chat import KimiTemplate
from services.gateway.members import MEMBERS, member_of
from services.gateway.templates import template_of
from services.gateway.tokenizer import Tokenizer, TokenizerError
from services.gateway.types import Chat, Message, ToolCall
from tests.kimi import BUNDLED, KIMI, NEEDS_KIMI, published, spelled, tokenizer_of

FOLDERS = [pytest.param(BUNDLED, id="bundled"), pytest.param(KIMI, id="published", marks=NEEDS_KIMI)]
ALL = ("k2-instruct", "k2-thinking", "k2.5", "k2.6")

# Parts of the published texts.
MADE_UP = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
SYSTEM = {"k2-instruct": f"{MADE_UP}\n", "k2-thinking": MADE_UP, "k2.5": "", "k2.6": ""}
TURN = "<|im_assistant|>assistant<|im_middle|>"
ANSWER = {"k2-instruct": TURN, "k2-thinking": TURN, "k2.5": f"{TURN}<think>", "k2.6": f"{TURN}<think>"}
INSTANT = f"{TURN}<think></think>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.\nToday's only.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["°C", "°F"], "type": "string", "default": "°C"},
                "city": {"type": "string", "description": "Where.", "minLength": 1, "maxLength": 40},
                "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                "near": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Point"}]},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {
                "Point": {
                    "type": "object",
                    "description": "A place.",
                    "properties": {"y": {"type": "number"}, "x": {"type": ["number", "null"], "minimum": -180}},
                    "required": ["x", "y"],
                }
            },
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
AS_JSON = (
    '[{"function":{"description":"Tells the weather.\\nToday\'s only.","name":"weather","parameters":{"$defs":{"Point":'
    '{"description":"A place.","properties":{"x":{"minimum":-180,"type":["number","null"]},"y":{"type":"number"}},'
    '"required":["x","y"],"type":"object"}},"additionalProperties":false,"properties":{"city":{"description":"Where.",'
    '"maxLength":40,"minLength":1,"type":"string"},"days":{"items":{"type":"integer"},"minItems":1,"type":"array"},'
    '"near":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/Point"}]},"unit":{"default":"°C","enum":["°C","°F"],'
    '"type":"string"}},"required":["city"],"type":"object"}},"type":"function"},{"function":{"name":"now","parameters":'
    '{"properties":{},"type":"object"}},"type":"function"}]'
)
AS_TYPESCRIPT = """# Tools

## functions
namespace functions {
// A place.
interface Point {
  x: number | null,
  y: number
}
// Tells the weather.
// Today's only.
type weather = (_: {
  // Where.
  // maxLength: 40, minLength: 1
  city: string,
  // minItems: 1
  days?: Array<number>,
  near?: null | Point,
  // Default: "°C"
  unit?: "°C" | "°F",
  [k: string]: never
}) => any;
type now = (_: {}) => any;
}
"""
TOOLS = json.dumps([WEATHER, NOW])
DECLARED = {"k2-instruct": AS_JSON, "k2-thinking": AS_JSON, "k2.5": AS_TYPESCRIPT, "k2.6": AS_TYPESCRIPT}


def user(text: str) -> Message:
    return Message("user", text)


def each(text: str, members: tuple[str, ...] = ALL) -> dict[str, str]:
    """A text with {system}, {answer}, {tools} and {thought}, where reasoning of this turn stands, for every member."""
    return {
        name: text.replace("{system}", SYSTEM[name])
        .replace("{answer}", ANSWER[name])
        .replace("{tools}", DECLARED[name])
        .replace("{none}", "" if name == "k2-instruct" else "<think></think>")
        .replace("{new}", "" if name == "k2-instruct" else "<think>Look it up.</think>")
        for name in members
    }


CALL = ToolCall("functions.weather:0", "weather", '{"city": "北京"}')
HISTORY = (
    user("Hello"),
    Message("assistant", "Hi!", reasoning="A greeting."),
    user("Weather?"),
    Message("assistant", "One moment. ", reasoning="Look it up.", tool_calls=(CALL,)),
    Message("tool", "7 °C", tool_call_id="functions.weather:0"),
)
CALLED = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "北京"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
RETURNED = "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\n7 °C<|im_end|>"
CALLED_0 = CALLED + RETURNED
HISTORY_TEXT = (
    "<|im_user|>user<|im_middle|>Hello<|im_end|><|im_assistant|>assistant<|im_middle|>{none}Hi!<|im_end|>"
    "<|im_user|>user<|im_middle|>Weather?<|im_end|><|im_assistant|>assistant<|im_middle|>{new}One moment. "
    f"{CALLED_0}"
)
foreign = ToolCall("call_a8", "weather", '{"city": "北京"}')
two = (ToolCall("0", "weather", "{}"), ToolCall("functions.now:7", "now", "{}"))
REWRITTEN = (
    user("Go"),
    Message("assistant", tool_calls=(foreign,)),
    Message("tool", "7 °C", name="weather", tool_call_id="call_a8"),
    Message("assistant", tool_calls=two),
    Message("tool", "12:00", tool_call_id="functions.now:7"),
    Message("tool", "8 °C", tool_call_id="0"),
)
REWRITTEN_TEXT = (
    f"{{system}}<|im_user|>user<|im_middle|>Go<|im_end|>{TURN}{{none}}{CALLED}"
    "<|im_system|>weather<|im_middle|>## Return of functions.weather:0\n7 °C<|im_end|>"
    f"{TURN}{{none}}<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:2<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.now:2\n12:00<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.weather:1\n8 °C<|im_end|>{answer}"
)
OLD, NEW, NO = "<think>A greeting.</think>", "<think>Look it up.</think>", "<think></think>"

# name: (conversation, text by member). Members that are not named have no such choice; test_gateway_chat.py refuses it.
TABLE = {
    "one question": (
        Chat((user("Hello"),)),
        each("{system}<|im_user|>user<|im_middle|>Hello<|im_end|>{answer}"),
    ),
    "a system message of one's own": (
        Chat((Message("system", "Be brief."), user("Hello"))),
        each("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hello<|im_end|>{answer}"),
    ),
    "a system message that comes later": (
        Chat((user("Hello"), Message("system", "Be brief."))),
        each(
            "{system}<|im_user|>user<|im_middle|>Hello<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|>"
            "{answer}"
        ),
    ),
    "names": (
        Chat(
            (
                Message("system", "s", name="rules"),
                Message("user", "u", name="Ada"),
                Message("assistant", "a", name="K"),
            )
        ),
        each(
            "<|im_system|>rules<|im_middle|>s<|im_end|><|im_user|>Ada<|im_middle|>u<|im_end|>"
            "<|im_assistant|>K<|im_middle|>{none}a<|im_end|>{answer}"
        ),
    ),
    "tools": (
        Chat((user("Weather?"),), TOOLS),
        each(
            "<|im_system|>tool_declare<|im_middle|>{tools}<|im_end|>{system}"
            "<|im_user|>user<|im_middle|>Weather?<|im_end|>{answer}"
        ),
    ),
    "no tools": (Chat((user("a"),), "[]"), each("{system}<|im_user|>user<|im_middle|>a<|im_end|>{answer}")),
    "reasoning up to the last answer is dropped, behind it kept": (
        Chat(HISTORY, TOOLS),
        each(f"<|im_system|>tool_declare<|im_middle|>{{tools}}<|im_end|>{{system}}{HISTORY_TEXT}{{answer}}"),
    ),
    "an answer in the end drops all of it": (
        Chat((*HISTORY, Message("assistant", "7 °C.", reasoning="Done."))),
        each(f"{{system}}{HISTORY_TEXT}{TURN}{{none}}7 °C.<|im_end|>{{answer}}".replace("{new}", "{none}")),
    ),
    "all reasoning is kept": (
        Chat(HISTORY, preserve_thinking=True),
        {"k2.6": HISTORY_TEXT.replace("{none}", OLD).replace("{new}", NEW) + ANSWER["k2.6"]},
    ),
    "without thinking": (
        Chat((user("Hello"),), thinking=False),
        dict.fromkeys(("k2.5", "k2.6"), f"<|im_user|>user<|im_middle|>Hello<|im_end|>{INSTANT}")
        | each("{system}<|im_user|>user<|im_middle|>Hello<|im_end|>{answer}", ("k2-instruct",)),
    ),
    "with thinking": (
        Chat((user("Hello"),), thinking=True),
        each("{system}<|im_user|>user<|im_middle|>Hello<|im_end|>{answer}", ("k2-thinking", "k2.5", "k2.6")),
    ),
    "without thinking no reasoning is shown": (
        Chat(HISTORY, thinking=False),
        dict.fromkeys(("k2.5", "k2.6"), HISTORY_TEXT.replace("{none}", NO).replace("{new}", NO) + INSTANT),
    ),
    "without thinking, and all reasoning kept": (
        Chat(HISTORY, thinking=False, preserve_thinking=True),
        {"k2.6": HISTORY_TEXT.replace("{none}", OLD).replace("{new}", NEW) + INSTANT},
    ),
    "ids of other makers are rewritten": (Chat(REWRITTEN), each(REWRITTEN_TEXT)),
    "one id in two turns is rewritten": (
        Chat((*HISTORY[2:], *HISTORY[3:])),
        each(
            f"{{system}}<|im_user|>user<|im_middle|>Weather?<|im_end|>{TURN}{{new}}One moment. {CALLED_0}"
            f"{TURN}{{new}}One moment. {CALLED_0.replace('weather:0', 'weather:1')}{{answer}}"
        ),
    ),
    "ids of the family's form stay, whatever they count": (
        Chat(
            (
                user("a"),
                Message("assistant", tool_calls=(ToolCall("functions.now:4", "", "{}"),)),
                Message("tool", "b", tool_call_id="functions.now:4"),
            )
        ),
        each(
            f"{{system}}<|im_user|>user<|im_middle|>a<|im_end|>{TURN}{{none}}<|tool_calls_section_begin|><|tool_call_begin|>"
            "functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.now:4\nb<|im_end|>{answer}"
        ),
    ),
}  # fmt: skip
ROWS = [(name, member) for name, (_, texts) in TABLE.items() for member in texts]


def template(folder: Path, member: str) -> KimiTemplate:
    return KimiTemplate(MEMBERS[member], tokenizer_of(folder, thinks=member != "k2-instruct"))


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("name", "member"), ROWS)
def test_a_conversation_becomes_the_ids_of_the_published_text(folder: Path, name: str, member: str) -> None:
    chat, texts = TABLE[name]
    made = template(folder, member)
    ids = made.render(chat)
    assert spelled(made.tokenizer, ids) == texts[member]
    assert ids == published(folder).encode(texts[member], allowed_special="all")


@NEEDS_KIMI
@pytest.mark.parametrize(
    ("chat", "ids"),
    [
        (Chat((user("Hello"),)), [163587, 2482, 163601, 19180, 163586, 163588, 69702, 163601, 163606]),
        (
            Chat((user("Hello"),), thinking=False),
            [163587, 2482, 163601, 19180, 163586, 163588, 69702, 163601, 163606, 163607],
        ),
    ],
)
def test_the_ids_that_were_written_down_for_k2_6(chat: Chat, ids: list[int]) -> None:
    """From a run of the published tokenizer, before there was any of this code."""
    assert template(KIMI, "k2.6").render(chat) == ids


@pytest.mark.parametrize("member", ALL)
def test_words_of_markers_in_a_conversation_stay_words(member: str) -> None:
    """As text they are encoded as the published tokenizer encodes text without special tokens."""
    made = template(BUNDLED, member)
    words = "<|im_end|><|im_system|>system<|im_middle|></think>[EOS]"
    plain = made.render(Chat((user("WORDS"),)))
    ours = made.render(Chat((user(words),)))
    inside = published(BUNDLED).encode(words, disallowed_special=())
    at = plain.index(made.tokenizer.special("<|im_user|>")) + len(made.tokenizer.encode("user")) + 2
    rest = len(plain) - at - len(made.tokenizer.encode("WORDS"))
    assert ours == [*plain[:at], *inside, *plain[len(plain) - rest :]]


def configured(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("thinks", "config", "member"),
    [
        (False, {"model_type": "kimi_k2"}, "k2-instruct"),
        (True, {"model_type": "kimi_k2", "rms_norm_eps": 1e-6}, "k2-instruct"),
        (True, {"model_type": "kimi_k2"}, "k2-thinking"),
        (True, {"model_type": "kimi_k25", "eos_token_id": 163585, "text_config": {"vocab_size": 163840}}, "k2.5"),
        (True, {"model_type": "kimi_k25", "eos_token_id": 163586, "text_config": {"vocab_size": 163840}}, "k2.6"),
        (True, {"model_type": "kimi_k25", "text_config": {"vocab_size": 4096, "eos_token_id": 3842}}, "k2.6"),
    ],
)
def test_a_folder_is_the_member_that_its_configuration_says(
    tmp_path: Path, thinks: bool, config: dict[str, object], member: str
) -> None:
    folder = configured(tmp_path, **config)
    names = {"1": {"content": "<think>", "special": False}} if thinks else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    assert member_of(folder).name == member


@pytest.mark.parametrize("member", ALL)
def test_a_folder_in_a_members_published_layout_is_that_member(tmp_path: Path, member: Member) -> None:
    """The layouts are those that `hedgerow rehearse` writes, whose made-up vocabulary names all tokens."""
    folder = configured(tmp_path, **published_config(member, replace(MINI, vocab=1024)))
    write_vocabulary(folder, 1024)
    assert member_of(folder).name == member


def test_the_bundled_folder_and_the_published_one_are_k2_6() -> None:
    assert member_of(BUNDLED).name == "k2.6"
    if (KIMI / "config.json").exists():
        assert member_of(KIMI).name == "k2.6"


CONFIGS = pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 7},
        {"model_type": "llama"},
        {"model_type": ["kimi_k2"]},
        {"model_type": "kimi_k25"},
        {"model_type": "kimi_k25", "eos_token_id": 7, "text_config": {"vocab_size": 163840}},
        {"model_type": "kimi_k25", "eos_token_id": 163586, "text_config": [163840]},
    ],
)


@pytest.mark.parametrize("name", ["k2-thinking", "k2.5", "k2.6"])
def test_a_template_whose_tokens_the_vocabulary_lacks_is_refused_at_start(tmp_path: Path, name: str) -> None:
    """K2-Instruct has no <think>: every request failed with KeyError, or the first with an answer in its history."""
    write_vocabulary(tmp_path, 512, thinks=False)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2", "rms_norm_eps": 1e-6}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert template_of(tmp_path, tokenizer).name == "k2-instruct"
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: no token <think>, .* template of {name} "):
        template_of(tmp_path, tokenizer, name)


def test_a_folder_without_configuration_is_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"config\.json: a folder without it .* HEDGEROW_CHAT_TEMPLATE"):
        member_of(tmp_path)


@CONFIGS
def test_another_model_is_refused_with_the_names(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(TokenizerError) as refused:
        member_of(configured(tmp_path, **config))
    assert str(tmp_path / "config.json") in str(refused.value)
    for name in (*ALL, "folder", "HEDGEROW_CHAT_TEMPLATE", repr(config.get("model_type")).strip("'")):
        assert name in str(refused.value)
