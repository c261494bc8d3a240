"""Tokenizer, chat template, streaming and stop strings, on small tokenizers of both great kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from minidecode.errors import MinidecodeError, UsageError
from minidecode.text import Detokenizer, StopStrings, Text

Make = Callable[..., object]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Text:
    directory = tmp_path_factory.mktemp("byte_level")
    tiny_tokenizers.byte_level(directory)
    return Text(directory)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Text:
    directory = tmp_path_factory.mktemp("llama2")
    tiny_tokenizers.llama2(directory)
    return Text(directory)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Text:
    directory = tmp_path_factory.mktemp("metaspace")
    tiny_tokenizers.metaspace(directory)
    return Text(directory)


def stream(text: Text, ids: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(text, context)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def whole(text: Text, ids: list[int]) -> str:
    """The reference: transformers' own decoding of all ids at once."""
    return str(
        text._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def vocabulary(text: Text) -> int:
    return len(text._tokenizer)


# Streaming


def test_a_character_of_four_tokens_appears_whole(byte_level: Text) -> None:
    ids = byte_level.encode("hi 😸!")
    assert len(ids) == 7  # hi, a space, four bytes, !
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == "hi 😸!"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.index("😸") == 5  # with its last byte, not later


@pytest.mark.parametrize("prompt", ["Dear [Name], I", "a  b", "  a", "😸 he", "Ä€😸, a\n\ta", " "])
def test_pieces_with_marked_spaces_join_to_the_text(llama2: Text, prompt: str) -> None:
    ids = llama2.encode(prompt)
    pieces = stream(llama2, ids)
    assert "".join(pieces) == whole(llama2, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    if not prompt.startswith(" "):
        assert "".join(pieces) == prompt


def test_bytes_of_a_marked_space_tokenizer_appear_a_character_at_a_time(llama2: Text) -> None:
    ids = llama2.encode("€😸a")[2:]  # without BOS and the space in front
    assert stream(llama2, ids) == ["", "", "€", "", "", "", "😸", "a", ""]


def test_metaspace_pieces_join_to_the_text(metaspace: Text) -> None:
    ids = metaspace.encode("hi there hi!")
    assert "".join(stream(metaspace, ids)) == whole(metaspace, ids) == "hi there hi!"


@given(data=st.data())
def test_any_byte_level_ids_join_to_the_decoding_of_all(
    byte_level: Text, data: st.DataObject
) -> None:
    # Beyond the vocabulary too: models have padded embeddings.
    ids = data.draw(st.lists(st.integers(0, vocabulary(byte_level) + 5), max_size=40))
    assert "".join(stream(byte_level, ids)) == whole(byte_level, ids)
    assert byte_level.decode(ids) == whole(byte_level, ids)


@given(text=st.text(max_size=30))
def test_any_text_streams_without_replacement(byte_level: Text, llama2: Text, text: str) -> None:
    for tokenizer in (byte_level, llama2):
        if not text:
            continue
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == whole(tokenizer, ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
def test_any_ids_with_bytes_that_are_characters(llama2: Text, data: st.DataObject) -> None:
    plain = st.integers(0, vocabulary(llama2) - 1).filter(lambda i: llama2.byte(i) is None)
    characters = st.characters(exclude_categories=["Cs"]).map(
        lambda char: [3 + byte for byte in char.encode()]
    )
    parts = data.draw(st.lists(st.one_of(plain.map(lambda i: [i]), characters), max_size=20))
    ids = [i for part in parts for i in part]
    assert "".join(stream(llama2, ids)) == whole(llama2, ids)


@given(data=st.data())
def test_any_byte_tokens_are_replaced_only_where_they_are_invalid(
    llama2: Text, data: st.DataObject
) -> None:
    values = data.draw(st.binary(min_size=1, max_size=20))
    a = llama2._tokenizer.convert_tokens_to_ids("a")
    pieces = stream(llama2, [a, *(3 + byte for byte in values), a])
    assert "".join(pieces) == "a" + values.decode("utf-8", "replace") + "a"


def test_an_invalid_end_is_flushed(byte_level: Text, llama2: Text) -> None:
    for text in (byte_level, llama2):
        cut = text.encode("hi 😸")[:-1]
        pieces = stream(text, cut)
        assert "\ufffd" not in "".join(pieces[:-1])
        assert pieces[-1] == "\ufffd"


def test_special_tokens_are_not_text_but_added_words_are(byte_level: Text) -> None:
    bos, eos, reserved, hi, think = byte_level._tokenizer.convert_tokens_to_ids(
        ["<s>", "</s>", "<|reserved|>", "h", "<think>"]
    )
    assert byte_level.decode([bos, hi, reserved, think, hi, eos]) == "h<think>h"


def test_a_continuation_keeps_the_space_that_a_text_of_its_own_loses(llama2: Text) -> None:
    prompt, next_ids = llama2.encode("Dear"), llama2.encode("a he")[1:]
    assert llama2.decode(next_ids) == "a he"
    for before in (0, 20):  # what cannot be seen, as a chat may begin
        context = [prompt[0]] * before + prompt
        assert llama2.decode(next_ids, context) == " a he"


def test_only_the_end_of_a_context_counts(byte_level: Text) -> None:
    context = byte_level.encode("ab😸cd")
    lone = byte_level._tokenizer.convert_tokens_to_ids("Ģ")  # 0x80, which could go on in the emoji
    assert len(context) == 8
    assert byte_level.decode([lone], context) == "\ufffd"


def test_a_token_costs_the_same_late_in_a_long_text(byte_level: Text) -> None:
    """The decoder must never see more than a few ids, however long or broken the text is."""
    seen: list[int] = []
    original = byte_level.decode_window

    class Counting(Text):
        def __init__(self) -> None:
            self.__dict__.update(byte_level.__dict__)

        def decode_window(self, ids: object) -> str:
            seen.append(len(ids))  # type: ignore[arg-type]
            return original(ids)  # type: ignore[arg-type]

    continuation = byte_level._tokenizer.convert_tokens_to_ids("Ģ")  # a lone 0x80
    for ids in (byte_level.encode("the hat is here " * 50), [continuation] * 500):
        seen.clear()
        assert "".join(stream(Counting(), ids)) == whole(byte_level, ids)
        assert max(seen) <= 8
        assert sum(seen) <= 9 * len(ids)


# Encoding


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.llama2])
def test_exactly_one_bos(tmp_path: Path, make: Make) -> None:
    make(tmp_path, add_bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    text = Text(tmp_path)
    for ids in (text.encode("he"), text.encode("<s>he"), text.encode_chat("he")):
        assert ids[0] == text.bos_token_id
        assert ids.count(text.bos_token_id) == 1


def test_no_bos_unless_the_tokenizer_adds_one(byte_level: Text) -> None:
    assert byte_level.bos_token_id not in byte_level.encode("hi")


def test_an_empty_prompt_starts_from_bos_or_is_refused(tmp_path: Path) -> None:
    for add_bos in (False, True):
        tiny_tokenizers.byte_level(tmp_path / str(add_bos), add_bos=add_bos)
        text = Text(tmp_path / str(add_bos))
        assert text.encode("") == [text.bos_token_id]
    tiny_tokenizers.metaspace(tmp_path / "no_bos")
    with pytest.raises(UsageError, match="empty"):
        Text(tmp_path / "no_bos").encode("")


def test_a_prompt_that_is_not_utf8_is_refused(byte_level: Text) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        byte_level.encode("caf\udce9")


# Chat


def test_a_template_in_its_own_file_wins(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(tmp_path, chat_template="config")
    assert Text(tmp_path).decode(Text(tmp_path).encode_chat("x")) == "config"
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    text = Text(tmp_path)
    assert text.decode(text.encode_chat("hi")) == "user:hi;assistant:"
    assert text.decode(text.encode_chat("hi", system="be")) == "system:be;user:hi;assistant:"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert text.decode(text.encode_chat(turns)) == "user:a;assistant:b;assistant:"


def test_a_template_only_in_its_own_file_is_used(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    text = Text(tmp_path)
    assert text.decode(text.encode_chat("hi")) == "<hi>"


def test_chat_without_a_template_is_a_usage_error(byte_level: Text) -> None:
    with pytest.raises(UsageError, match="chat template"):
        byte_level.encode_chat("hi")


def test_what_a_template_refuses_is_told(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tiny_tokenizers.byte_level(tmp_path, chat_template=template)
    with pytest.raises(UsageError, match="no system"):
        Text(tmp_path).encode_chat("hi", system="be brief")


# Where a text ends


def test_every_eos_counts(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(tmp_path)
    assert Text(tmp_path).eos_token_ids() == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Text(tmp_path).eos_token_ids() == {1, 7, 8, 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert Text(tmp_path).eos_token_ids() == {1, 9}


@pytest.mark.parametrize(
    "content",
    ['{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', f'{{"eos_token_id": {2**31}}}', "{"],
)
def test_an_eos_that_is_no_id_is_refused(tmp_path: Path, content: str) -> None:
    tiny_tokenizers.byte_level(tmp_path)
    text = Text(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(MinidecodeError, match=r"generation_config\.json"):
        text.eos_token_ids()


# Files


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(MinidecodeError, match=str(tmp_path)) as caught:
        Text(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(MinidecodeError, match=str(tmp_path)) as caught:
        Text(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_beside_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"], "AutoConfig": "evil.Config"}
    tiny_tokenizers.byte_level(tmp_path, auto_map=auto_map)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": auto_map}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    assert Text(tmp_path).encode("hi")
    assert not (tmp_path / "touched").exists()


# Stop strings


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop_strings, out = StopStrings(stops), ""
    for piece in pieces:
        emitted, stopped = stop_strings.push(piece)
        out += emitted
        if stopped:
            return out, True
    return out + stop_strings.flush(), False


def test_a_stop_string_across_pieces_is_left_out() -> None:
    assert cut(["\nUser:"], ["Hi.", "\n", "Us", "er", ": more"]) == ("Hi.", True)
    assert cut(["\nUser:"], ["Hi.", "\n", "Usage"]) == ("Hi.\nUsage", False)
    assert cut([], ["Hi."]) == ("Hi.", False)


def test_only_what_may_be_the_beginning_is_held_back() -> None:
    stop_strings = StopStrings(["aab", "xyz"])
    assert stop_strings.push("caaa") == ("ca", False)
    assert stop_strings.push("c") == ("aac", False)
    assert stop_strings.push("ax") == ("a", False)
    assert stop_strings.flush() == "x"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    starts = [
        text.find(stop)
        for stop in stops
        if stop in text and text.find(stop) + len(stop) == min(ends)
    ]
    expected = (text[: min(starts)], True) if ends else (text, False)
    assert cut(stops, pieces) == cut(stops, list(text)) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="--stop"):
        StopStrings(["", "a"])
