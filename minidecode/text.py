"""Text to token ids and back: tokenizer, chat template, streaming detokeniser, stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minidecode.config import read_json, token_ids
from minidecode.errors import MinidecodeError, MissingError, UsageError

_INCOMPLETE = "\ufffd"

# A UTF-8 character has at most four bytes and a visible token at least one, so what the next
# token can still change lies within the last four tokens.
_WINDOW = 4


class Text:
    """The tokenizer of a Hugging Face directory.

    Only files of `directory` are read and no code of the model's is run. Raises MinidecodeError
    if there is no tokenizer that can be read, MissingError if reading it needs another package.
    """

    def __init__(self, directory: Path) -> None:
        # Hundreds of milliseconds, which importing this module must not cost.
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()  # its advice is for those who train
        self.directory = directory
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise MissingError(f"{directory}: its tokenizer needs {_first_line(error)}") from error
        except Exception as error:  # the tokenizers library raises plain Exception
            reason = _first_line(error)
            raise MinidecodeError(f"{directory}: no readable tokenizer: {reason}") from error
        template = directory / "chat_template.jinja"
        # Read here, so that it wins over tokenizer_config.json whatever transformers' version.
        self._template = template.read_text(encoding="utf-8") if template.is_file() else None
        self.bos_token_id: int | None = self._tokenizer.bos_token_id
        added = self._tokenizer.added_tokens_decoder.items()
        self._hidden = frozenset(self._tokenizer.all_special_ids) | {
            token_id for token_id, token in added if token.special
        }
        self._bytes = self._byte_tokens()

    def _byte_tokens(self) -> dict[int, int]:
        """Token id to byte value, of a tokenizer that spells what it has no token for in bytes."""
        ids = self._tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        known = {i: byte for byte, i in enumerate(ids) if i is not None and i not in self._hidden}
        letter = ids[ord("A")]
        # A vocabulary may hold `<0x41>` as plain text.
        return known if letter in known and self.decode_window([letter]) == "A" else {}

    def encode(self, prompt: str) -> list[int]:
        """Token ids of `prompt`, with one BOS in front if the tokenizer adds it.

        Text that begins with the BOS already gets no second one. An empty prompt is the BOS alone;
        UsageError if the tokenizer has none.
        """
        ids: list[int] = self._tokenizer.encode(_checked(prompt))
        bos = self.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        if ids:
            return ids
        if bos is None:
            raise UsageError("the prompt is empty, and this tokenizer has no BOS to start from")
        return [bos]

    def encode_chat(
        self, messages: str | Sequence[Mapping[str, str]], system: str | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins.

        `messages` are dicts with `role` and `content`, or one user message as text; `system` goes
        in front. What the template prints is all there is: no BOS is added to it. UsageError if
        there is no template, or if the template refuses these messages.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if system is not None:
            turns = [{"role": "system", "content": system}, *turns]
        for turn in turns:
            _checked(turn["content"])
        if self._template is None and not self._tokenizer.chat_template:
            raise UsageError(f"{self.directory}: the tokenizer has no chat template for --chat")
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(turns),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates raise through jinja, or fail like any program
            raise UsageError(f"{self.directory}: chat template: {_first_line(error)}") from error
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    def decode(self, ids: Iterable[int], context: Sequence[int] = ()) -> str:
        """The text of `ids` without special tokens: what a Detokenizer's pieces join to."""
        detokenizer = Detokenizer(self, context)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def decode_window(self, ids: Sequence[int]) -> str:
        """What the tokenizer itself makes of `ids`: one go, nothing left out or tidied up."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def is_visible(self, token_id: int) -> bool:
        """Whether the id makes text: special tokens and ids without a token do not."""
        known = self._tokenizer.convert_ids_to_tokens(token_id) is not None
        return known and token_id not in self._hidden

    def byte(self, token_id: int) -> int | None:
        """The byte that a token like `<0x0A>` stands for, else None."""
        return self._bytes.get(token_id)

    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: generation_config's, config's and the tokenizer's together."""
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self.directory / name
            if path.is_file():
                ids |= {*token_ids(read_json(path), "eos_token_id", file=path)}
        own = self._tokenizer.eos_token_id
        return frozenset(ids if own is None else ids | {own})


class Detokenizer:
    """Turns a stream of token ids into text, a piece a token, at a constant cost.

    A character appears when its last byte has come. With `context`, the ids that come before, the
    text is their continuation; without, it starts a text of its own (where tokenizers in the style
    of Llama 2 drop the first space).

    The pieces join to the tokenizer's own decoding of all ids, with one exception. Where tokens
    like `<0xF0>` spell bytes that are no UTF-8, the tokenizer replaces every byte of the run by
    U+FFFD, valid neighbours too; here only what is invalid is replaced.
    """

    def __init__(self, text: Text, context: Sequence[int] = ()) -> None:
        self._text = text
        self._window = [i for i in context[-2 * _WINDOW :] if text.is_visible(i)][-_WINDOW:]
        # How much of the window's text is out, and how long that text is.
        self._shown = self._length = len(text.decode_window(self._window)) if self._window else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often "" within a character."""
        if not self._text.is_visible(token_id):
            return ""
        byte = self._text.byte(token_id)
        # At the start of a text even a byte (a space) may be dropped, which the decoder knows.
        if byte is not None and (self._window or byte >= 0x80):
            return self._push_byte(token_id, byte)
        pending = self._utf8.decode(b"", True)
        self._window.append(token_id)
        text = self._text.decode_window(self._window)
        # At the end U+FFFD may be a character whose last bytes are still to come.
        end = len(text) - text.endswith(_INCOMPLETE)
        piece = text[self._shown : end]
        self._shown, self._length = max(self._shown, end), len(text)
        self._trim()
        return pending + piece

    def _push_byte(self, token_id: int, byte: int) -> str:
        piece = self._withheld() + self._utf8.decode(bytes([byte]))
        self._window.append(token_id)
        self._shown = self._length = len(self._text.decode_window(self._window))
        self._trim()
        return piece

    def flush(self) -> str:
        """The rest, at the end of the stream: U+FFFD for a character that was never completed."""
        return self._withheld() + self._utf8.decode(b"", True)

    def _withheld(self) -> str:
        piece = _INCOMPLETE * (self._length - self._shown)
        self._shown = self._length
        return piece

    def _trim(self) -> None:
        # Halving it keeps the cost of this second decoding to a quarter a token.
        if len(self._window) >= 2 * _WINDOW:
            withheld = self._length - self._shown
            self._window = self._window[-_WINDOW:]
            self._length = len(self._text.decode_window(self._window))
            self._shown = self._length - withheld


class StopStrings:
    """Cuts a stream of text at the first of `stops`, which is left out.

    Of several, the one that is complete first cuts; so the result does not depend on how the text
    is divided into pieces. UsageError for an empty string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise UsageError("--stop: an empty string would stop before the first token")
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that can go out, and whether a stop string is complete.

        Text that may be the beginning of a stop string is held back.
        """
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _checked(text: str) -> str:
    """`text`, if it can be encoded: bytes of the command line that are no UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8") from error
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
