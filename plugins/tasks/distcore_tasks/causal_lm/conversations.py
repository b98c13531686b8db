"""Conversations as a chat template writes them, and which of their characters the assistant wrote.

Nothing is known of a template but what it renders. Contents are replaced by marks, so that what
stands between them is the template's own text: the header of an answer, and what ends it. This also
holds for templates that change earlier messages when more follows, such as those that remove the
reasoning of all answers but the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from distcore import DataError

Message = dict[str, Any]
"""An object with ``role``, and ``content`` or ``tool_calls``, and what else a template reads."""
Conversation = dict[str, Any]
"""A JSON object with ``messages``, and perhaps ``tools`` and ``chat_template_kwargs``."""
CONTENT, TOOL_CALLS = "content", "tool_calls"
OPTIONAL = ("tools", "chat_template_kwargs")
"""Keys of a conversation besides ``messages``, which are the names of columns, too."""
OTHER_MODEL = "take a model whose template does"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag by which a template itself marks the text of the assistant."""


class Span(NamedTuple):
    """An answer in a text."""

    begin: int
    """Its first character."""
    end: int
    """The character after the last, of what ends it."""
    has_end: bool
    """True if something ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """A conversation as text, with the answers in it."""

    text: str
    """The text, with an end token after the last answer if the template writes none."""
    spans: list[Span]
    """The characters of each answer, with what ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a template writes around an answer, measured on short messages."""

    before: str
    """Text between the content of a user's message and the answer to it."""
    header: str
    """The part of ``before`` that belongs to the answer."""
    after: str
    """Text that the template writes after any answer, without space at the end; maybe empty."""
    at_end: str
    """The same for the last message of a conversation."""
    is_measured: bool = True
    """False if the template refuses such short conversations, so that nothing is known."""


@dataclass
class ChatTemplate:
    """The chat template of a tokenizer."""

    tokenizer: Any
    """A tokenizer of transformers."""
    forms: dict[str, Form] = field(default_factory=dict)
    """Measured forms, by tools and settings as JSON."""
    variables: dict[str, frozenset[str]] = field(default_factory=dict)
    """The names that a template reads, by its text."""

    def render(
        self, conversation: Conversation, messages: Sequence[Message], *, prompt: bool = False
    ) -> str:
        """Return ``messages`` as text, with tools and settings of ``conversation``.

        ``prompt``: with the header of the answer that is to come. Raises DataError if
        the template refuses them.
        """
        from jinja2 import TemplateError

        settings = conversation.get("chat_template_kwargs") or {}
        variables = {"tools": conversation.get("tools") or None, **settings}
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **variables
            )
        # A template's code raises all of these, for a missing key or a value of another type.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        return text

    def prompt(self, conversation: Conversation) -> str:
        """Return the conversation as text up to the answer that is to come. Raises DataError."""
        self._check_is_read(conversation)
        return self.render(conversation, conversation["messages"], prompt=True)

    def answers(self, conversation: Conversation) -> Answers:
        """Return the conversation as text, and its answers.

        Raises DataError for one that cannot be written.
        """
        self._check_is_read(conversation)
        messages = conversation["messages"]
        text = self.render(conversation, messages)
        spans = self._marked_by_template(conversation) or self._measured(conversation, text)
        ends_with_answer = bool(spans) and messages[-1]["role"] == "assistant"
        if ends_with_answer and not spans[-1].has_end and self.end_token:
            begin, end, _ = spans[-1]
            text = text[:end] + self.end_token
            spans[-1] = Span(begin, len(text), True)
        return Answers(text=text, spans=spans)

    # What the template has no place for

    def _check_is_read(self, conversation: Conversation) -> None:
        """Raise DataError for tools and settings that the template does not read."""
        tools, settings = (conversation.get(name) for name in OPTIONAL)
        if not tools and not settings:
            return
        names = self._variables(self._source(conversation))
        if tools and "tools" not in names:
            raise DataError(
                "the chat template has no place for tools: take a model with one, or remove the"
                " column"
            )
        if unread := sorted(set(settings or {}) - names):
            raise DataError(
                f"the chat template reads no setting {unread[0]!r} of chat_template_kwargs:"
                " remove it"
            )

    def _check_calls_are_written(self, conversation: Conversation, number: int, after: str) -> None:
        """Raise DataError if the calls of tools of a message change nothing.

        ``after``: the text that follows its content.
        """
        messages = conversation["messages"]
        name = _function(messages[number][TOOL_CALLS]).get("name")
        if name and str(name) in after:
            return
        without = [{**message} for message in messages]
        del without[number][TOOL_CALLS]
        try:
            is_same = self.render(conversation, without) == self.render(conversation, messages)
        except DataError:  # such as an answer of a tool that nobody called
            return
        if is_same:
            raise DataError(
                f"the chat template does not write the tool_calls of message {number + 1}:"
                f" {OTHER_MODEL}"
            )

    def _source(self, conversation: Conversation) -> str:
        """Return the template's own text; some tokenizers have another one for tools."""
        source: str = self.tokenizer.get_chat_template(tools=conversation.get("tools") or None)
        return source

    def _variables(self, source: str) -> frozenset[str]:
        """Return the names that the template reads."""
        if source not in self.variables:
            from jinja2 import meta
            from transformers.utils.chat_template_utils import _compile_jinja_template

            environment = _compile_jinja_template(source).environment
            self.variables[source] = frozenset(
                meta.find_undeclared_variables(environment.parse(source))
            )
        return self.variables[source]

    # The answers in a text

    def _marked_by_template(self, conversation: Conversation) -> list[Span]:
        """Return the spans that the template marks by ``{% generation %}``; none without marks.

        A span includes what ends its answer.
        """
        source = self._source(conversation)
        if not _GENERATION.search(source):
            return []
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        [text], [marked] = render(
            conversations=[conversation["messages"]],
            tools=conversation.get("tools") or None,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **(conversation.get("chat_template_kwargs") or {}),
        )
        form = self.form(conversation)
        spans: list[Span] = []
        for begin, end in marked:
            if self._has_end(text[begin:end], form):
                spans.append(Span(begin, end, True))
            else:
                until = self._end(text, end, (form.after, form.at_end))
                spans.append(Span(begin, until, until > end))
        return spans

    def _measured(self, conversation: Conversation, text: str) -> list[Span]:
        """Return the span of each answer in ``text``: from where a model goes on to its end."""
        messages, form = conversation["messages"], self.form(conversation)
        marks = _Marks(text, messages)
        parts = self._find_contents(conversation, text, marks)
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            content_end, written = parts[number]
            written_begin = content_end - len(written)
            begin = written_begin + self._begin(conversation, marks, number, written.rstrip())
            is_last = number == len(messages) - 1
            ends = [form.after]
            if is_last:
                ends.append(form.at_end if form.is_measured else text[content_end:].rstrip())
            if message.get(TOOL_CALLS):
                end_of_calls = self._end_of_calls(conversation, marks, number)
                self._check_calls_are_written(conversation, number, end_of_calls)
                ends.insert(0, end_of_calls)
            end = self._end(text, content_end, ends)
            has_end = self._has_end(text[content_end:end], form)
            # Behind a content there is nothing but its end; behind calls, there are the calls.
            if not message.get(TOOL_CALLS):
                has_end = has_end or end > content_end
            spans.append(Span(begin, end, has_end))
        return spans

    def _find_contents(
        self, conversation: Conversation, text: str, marks: _Marks
    ) -> dict[int, tuple[int, str]]:
        """Return where each content ends in ``text``, and the text since the end of the last one.

        Raises DataError if a content is not written, or if the text with marks differs
        in more than these.
        """
        # A template may look into contents: then only the assistant's have a mark, behind
        # what they are.
        for marked in (marks.everywhere(), marks.behind_answers()):
            try:
                written = self.render(conversation, marked)
            except DataError:
                continue
            if parts := marks.find(written, text):
                break
        else:
            raise DataError(
                "the chat template writes a message differently when another one changes"
            )
        if unwritten := [number for number in marks.marked(marked) if number not in parts]:
            message = conversation["messages"][unwritten[0]]
            part = f"the tool_calls of message {unwritten[0] + 1}"
            if message.get(CONTENT):
                part = f"message {unwritten[0] + 1}, of the role {message['role']!r}"
            raise DataError(f"the chat template does not write {part}: {OTHER_MODEL}, or remove it")
        return parts

    def _begin(self, conversation: Conversation, marks: _Marks, number: int, written: str) -> int:
        """Return the place in ``written`` from which a model goes on.

        ``written`` is the text from the end of the message before to the
        end of the answer's content.
        """
        form, messages = self.form(conversation), conversation["messages"]
        after_user = number > 0 and messages[number - 1]["role"] == "user"
        if after_user and form.before and written.startswith(form.before):
            return len(form.before)
        if form.header and form.header in written:
            return written.index(form.header) + len(form.header)
        content = str(messages[number].get(CONTENT) or "").strip()
        if content and written.endswith(content):
            return len(written) - len(content)
        # The template changes the content: where it begins is seen with a mark in its place.
        replaced = marks.everywhere()
        replaced[number] = {**replaced[number], CONTENT: marks.names[number]}
        before = marks.text_before(self.render(conversation, replaced), number)
        return len(_common(before, written))

    def _end_of_calls(self, conversation: Conversation, marks: _Marks, number: int) -> str:
        """Return the text between the content of an answer that calls tools and its end."""
        mark = marks.names[number]
        messages = marks.everywhere()[: number + 1]
        _, _, at_end = self.render(conversation, messages).partition(mark)
        for role in ("tool", "user"):
            following = {"role": role, CONTENT: "x"}
            try:
                text = self.render(conversation, [*messages, following])
            except DataError:
                continue
            _, _, before_another = text.partition(mark)
            if common := self._common_tokens(at_end, before_another).rstrip():
                return common
        return at_end.rstrip()

    def _end(self, text: str, content_end: int, ends: Sequence[str]) -> int:
        """Return the place after the end of an answer whose content ends at ``content_end``.

        It is ``content_end`` if nothing ends the answer. ``ends`` are what the template writes; the
        first that is there counts. Otherwise a special token that follows ends the answer, such as
        the one that begins the next message.
        """
        for end in ends:
            if end and text.startswith(end, content_end):
                return content_end + len(end)
        space = len(text) - content_end - len(text[content_end:].lstrip())
        special_token = self._special.match(text, content_end + space)
        return special_token.end() if special_token else content_end

    def _has_end(self, answer: str, form: Form) -> bool:
        """Return True if ``answer`` ends as the template ends answers, or with a special token."""
        answer = answer.rstrip()
        for end in (form.after, form.at_end):
            if end and answer.endswith(end.strip()):
                return True
        return bool(self._last_special(answer))

    # What a template writes around answers

    def form(self, conversation: Conversation) -> Form:
        """Return what the template writes around answers, with tools and settings as given."""
        has_tools = bool(conversation.get("tools"))
        settings = conversation.get("chat_template_kwargs")
        key = json.dumps([has_tools, settings], sort_keys=True)
        if key not in self.forms:
            self.forms[key] = self._measure_form(conversation)
        return self.forms[key]

    def _measure_form(self, conversation: Conversation) -> Form:
        """Return what the template writes around the answers of short conversations."""
        question = {"role": "user", CONTENT: "xQuserZx"}
        answer = {"role": "assistant", CONTENT: "xQassistantZx"}

        def text_behind(last: Message, messages: list[Message], *, prompt: bool = False) -> str:
            text = self.render(conversation, messages, prompt=prompt)
            return text.rpartition(last[CONTENT])[2]

        try:
            before_answer = text_behind(question, [question], prompt=True)
            end_of_question = text_behind(question, [question])
            at_end = text_behind(answer, [question, answer])
            before_question = text_behind(answer, [question, answer, question])
        except DataError:
            return Form(before="", header="", after="", at_end="", is_measured=False)
        header = before_answer[len(self._common_tokens(end_of_question, before_answer)) :]
        after = self._common_tokens(at_end, before_question).rstrip()
        return Form(before=before_answer, header=header, after=after, at_end=at_end.rstrip())

    def ends(self) -> list[int]:
        """Return the tokens with which an answer ends in training; none if no token of its own
        ends it.

        They are learned from a short conversation. What the template writes after its last answer
        counts. Only where that is nothing, also what begins the next message: otherwise that token
        may stand inside of an answer, as between the reasoning and the answer of gpt-oss.
        """
        question = {"role": "user", CONTENT: "So?"}
        answer = {"role": "assistant", CONTENT: "Yes."}
        conversation = {"messages": [question, answer, question, answer]}
        try:
            answers = self.answers(conversation)
        except DataError:
            return []
        has_own_end = bool(self.form(conversation).at_end)
        spans = answers.spans[-1:] if has_own_end else answers.spans
        tokens = [self._last_special(answers.text[span.begin : span.end]) for span in spans]
        return [
            int(self.tokenizer.convert_tokens_to_ids(token))
            for token in dict.fromkeys(tokens)
            if token
        ]

    def _last_special(self, answer: str) -> str:
        """Return the special token with which ``answer`` ends; empty if it ends with none."""
        answer = answer.rstrip()
        for match in self._special.finditer(answer):
            if match.end() == len(answer):
                return match.group()
        return ""

    @property
    def end_token(self) -> str:
        """The tokenizer's end token; empty if it has none."""
        return self.tokenizer.eos_token or ""

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches one of the tokens that the tokenizer keeps whole."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        tokens = sorted(filter(None, added), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def _common_tokens(self, first: str, second: str) -> str:
        """Return the common begin of both texts, without a part of a special token."""
        size = len(_common(first, second))
        for text in (first, second):
            for match in self._special.finditer(text):
                if match.start() < size < match.end():
                    size = match.start()
        return first[:size]

    # Lines for the user

    def warnings(self, conversation: Conversation) -> Iterator[str]:
        """Yield a line if the template writes nothing, or no token, that ends an answer."""
        form = self.form(conversation)
        if not form.is_measured:
            return
        if end := form.after or form.at_end:
            if not self.ends():
                yield (
                    f"the chat template ends an answer with {end.strip()!r}, which is no token of"
                    " its own: generated texts go on after it; write an end token into"
                    " chat_template.jinja, or add this one to the tokenizer"
                )
            return
        nothing = "the chat template writes nothing that ends an answer"
        if not self.end_token:
            remedy = (
                "set eos_token in tokenizer_config.json, or write an end into chat_template.jinja"
            )
            yield (
                f"{nothing}, and the tokenizer has no end token, so the model does not learn to"
                f" stop; {remedy}"
            )
            return
        last = f"{self.end_token} follows the last one of a conversation, and is learned"
        yield f"{nothing}: {last}; to end each answer, write an end token into chat_template.jinja"


class _Marks:
    """Messages with marks in the place of their contents, or behind them."""

    def __init__(self, text: str, messages: Sequence[Message]) -> None:
        """``text`` has the contents: no mark may be part of it."""
        self.messages = messages
        begin = "xQ"
        while begin in text:
            begin += "Q"
        self.names = [f"{begin}{number}Zx" for number in range(len(messages))]
        """The mark of each message."""
        any_mark = "|".join(map(re.escape, self.names))
        # In parentheses, so that a split keeps the marks.
        self._mark = re.compile(f"({any_mark})")

    def everywhere(self) -> list[Message]:
        """Return all messages with marks: behind an answer's content, else in its place."""
        marked = []
        for number, message in enumerate(self.messages):
            is_answer = message["role"] == "assistant"
            marked.append(self._behind(number) if is_answer else self._in_place(number))
        return marked

    def behind_answers(self) -> list[Message]:
        """Return all messages, with marks behind the contents of the assistant's."""
        marked = []
        for number, message in enumerate(self.messages):
            is_answer = message["role"] == "assistant"
            marked.append(self._behind(number) if is_answer else message)
        return marked

    def _in_place(self, number: int) -> Message:
        """Return a message with a mark in the place of its content, if it has any."""
        message = self.messages[number]
        return {**message, CONTENT: self.names[number]} if message.get(CONTENT) else message

    def _behind(self, number: int) -> Message:
        """Return an answer with a mark behind its content, or behind the name of its tool."""
        message, mark = self.messages[number], self.names[number]
        if content := message.get(CONTENT):
            return {**message, CONTENT: content.rstrip() + mark}
        return {**message, TOOL_CALLS: _with_marked_name(message.get(TOOL_CALLS) or [], mark)}

    def marked(self, messages: Sequence[Message]) -> list[int]:
        """Return the numbers of the ``messages`` that have a mark."""
        numbers = []
        for number, message in enumerate(messages):
            # In content, or in the name of a tool.
            if self.names[number] in json.dumps(message):
                numbers.append(number)
        return numbers

    def text_before(self, written: str, number: int) -> str:
        """Return the text between the mark of a message and the mark before it."""
        text, _, _ = written.partition(self.names[number])
        return self._mark.split(text)[-1]

    def find(self, written: str, text: str) -> dict[int, tuple[int, str]] | None:
        """Return where each marked content ends in ``text``, and the text since the last one.

        ``written``: the same conversation with marks. Returns ``None`` if both differ in more than
        the contents.
        """
        # The text before each mark, that mark, and so on; then the text after the last one.
        pieces = self._mark.split(written)
        texts, names = pieces[::2], pieces[1::2]
        parts = dict[int, tuple[int, str]]()
        position = 0
        for before, name, after in zip(texts[:-1], names, texts[1:], strict=True):
            if not text.startswith(before, position):
                return None
            begin, number = position, self.names.index(name)
            position = self._content_end(number, text, begin + len(before), after)
            if position < 0:
                return None
            if self.messages[number]["role"] == "assistant":
                parts[number] = position, text[begin:position]
            else:
                parts[number] = position, before
        return parts if text[position:] == pieces[-1] else None

    def _content_end(self, number: int, text: str, begin: int, after: str) -> int:
        """Return where the content at ``begin`` ends, before the text ``after``; -1 if nowhere."""
        content = str(self.messages[number].get(CONTENT) or "")
        if self.messages[number]["role"] == "assistant":  # the content stands before its mark
            contents = ["", content[len(content.rstrip()) :]]
        else:
            contents = [content, content.strip(), content.rstrip(), content.lstrip()]
        for written in contents:
            if text.startswith(written + after, begin):
                return begin + len(written)
        # The template changes the content, such as one that escapes it.
        return text.find(after, begin) if after else len(text)


def _with_marked_name(calls: Sequence[Any], mark: str) -> list[Any]:
    """Return calls of tools, the name of the first with a mark behind it."""
    copied: list[Any] = json.loads(json.dumps(calls))
    if copied:
        function = _function(copied)
        function["name"] = f"{function.get('name', '')}{mark}"
    return copied


def _function(calls: Sequence[Any]) -> dict[str, Any]:
    """Return name and arguments of the first call of a tool."""
    function: dict[str, Any] = calls[0].get("function", calls[0])
    return function


def _common(first: str, second: str) -> str:
    """Return the common begin of both texts."""
    size = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        size += 1
    return first[:size]
