"""Chat templates of the forms of public models: what is learned of a conversation,
with targets by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from distcore.errors import DataError
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.encode import encode
from distcore_tasks.causal_lm.forms import messages_problem
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.shared.vocabulary import train_byte_level


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    message("user", "Hi."),
    message("assistant", "Yes."),
    message("user", "So?"),
    message("assistant", "No."),
]
SYSTEM = [message("system", "Be brief."), *TALK]
THOUGHT = [
    message("user", "Hi."),
    message("assistant", "<think>\na\n</think>\n\nYes."),
    message("user", "So?"),
    message("assistant", "<think>\nb\n</think>\n\nNo."),
]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
CALLS = [
    message("user", "Hi."),
    {"role": "assistant", "tool_calls": [CALL]},
    message("tool", "noon"),
    message("assistant", "It is noon."),
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
    }
]


class Case(NamedTuple):
    """A template, a conversation, and what is learned of it."""

    name: str
    special: str
    """The special tokens, the end token first."""
    template: str
    messages: list[dict[str, Any]]
    targets: list[str]
    """The texts that are learned, one for each run of tokens."""
    more: dict[str, Any] = {}


def each(body: str, prompt: str = "", before: str = "", after: str = "") -> str:
    """A template with ``body`` for each message ``m``, and the header of an answer."""
    start = "{% for m in messages %}" + body + "{% endfor %}"
    asks = "{% if add_generation_prompt %}" + prompt + "{% endif %}" if prompt else ""
    return before + start + asks + after


CHATML = each("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n")
CHATML_TOKENS = "<|im_end|> <|im_start|> <|endoftext|>"
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
)
HERMES = each(
    "<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls"
    ' %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments |'
    " tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n",
    "<|im_start|>assistant\n",
    before="{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
)
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
QWEN3 = each(
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set t = m.content.split('</think>')"
    " %}{% if loop.index0 > ns.last %}<think>\n{{ t[0].split('<think>')[-1].strip('\\n') if"
    " t|length > 1 }}\n</think>\n\n{% endif %}{{ t[-1].lstrip('\\n') }}{% else %}{{ m.content }}{%"
    " endif %}<|im_end|>\n",
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    before=LAST_QUESTION,
)
R1 = each(
    "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1].strip() }}<|end|>{% endif %}",
    "<|Assistant|><think>\n",
    before="<|begin|>",
)
LLAMA3 = each(
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    before="<|begin_of_text|>",
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set s ="
    " messages[0].content %}{% else %}{% set rest = messages %}{% set s = '' %}{% endif %}{% for m"
    " in rest %}{% if m.role == 'user' %}<s>[INST] {% if loop.first and s %}<<SYS>>\n{{ s"
    " }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }}"
    " </s>{% endif %}{% endfor %}"
)
MISTRAL = each(
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{%"
    " endif %}",
    before="<s>",
)
TEKKEN = (  # the system prompt stands in the last question
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set s ="
    " messages[0].content %}{% else %}{% set rest = messages %}{% set s = '' %}{% endif %}<s>{% for"
    " m in rest %}{% if m.role == 'user' %}[INST]{% if s and m == (rest | selectattr('role',"
    " 'equalto', 'user') | list | last) %}{{ s }}\n\n{% endif %}{{ m.content }}[/INST]{% else %}{{"
    " m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = each(
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim"
    " }}<end_of_turn>\n",
    "<start_of_turn>model\n",
    before=(
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported')"
        " }}{% endif %}"
    ),
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
GLM = each("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>", before="[gMASK]<sop>")
FALCON = (
    "{% for m in messages %}{% if not loop.first %}\n\n{% endif %}{{ m.role | title }}: {{"
    " m.content }}{% endfor %}{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)
ZEPHYR = each("<|{{ m.role }}|>\n{{ m.content }}</s>\n", "<|assistant|>\n")
VICUNA = each(
    "{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{%"
    " endif %}",
    "ASSISTANT:",
    before="A chat. ",
)
COMMAND = each(
    "<|START|><|{{ 'CHATBOT' if m.role == 'assistant' else m.role | upper }}|>{{ m.content"
    " }}<|END_OF_TURN|>",
    "<|START|><|CHATBOT|>",
)
COMMAND_A = each(
    "<|START|><|{{ m.role | upper }}|>{% if m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content"
    " }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<|END_OF_TURN|>",
    "<|START|><|ASSISTANT|>",
)
TULU = each(
    "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    "{% if not loop.last %}\n{% endif %}",
    "\n<|assistant|>\n",
)
GPT_OSS = each(
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{"
    " m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{%"
    " endif %}",
    "<|start|>assistant",
)
GRANITE = each(
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
    "<|start_of_role|>assistant<|end_of_role|>",
)
EXAONE = each(
    "[|{{ m.role }}|]{{ m.content }}{% if m.role == 'assistant' %}[|endofturn|]{% endif %}\n",
    "[|assistant|]",
)
BAICHUAN = each("{{ '<A>' if m.role == 'assistant' else '<U>' }}{{ m.content }}", "<A>")
OPENCHAT = each(
    "GPT4 Correct {{ m.role | title }}: {{ m.content }}<|end_of_turn|>",
    "GPT4 Correct Assistant:",
    before="<s>",
)
ALPACA = each(
    "{{ '### Response' if m.role == 'assistant' else '### Instruction' }}:\n{{ m.content }}\n\n",
    "### Response:\n",
)
NEMOTRON = each("<extra_id_1>{{ m.role | title }}\n{{ m.content }}\n", "<extra_id_1>Assistant\n")
SOLAR = each(
    "### {{ m.role | title }}:\n{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n\n",
    "### Assistant:\n",
)
HUNYUAN = each(
    "{% if m.role == 'user' %}<|bos|>{{ m.content }}<|sep|>{% else %}{{ m.content }}<|eos|>{%"
    " endif %}"
)
LLAMA4 = each(
    "<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>",
    "<|header_start|>assistant<|header_end|>\n\n",
)
KIMI = each(
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
)
PHI4 = each(
    "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"
)
MARKED = each(
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{%"
    " endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
    "<|im_start|>assistant\n",
)
NO_TOKENS = each("[{{ m.role }}] {{ m.content }} [/{{ m.role }}]\n", "[assistant] ")
CASES = [
    Case("ChatML", CHATML_TOKENS, CHATML, SYSTEM, ["Yes.<|im_end|>", "No.<|im_end|>"]),
    Case(
        "Qwen2", CHATML_TOKENS, DEFAULT_SYSTEM + CHATML, TALK, ["Yes.<|im_end|>", "No.<|im_end|>"]
    ),
    Case(
        "assistant first",
        CHATML_TOKENS,
        DEFAULT_SYSTEM + CHATML,
        TALK[1:],
        ["Yes.<|im_end|>", "No.<|im_end|>"],
    ),
    Case("ends with the user", CHATML_TOKENS, CHATML, TALK[:3], ["Yes.<|im_end|>"]),
    Case(
        "Qwen3, reasoning",
        CHATML_TOKENS,
        QWEN3,
        THOUGHT,
        ["Yes.<|im_end|>", "<think>\nb\n</think>\n\nNo.<|im_end|>"],
    ),
    Case(
        "Qwen3, no reasoning",
        CHATML_TOKENS,
        QWEN3,
        TALK,
        ["Yes.<|im_end|>", "<think>\n\n</think>\n\nNo.<|im_end|>"],
    ),
    Case(
        "Qwen3, thinking off",
        CHATML_TOKENS,
        QWEN3,
        TALK[:2],
        ["Yes.<|im_end|>"],
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    Case(
        "DeepSeek-R1",
        "<|end|> <|begin|> <|User|> <|Assistant|>",
        R1,
        THOUGHT,
        ["Yes.<|end|>", "No.<|end|>"],
    ),
    Case(
        "Llama 3",
        "<|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>",
        LLAMA3,
        SYSTEM,
        ["Yes.<|eot_id|>", "No.<|eot_id|>"],
    ),
    Case("Llama 2", "</s> <s>", LLAMA2, SYSTEM, [" Yes. </s>", " No. </s>"]),
    Case("Mistral", "</s> <s>", MISTRAL, TALK, [" Yes.</s>", " No.</s>"]),
    Case(
        "Mistral, system prompt in the last question",
        "</s> <s> [INST] [/INST]",
        TEKKEN,
        SYSTEM,
        ["Yes.</s>", "No.</s>"],
    ),
    Case(
        "Gemma",
        "<eos> <bos> <start_of_turn> <end_of_turn>",
        GEMMA,
        TALK,
        ["Yes.<end_of_turn>", "No.<end_of_turn>"],
    ),
    Case(
        "Phi-3",
        "<|endoftext|> <|end|> <|user|> <|assistant|>",
        PHI3,
        TALK,
        ["Yes.<|end|>", "No.<|end|>"],
    ),
    Case(
        "Phi-4",
        "<|im_end|> <|im_start|> <|im_sep|>",
        PHI4,
        SYSTEM,
        ["Yes.<|im_end|>", "No.<|im_end|>"],
    ),
    Case(
        "GLM",
        "<|endoftext|> [gMASK] <sop> <|user|> <|assistant|>",
        GLM,
        TALK,
        ["\nYes.<|user|>", "\nNo.<|endoftext|>"],
    ),
    Case("Falcon", "<|endoftext|>", FALCON, TALK, [" Yes.", " No.<|endoftext|>"]),
    Case("Zephyr", "</s>", ZEPHYR, SYSTEM, ["Yes.</s>", "No.</s>"]),
    Case("Vicuna", "</s>", VICUNA, TALK, [" Yes.</s>", " No.</s>"]),
    Case(
        "Command R",
        "<|END_OF_TURN|> <|START|> <|USER|> <|CHATBOT|>",
        COMMAND,
        TALK,
        ["Yes.<|END_OF_TURN|>", "No.<|END_OF_TURN|>"],
    ),
    Case(
        "Command A",
        "<|END_OF_TURN|> <|START|> <|START_RESPONSE|> <|END_RESPONSE|>",
        COMMAND_A,
        TALK,
        [
            f"<|START_RESPONSE|>{answer}<|END_RESPONSE|><|END_OF_TURN|>"
            for answer in ("Yes.", "No.")
        ],
    ),
    Case(
        "Tulu",
        "<|endoftext|> <|user|> <|assistant|>",
        TULU,
        TALK,
        ["Yes.<|endoftext|>", "No.<|endoftext|>"],
    ),
    Case(
        "gpt-oss",
        "<|return|> <|start|> <|channel|> <|message|> <|end|>",
        GPT_OSS,
        TALK,
        ["<|channel|>final<|message|>Yes.<|end|>", "<|channel|>final<|message|>No.<|return|>"],
    ),
    Case(
        "Granite",
        "<|end_of_text|> <|start_of_role|> <|end_of_role|>",
        GRANITE,
        SYSTEM,
        ["Yes.<|end_of_text|>", "No.<|end_of_text|>"],
    ),
    Case(
        "EXAONE",
        "[|endofturn|] [|user|] [|assistant|]",
        EXAONE,
        TALK,
        ["Yes.[|endofturn|]", "No.[|endofturn|]"],
    ),
    Case("Baichuan", "</s> <U> <A>", BAICHUAN, TALK, ["Yes.<U>", "No.</s>"]),
    Case(
        "OpenChat",
        "<|end_of_turn|> <s>",
        OPENCHAT,
        TALK,
        [" Yes.<|end_of_turn|>", " No.<|end_of_turn|>"],
    ),
    Case("Alpaca", "</s>", ALPACA, TALK, ["Yes.", "No.</s>"]),
    Case("Nemotron", "</s> <extra_id_1>", NEMOTRON, TALK, ["Yes.\n<extra_id_1>", "No.</s>"]),
    Case("Solar", "</s>", SOLAR, SYSTEM, ["Yes.</s>", "No.</s>"]),
    Case("Hunyuan", "<|eos|> <|bos|> <|sep|>", HUNYUAN, TALK, ["Yes.<|eos|>", "No.<|eos|>"]),
    Case(
        "Llama 4",
        "<|eot|> <|header_start|> <|header_end|>",
        LLAMA4,
        SYSTEM,
        ["Yes.<|eot|>", "No.<|eot|>"],
    ),
    Case(
        "Kimi",
        "<|im_end|> <|im_user|> <|im_assistant|> <|im_middle|>",
        KIMI,
        TALK,
        ["Yes.<|im_end|>", "No.<|im_end|>"],
    ),
    Case(
        "marked by the template", CHATML_TOKENS, MARKED, TALK, ["Yes.<|im_end|>", "No.<|im_end|>"]
    ),
    Case(
        "an end that is no token",
        "</s>",
        NO_TOKENS,
        TALK,
        [" Yes. [/assistant]", " No. [/assistant]"],
    ),
    Case(
        "Hermes, with tools",
        f"{CHATML_TOKENS} <tool_call> </tool_call>",
        HERMES,
        CALLS,
        [
            '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>',
            "It is noon.<|im_end|>",
        ],
        {"tools": TOOLS},
    ),
]


def tokenizer_of(special: str, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokens = special.split()
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level(["Hi. Yes. So? No."], 300 + len(tokens), tokens),
        eos_token=tokens[0],
        additional_special_tokens=tokens[1:],
    )
    made.chat_template = template
    return made


def refuse(place: int, what: str) -> None:
    raise DataError(f"row {place + 1}: {what}")


def targets(tokenizer: Any, conversation: dict[str, Any]) -> list[str]:
    """The text of each run of tokens that are learned."""
    [(tokens, flags, _)] = encode(
        "messages", CausalOptions(max_seq_len=500), tokenizer, [conversation], refuse
    )
    runs: list[list[int]] = [[]]
    for token, flag in zip(tokens.tolist(), flags.tolist(), strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_answers_and_what_ends_them_are_learned(case: Case) -> None:
    tokenizer = tokenizer_of(case.special, case.template)
    assert targets(tokenizer, {"messages": case.messages, **case.more}) == case.targets


ENDS = {
    "Gemma": ["<end_of_turn>"],
    "Phi-3": ["<|end|>"],
    # What begins the next message is all that ends an answer before the last.
    "GLM": ["<|user|>", "<|endoftext|>"],
    "Baichuan": ["<U>", "</s>"],
    "Nemotron": ["<extra_id_1>", "</s>"],
    "an end that is no token": [],
}
"""Where it is not the tokenizer's end token, the first special token of a case."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_text_ends_with_the_tokens_that_end_an_answer(case: Case) -> None:
    tokenizer = tokenizer_of(case.special, case.template)
    ends = ChatTemplate(tokenizer).ends()
    expected = ENDS.get(case.name, case.special.split()[:1])
    assert tokenizer.convert_ids_to_tokens(ends) == expected


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"]
)
def test_a_call_of_a_tool_needs_no_content(content: dict[str, Any]) -> None:
    messages = [CALLS[0], {"role": "assistant", **content, "tool_calls": [CALL]}, *CALLS[2:]]
    assert messages_problem(messages) is None
    case = CASES[-1]
    assert (
        targets(tokenizer_of(case.special, case.template), {"messages": messages, **case.more})
        == case.targets
    )


def warnings_of(special: str, template: str) -> list[str]:
    return list(ChatTemplate(tokenizer_of(special, template)).warnings({"messages": TALK}))


def test_a_template_without_an_end_of_answers_is_said_with_the_remedy() -> None:
    [line] = warnings_of("<|endoftext|>", FALCON)
    assert (
        line
        == "the chat template writes nothing that ends an answer: <|endoftext|> follows the last"
        " one of a conversation, and is learned; to end each answer, write an end token into"
        " chat_template.jinja"
    )
    tokenizer = tokenizer_of("<|endoftext|>", FALCON)
    tokenizer.eos_token = None
    [line] = ChatTemplate(tokenizer).warnings({"messages": TALK})
    assert "the model does not learn to stop; set eos_token in tokenizer_config.json" in line
    assert warnings_of(CHATML_TOKENS, CHATML) == warnings_of("</s>", ZEPHYR) == []


def test_an_end_that_no_text_can_stop_at_is_said_with_the_remedy() -> None:
    assert warnings_of("</s>", NO_TOKENS) == [
        "the chat template ends an answer with '[/assistant]', which is no token of its own:"
        " generated texts go on after it; write an end token into chat_template.jinja, or add this"
        " one to the tokenizer"
    ]


IGNORES_TOOLS: Sequence[tuple[str, dict[str, Any], str]] = [
    (
        CHATML,
        {"messages": TALK, "tools": TOOLS},
        "the chat template has no place for tools: take a model with one",
    ),
    (
        CHATML,
        {"messages": TALK, "chat_template_kwargs": {"enable_thinking": True}},
        "the chat template reads no setting 'enable_thinking' of chat_template_kwargs: remove it",
    ),
    (
        CHATML.replace("{{ m.content }}", "{{ m.content or '' }}"),
        {"messages": CALLS},
        (
            "the chat template does not write the tool_calls of message 2: take a model whose"
            " template does"
        ),
    ),
    (
        CHATML,
        {"messages": [CALLS[0], CALLS[1] | {"content": "I look."}, *CALLS[2:]]},
        (
            "the chat template does not write the tool_calls of message 2: take a model whose"
            " template does"
        ),
    ),
    (
        MISTRAL.replace("{% else %}", "{% elif m.role == 'assistant' %}"),
        {"messages": SYSTEM},
        (
            "the chat template does not write message 1, of the role 'system': take a model whose"
            " template does"
        ),
    ),
    (GEMMA, {"messages": SYSTEM}, "the chat template refuses it: System role not supported"),
    (
        CHATML.replace("m.content }}", "m['content'] + 1 }}"),
        {"messages": TALK},
        "the chat template refuses it: can only concatenate str",
    ),
]


@pytest.mark.parametrize(("template", "conversation", "problem"), IGNORES_TOOLS)
def test_a_message_that_a_template_does_not_write_is_refused_by_name(
    template: str, conversation: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as raised:
        targets(tokenizer_of(CHATML_TOKENS, template), conversation)
    assert f"row 1: {problem}" in str(raised.value)


def test_a_template_that_reads_tools_only_if_they_are_there_has_a_place_for_them() -> None:
    sets = "{% if not tools is defined %}{% set tools = none %}{% endif %}" + HERMES
    conversation = {"messages": CALLS, "tools": TOOLS}
    assert targets(tokenizer_of(CHATML_TOKENS, sets), conversation)[-1] == "It is noon.<|im_end|>"
