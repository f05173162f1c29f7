"""Messages to one text by a model's chat template, which is a program of the model's author.

It runs in jinja2's immutable sandbox and ends at a deadline. What messages say stays text: see
:meth:`ChatTemplate.render`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

DEADLINE = 2.0
_MAX_LENGTH = 1_000_000  # of what a template may make of a short string at once
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: no text has them all
_GROWING = {"center", "encode", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}
_MOST_INDENT = 64
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")

_FAILURES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The templates of a model folder: ``chat_template.jinja``, or those of
    ``tokenizer_config.json``, which may have one of its own for tools.

    Args:
        special: the special tokens of the tokenizer.
        tokens: ``bos_token`` and the like, which templates write.
    """

    def __init__(
        self, templates: Mapping[str, str], special: Sequence[str], tokens: Mapping[str, str]
    ) -> None:
        self._templates = dict(templates)
        self._tokens = dict(tokens)
        self._special = None
        if special:
            longest_first = sorted(special, key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, longest_first)))

    @classmethod
    def of_folder(cls, folder: Path, special: Sequence[str]) -> ChatTemplate:
        """Raises ValueError if a file is broken; a folder without a template gives an empty one."""
        config = _object(folder / "tokenizer_config.json")
        given = config.get("chat_template") or {}
        try:
            templates = (
                {entry["name"]: entry["template"] for entry in given}
                if isinstance(given, list)
                else {"default": given}
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{folder}: chat_template must be text or named texts") from error
        path = folder / "chat_template.jinja"
        if path.is_file():
            templates["default"] = path.read_text(encoding="utf-8")
        texts = {key: value for key, value in templates.items() if isinstance(value, str) and value}
        tokens = {}
        for key in _TOKENS:
            value = config.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[key] = value
        return cls(texts, special, tokens)

    def render(
        self,
        messages: Messages,
        *,
        template: str | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        deadline: float = DEADLINE,
    ) -> tuple[str, str]:
        """The text of a conversation, and a mark that stands within every special token that a
        message spells: between its first character and the rest, for the tokenizer to drop.

        Raises:
            TypeError: messages are not mappings with a role.
            ValueError: there is no template, or it fails, asks for what the sandbox forbids, or
                does not end in time.
        """
        source = template
        if source is None:
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
            source = self._templates.get(name)
        if source is None:
            raise ValueError(
                "the model has no chat template: give chat_template, or a prompt to generate()"
            )
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"a conversation must be a list of messages, got {messages!r}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TypeError(f"a message must be a mapping with a role, got {message!r}")
        taken = {"messages", "tools"} & set(variables or ())
        if taken:
            raise ValueError(f"template_variables must not have {taken.pop()!r}: it is an argument")
        mark = _unused_mark([*messages, tools])

        def guard(value: Any) -> Any:
            return _map_texts(value, lambda text: self._split(text, mark))

        given = {
            **self._tokens,
            "messages": [self._guarded(message, guard) for message in messages],
            "tools": guard(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        return _run(source, given, deadline), mark

    def _guarded(self, message: Mapping[str, Any], guard: Callable[[Any], Any]) -> dict[str, Any]:
        """The role stays as it is: templates compare it, and some have tokens of that name."""
        role = message["role"]
        if self._special is not None and self._special.search(role) and not role.isidentifier():
            raise ValueError(f"a role spells a special token: {role!r}")
        return {key: value if key == "role" else guard(value) for key, value in message.items()}

    def _split(self, text: str, mark: str) -> str:
        """Breaks special tokens, those that overlap one already broken too."""
        while self._special is not None:
            broken = self._special.sub(lambda found: _broken(found[0], mark), text)
            if broken == text:
                break
            text = broken
        return text


def _broken(token: str, mark: str) -> str:
    if len(token) < 2:
        raise ValueError(f"a message contains {token!r}, which is a special token of the model")
    return token[0] + mark + token[1:]


def _unused_mark(values: list[Any]) -> str:
    text = "".join(_texts(values))
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise ValueError("messages contain every noncharacter from U+FDD0 to U+FDEF")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value


def _run(source: str, variables: Mapping[str, Any], deadline: float) -> str:
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install jinja2") from error
    environment = _environment()
    try:
        with _ends_within(deadline):
            return str(environment.from_string(source).render(**variables))
    except _TooLate:
        raise ValueError(f"the chat template did not end within {deadline} s") from None
    except _FAILURES + (TemplateError,) as error:
        raise ValueError(f"the chat template failed: {error}") from error


class _TooLate(BaseException):
    """Not an Exception: jinja2 swallows some of these."""


@contextmanager
def _ends_within(seconds: float) -> Iterator[None]:
    """Raises _TooLate at the first line of Python that runs too late: a thread cannot be ended
    from outside, and a loop of a template may neither call nor write anything. A single long call
    into C ends first."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def trace(*_: Any) -> Any:
        if time.monotonic() > end:
            raise _TooLate
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.filters import do_indent
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def bounded(text: str, given: Any) -> None:
        grows = len(given) if isinstance(given, (str, list, tuple)) else 1
        if grows > 1 and len(text) * grows > max(_MAX_LENGTH, 4 * len(text)):
            raise SecurityError("replace or join of these texts is not allowed")

    def replace(text: str, old: str, new: str, count: int = -1) -> str:
        bounded(str(text), new)
        return str(text).replace(old, new, count)

    class Generation(Extension):
        """``{% generation %}`` marks for training what the assistant says: its body counts."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """No short expression makes a long string."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
            counts = [v for v in (left, right) if isinstance(v, int)]
            long = sizes and counts and max(sizes) * max(counts) > _MAX_LENGTH
            if operator == "**" or long or (operator == "%" and isinstance(left, str)):
                raise SecurityError(f"{operator} of these operands is not allowed")
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            growing = isinstance(obj, str) and attr in _GROWING
            return not growing and super().is_safe_attribute(obj, attr, value)

        def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
            """``replace`` and ``join`` make no long text of a short one."""
            text, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if isinstance(text, str) and name in ("replace", "join"):
                bounded(text, [*args, "", ""][name == "replace"])
            return super().call(context, called, *args, **named)

        def wrap_str_format(self, value: Any) -> None:
            """jinja2 would wrap ``str.format``, which pads to any width: it is refused instead."""

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        within(options.get("indent"))
        return json.dumps(value, **({"ensure_ascii": False} | options))

    def within(width: Any) -> None:
        if (len(width) if isinstance(width, str) else width or 0) > _MOST_INDENT:
            raise SecurityError(f"a width of more than {_MOST_INDENT} is not allowed")

    def indent(text: str, width: Any = 4, *options: Any, **named: Any) -> str:
        within(width)
        return str(do_indent(text, width, *options, **named))

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
    for name in ("batch", "center", "format", "round", "slice"):
        del env.filters[name]
    env.filters |= {"indent": indent, "replace": replace}
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = fail
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
