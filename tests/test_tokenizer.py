"""Text comes back piece by piece as it would in one piece, and each piece is final."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

import tiny_model
from ridgeline import SamplingParams, StreamOutput
from ridgeline.request import Request
from ridgeline.tokenizer import Detokenizer, StopStrings, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.save_tokenizer(folder)
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As SentencePiece models have it: spaces as a mark, unknown characters as byte tokens. Its
    decoder turns each byte of a run into a replacement character unless the whole run is valid."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {character: 256 + i for i, character in enumerate("▁abcdefgh")}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer(path)


@given(text=st.text(alphabet="a b▁é日𓀀\n", min_size=1, max_size=20))
@example("𓀀𓀀")  # eight byte tokens in a row
@example("é日")  # the second character's bytes make the first one's invalid for a while
def test_byte_fallback_text_joins_and_never_splits_a_character(byte_fallback, text):
    (ids,) = byte_fallback.encode([text])
    pieces = pieces_of(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@given(text=st.text(alphabet="a bé日𓀀\n", max_size=12), at=st.integers(0, 60))
@example("a b", 2)  # " b" goes on, where "b" would begin a text
@example("日本 a", 4)  # the prompt's bytes must not make the output's invalid
@example("a 日", 4)  # the prompt ends in the middle of a character
def test_an_output_goes_on_where_its_prompt_ended(byte_fallback, text, at):
    (ids,) = byte_fallback.encode([text])
    prompt, output = ids[:at], ids[at:]
    start, shown = byte_fallback.decode(prompt), "".join(pieces_of(byte_fallback, output, prompt))
    if REPLACEMENT in start:
        assert shown == byte_fallback.decode(output)  # no character of the prompt is shown
    else:
        assert start + shown == text


def test_the_text_of_a_request_goes_on_where_its_prompt_ended(byte_fallback):
    prompt, words = byte_fallback.encode(["a", "b c"])
    updates: deque[StreamOutput] = deque()
    request = Request(
        "0", "a", prompt, SamplingParams(), [0], updates, prompt_index=0, tokenizer=byte_fallback,
        arrival_time=0.0,
    )  # fmt: skip
    for token in words[:-1]:
        request.sequences[0].append(token, None, None, 1.0)
    request.sequences[0].append(words[-1], "length", None, 1.0)
    assert request.output.outputs[0].text == " b c"


@given(text=st.text(max_size=40))
@example("🙂🙂")  # one character spread over four tokens, twice
@example("a 日本語 b")
@example(REPLACEMENT + "a")  # a real replacement character is not an unfinished one
def test_pieces_of_a_text_join_to_it_and_never_split_a_character(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, tiny_model.VOCAB - 1), max_size=60))
def test_pieces_of_any_tokens_join_to_their_decoding(tokenizer, ids):
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def random_vocabulary(seed: int, sentencepiece: bool) -> Backend:
    """Merges at random, within characters and across them; every byte is a token of its own."""
    draw = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet if not sentencepiece else [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    letters = [*"▁ab日é🙂"] if sentencepiece else [*alphabet[40:60], *byte_level("日é🙂 ab")]
    known = list(letters)
    merges = []
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    for _ in range(60):
        pair = draw.choice(known), draw.choice(known)
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            merges.append(pair)
            known.append("".join(pair))
    backend = Backend(models.BPE(vocab, merges, byte_fallback=sentencepiece))
    if sentencepiece:
        backend.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    return backend


def byte_level(text: str) -> list[str]:
    ((piece, _),) = pre_tokenizers.ByteLevel(
        use_regex=False, add_prefix_space=False
    ).pre_tokenize_str(text)
    return sorted(set(piece))


@given(
    seed=st.integers(0, 10**6),
    sentencepiece=st.booleans(),
    text=st.text(alphabet="ab 日é🙂𓀀\n", max_size=24),
    stop=st.text(alphabet="ab 日", min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_any_vocabulary_gives_the_text_whole_and_stops_where_it_should(
    tmp_path_factory, seed: int, sentencepiece: bool, text: str, stop: str
):
    path = tmp_path_factory.getbasetemp() / "random_vocabulary.json"
    random_vocabulary(seed, sentencepiece).save(str(path))
    tokenizer = Tokenizer(path)
    (ids,) = tokenizer.encode([text])
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    stops, shown, found = StopStrings([stop]), "", None
    for piece in pieces:
        new, found = stops.push(piece)
        shown += new
        if found is not None:
            break
    assert (shown if found else shown + stops.finish()) == text.split(stop)[0]
    assert (found is not None) == (stop in text)


def test_a_character_comes_with_its_last_byte(tokenizer):
    (ids,) = tokenizer.encode(["𓀀"])  # not in the training text: four single bytes
    assert len(ids) == 4
    assert pieces_of(tokenizer, ids) == ["", "", "", "𓀀", ""]


def test_an_unfinished_character_comes_at_the_end(tokenizer):
    (ids,) = tokenizer.encode(["a𓀀"])
    assert pieces_of(tokenizer, ids[:-1])[-1] == REPLACEMENT


@pytest.mark.parametrize(
    "piece", ["word ", "𓀀", pytest.param(None, id="bytes that are no character")]
)
def test_each_token_costs_a_bounded_decode(tokenizer, piece):
    (ids,) = tokenizer.encode(["𓀀" if piece is None else piece])
    ids = ids[1:2] * 400 if piece is None else ids * (400 // len(ids))

    class Counting:
        longest = 0

        def decode(self, ids, *, skip_special_tokens=True):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    detokenizer = Detokenizer(counting)
    text = "".join([detokenizer.push(token) for token in ids] + [detokenizer.finish()])
    assert text == tokenizer.decode(ids)
    assert counting.longest <= 24


def test_special_tokens_are_left_out_unless_kept(tokenizer):
    (ids,) = tokenizer.encode(["the fox"])
    ids = [ids[0], tiny_model.EOS, *ids[1:]]
    kept = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == "the fox"
    assert "<|end|>" in "".join([kept.push(t) for t in ids])


@given(
    text=st.text(alphabet="ab日", max_size=30),
    strings=st.lists(st.text(alphabet="ab日", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@example("aab", ["ab"], [1, 2])  # a false start just before the real one
@example("abab", ["bab", "ab"], [3])  # two strings share their end: the one that starts first
def test_stop_strings_are_found_across_any_cuts(text, strings, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stops = StopStrings(strings)
    shown, found = "", None
    for start, end in zip(places, places[1:]):
        new, found = stops.push(text[start:end])
        shown += new
        if found is not None:
            break
    else:
        shown += stops.finish()
    # Text after a cut is not there yet, so the first piece that holds a whole string decides.
    ends = [text.find(s) + len(s) for s in strings if s in text]
    if not ends:
        assert (shown, found) == (text, None)
        return
    seen = text[: min(place for place in places if place >= min(ends))]
    first = min(seen.find(s) for s in strings if s in seen)
    assert shown == seen[:first]
    assert found is not None and seen.startswith(found, first)


def test_text_is_kept_back_only_while_it_can_start_a_stop_string():
    stops = StopStrings(["END"])
    assert stops.push("xE") == ("x", None)
    assert stops.push("x") == ("Ex", None)
    assert stops.push("EN") == ("", None)
    assert stops.push("D and more") == ("", "END")


def test_inactive_stop_strings_let_text_pass():
    stops = StopStrings(["ab"])
    assert stops.push("ab", active=False) == ("ab", None)
    assert stops.push("a") == ("", None)
    assert stops.finish() == "a"


def test_spellings_of_a_word(byte_fallback, tokenizer):
    mark, a, b = (256 + "▁abcdefgh".index(character) for character in "▁ab")
    assert byte_fallback.spellings(["ab"]) == [[mark, a, b], [mark, mark, a, b], [a, b]]
    (start, space) = tokenizer.encode(["zq", " zq"])
    assert tokenizer.spellings(["zq"]) == [start, space]


def test_a_word_without_tokens_has_no_spelling(tmp_path: Path):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="the tokenizer has no tokens for 'é'"):
        Tokenizer(tmp_path / "tokenizer.json").spellings(["é"])


def test_many_texts_are_encoded_in_order(tokenizer):
    texts = [f"fox {i}" for i in range(2500)]  # more than two chunks
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(texts)] == texts


@pytest.mark.parametrize(
    ("contents", "error", "message"),
    [
        (None, FileNotFoundError, "tokenizer.json does not exist"),
        ("{", ValueError, "not a tokenizer.json"),
        ("{}", ValueError, "not a tokenizer.json"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, contents, error, message):
    path = tmp_path / "tokenizer.json"
    if contents is not None:
        path.write_text(contents)
    with pytest.raises(error, match=message):
        Tokenizer(path)
