"""Text to tokens and back: whole prompts at once, outputs token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.chat import ChatTemplate, Messages

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
"""The most bytes of a UTF-8 character, so the most tokens one is spread over."""
_ENCODE_CHUNK = 1024


class Tokenizer:
    """The ``tokenizer.json`` of a model folder (the ``tokenizers`` library, imported here)."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ImportError(
                "text prompts need the tokenizers package: pip install tokenizers"
            ) from error
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer: {path} does not exist")
        try:
            self._backend: Any = Backend.from_file(str(path))
        except Exception as error:  # The library raises plain Exception for a malformed file.
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        # A truncation or padding saved in training would silently change prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._folder = path.parent

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Token ids of each text in order, special tokens as the tokenizer adds them."""
        for start in range(0, len(texts), _ENCODE_CHUNK):
            chunk = [_unicode(text) for text in texts[start : start + _ENCODE_CHUNK]]
            for encoding in self._backend.encode_batch(chunk):
                yield encoding.ids

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word at the start of a text, after a space, and after a full stop."""
        found: list[list[int]] = []
        for word in words:
            forms = [_unicode(word), " " + word, "." + word, "."]
            encodings = self._backend.encode_batch(forms, add_special_tokens=False)
            *spelled, behind, stop = [encoding.ids for encoding in encodings]
            if behind[: len(stop)] == stop:
                spelled.append(behind[len(stop) :])
            if not any(spelled):
                raise ValueError(f"the tokenizer has no tokens for {word!r}")
            found += [ids for i, ids in enumerate(spelled) if ids and ids not in spelled[:i]]
        return found

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template beside the ``tokenizer.json``."""
        added = self._backend.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        return ChatTemplate.of_folder(self._folder, special)

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        """Token ids of a conversation; ``options`` of :meth:`ChatTemplate.render`.

        Special tokens are those that the template writes: one that a message spells stays text.
        """
        text, mark = self.chat_template.render(messages, **options)
        encoding = self._backend.encode(_unicode(text), add_special_tokens=False)
        if mark not in text:
            return list(encoding.ids)
        kept = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            covered = text[start:end]
            if mark not in covered:
                kept.append(token)
            elif covered != mark:
                raise ValueError(
                    f"a message spells a special token, in {covered.replace(mark, '')!r}"
                )
        return kept

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """A token alone, special or not, as log-probabilities show it."""
        return self.decode([token], skip_special_tokens=False)


class Detokenizer:
    """Text of one output as its tokens come; each token costs a decode of a few tokens.

    A token's text depends on the tokens just before it (leading spaces, bytes of one character),
    so a short window is decoded anew. The window ends at the newest token and starts at the last
    place but one where the text ended with a whole character. What is given out is final: a
    trailing replacement character may be the start of a character and is kept back, but not
    longer than a character can take.

    The first window starts at the end of the prompt, so that the output goes on from there:
    decoders of SentencePiece drop the space that a text begins with.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._prompt = prompt
        self._window: list[int] = []
        self._clean = 0  # the window's tokens before it ended with a whole character
        self._given = 0  # characters of the window's text given out so far

    def push(self, token: int) -> str:
        """The text that is final now and was not before; often of one token, sometimes empty."""
        if self._prompt:
            self._follow(self._prompt)
            self._prompt = ()
        self._window.append(token)
        text = self._decode()
        if not text.endswith(_REPLACEMENT):
            new = text[self._given :]
            self._restart(self._clean, held=0)
            self._clean = len(self._window)
            return new
        final = len(text.rstrip(_REPLACEMENT))
        pending = len(self._window) - self._clean
        if pending > _CHARACTER_BYTES:
            final = len(text) - 1  # All but the last are bytes that are no character.
        new = text[self._given : final]
        self._given = max(self._given, final)
        if pending > 4 * _CHARACTER_BYTES:
            self._restart(len(self._window) - _CHARACTER_BYTES, held=1)
            self._clean = 0
        return new

    def finish(self) -> str:
        """The rest: a character that never became whole comes as a replacement character."""
        new = self._decode()[self._given :]
        self._given += len(new)
        return new

    def _follow(self, prompt: Sequence[int]) -> None:
        """Begins with the prompt's last tokens, as few as are whole characters; if it ends inside
        a character, the output begins anew."""
        for count in range(1, 1 + min(len(prompt), _CHARACTER_BYTES)):
            self._window = list(prompt[-count:])
            text = self._decode()
            if _REPLACEMENT not in text:
                self._clean, self._given = count, len(text)
                return
        self._window = []

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _restart(self, start: int, *, held: int) -> None:
        """Moves the window's start; its text is given out but for ``held`` characters."""
        del self._window[:start]
        self._given = len(self._decode()) - held


class StopStrings:
    """Finds the first of some strings in text that comes in pieces, each character read once.

    Text that could be the start of a stop string is kept back until it is decided.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._reach = max(map(len, strings), default=1) - 1
        self._kept = ""

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string found, which ends it.

        Of several the one that starts first counts, then the first given. Inactive: text passes
        and cannot be part of a later match.
        """
        seen = self._kept + text
        if not active:
            self._kept = ""
            return seen, None
        found = [(at, s) for s in self._strings if (at := seen.find(s)) >= 0]
        if found:
            self._kept = ""
            at, string = min(found, key=lambda pair: pair[0])
            return seen[:at], string
        keep = self._undecided(seen)
        self._kept = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def finish(self) -> str:
        """What was kept back: no stop string can complete it any more."""
        kept, self._kept = self._kept, ""
        return kept

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that some stop string begins with."""
        for length in range(min(self._reach, len(text)), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._strings):
                return length
        return 0


def _unicode(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a surrogate alone, as json.loads lets through
            raise ValueError(f"{text!r} is not Unicode text: {error}") from None
    return text
