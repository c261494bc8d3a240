"""`generate`: text to stdout as it comes, statistics to stderr at the end."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from minidecode.cli import INTERRUPTED, options
from minidecode.cli.progress import Progress
from minidecode.errors import MinidecodeError, UsageError
from minidecode.sampling import Sampling

if TYPE_CHECKING:
    from minidecode.decode import Decoder
    from minidecode.records import GenerateResult
    from minidecode.text import StopStrings, Text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, positional=True)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="- reads stdin, as does a pipe alone")
    prompt.add_argument(
        "--prompt-file", metavar="F", help="- is stdin; a newline at the end is dropped"
    )
    parser.add_argument("--chat", action="store_true", help="through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument(
        "--max-new-tokens", type=options.positive, default=128, metavar="N", help="default 128"
    )
    parser.add_argument(
        "--max-context",
        type=options.positive,
        metavar="N",
        help="most tokens of prompt and text together (default: what this run needs)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is off"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on to --max-new-tokens whatever comes"
    )
    parser.add_argument("--no-stream", action="store_true", help="print the text at the end")
    options.add_kernel(parser)
    options.add_device(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode import models
    from minidecode.text import StopStrings, Text

    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed
    )
    stops = StopStrings(args.stop)
    idle = _without_temperature(sampling)
    if idle and not args.quiet:
        print(f"minidecode: {idle}: no effect without --temperature", file=sys.stderr)
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat")
    options.check_kernel(args.kernel)
    prompt = _read_prompt(args)
    options.check_device(args.device)
    with Progress(args.quiet) as progress, options.show_builds(progress):
        directory = options.find_model(args, progress)
        progress(None, "reading the tokenizer")
        if directory is not None:
            # Or the tokenizer's library speaks of what is wrong in it.
            models.load_config(directory)
        text = None if directory is None else Text(directory)
        ids = _encode(text, prompt, args)
        decoder = options.load(args, progress, directory)
        _check_kernel(decoder, progress)
        progress(None, f"reading the prompt, {len(ids)} tokens")
        writer = _Writer(
            text,
            () if args.chat else ids,  # an answer is a text of its own
            stops,
            args.max_new_tokens,
            None if args.no_stream or args.json else sys.stdout,
            progress,
        )
        eos: frozenset[int] = frozenset()
        if text is not None and not args.ignore_eos:
            # Where no file names any, those that the family was trained with.
            eos = text.eos_token_ids() or frozenset(decoder.config.eos_token_ids)
        tokens = decoder.generate(ids, args.max_new_tokens, sampling, eos)
        with _interruptible(writer) as interrupted, closing(tokens):
            for token in tokens:
                if writer.push(token) or interrupted():
                    break
        writer.finish()
    if not args.json:
        writer.end_text()
    with Progress(args.quiet) as progress, options.show_builds(progress):
        progress(None, "measuring the read bandwidth")
        result = _result(options.model_name(args.model), decoder, writer, interrupted())
    if args.json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print(f"\n{_statistics(result, args.max_new_tokens)}", file=sys.stderr)
    return INTERRUPTED if interrupted() else 0


def _check_kernel(decoder: Decoder, progress: Progress) -> None:
    """A user's own kernel is right, or it decodes nothing. Raises KernelWrongError."""
    gemv = decoder.kernel_set.gemv
    if gemv is None or gemv.builtin:
        return
    from minidecode.bench.gate import check_gemvs

    check_gemvs(decoder, decoder.kernel_set, progress)


def _without_temperature(sampling: Sampling) -> str:
    """The options given that say how to draw, where nothing is drawn."""
    if sampling.temperature > 0.0:
        return ""
    usual = Sampling()
    names = ("top_k", "top_p", "min_p")
    given = [name for name in names if getattr(sampling, name) != getattr(usual, name)]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def _read_prompt(args: argparse.Namespace) -> str:
    """The prompt of --prompt, --prompt-file or a pipe, as the user meant it."""
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    if args.prompt_file not in (None, "-"):
        try:
            raw = Path(args.prompt_file).read_bytes()
        except OSError as error:
            raise UsageError(f"--prompt-file {args.prompt_file}: {error.strerror}") from error
    else:
        asked = "-" in (args.prompt, args.prompt_file)
        raw = sys.stdin.buffer.read() if asked or not sys.stdin.isatty() else b""
        if not raw and not asked:
            raise UsageError("nothing to continue: give --prompt TEXT, --prompt-file F or a pipe")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not valid UTF-8 (byte {error.start})") from error
    # Editors and echo end a file with a newline that nobody means to be continued.
    return re.sub(r"\r?\n\Z", "", text)


def _encode(text: Text | None, prompt: str, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt. A synthetic model takes its bytes for ids."""
    if text is None:
        if args.chat:
            raise UsageError("--chat: a synthetic model has no chat template")
        if not prompt:
            raise UsageError("the prompt is empty")
        return list(prompt.encode("utf-8", "surrogateescape"))
    return text.encode_chat(prompt, args.system) if args.chat else text.encode(prompt)


class _Writer:
    """Keeps what was generated; prints it to `out` as it comes, or shows how far it is.

    Without a tokenizer the text is the ids, a space between two.
    """

    def __init__(
        self,
        text: Text | None,
        context: Sequence[int],
        stops: StopStrings,
        wanted: int,
        out: TextIO | None,
        progress: Progress,
    ) -> None:
        from minidecode.text import Detokenizer

        self._detokenizer = None if text is None else Detokenizer(text, context)
        self._stops = stops
        self._wanted = wanted
        self._out = out
        self._progress = progress
        self._pieces: list[str] = []
        self._stopped = False
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int) -> bool:
        """Takes a token; True when a stop string is complete."""
        if self._detokenizer is not None:
            piece = self._detokenizer.push(token)
        else:
            piece = f" {token}" if self.ids else str(token)
        self.ids.append(token)
        emitted, self._stopped = self._stops.push(piece)
        self._emit(emitted)
        return self._stopped

    def finish(self) -> None:
        """Lets out what was held back, when no more tokens come."""
        if self._stopped:
            return
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        emitted, self._stopped = self._stops.push(rest)
        self._emit(emitted if self._stopped else emitted + self._stops.flush())

    def end_text(self) -> None:
        """Prints the text if it was not streamed. Exactly the text, but for a terminal's sake."""
        if self._out is None:
            sys.stdout.write(self.text)
        if sys.stdout.isatty():
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _emit(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._out is None:
            self._progress(len(self.ids) / self._wanted, "generating")
        elif piece:
            self._progress.stop()
            self._out.write(piece)
            self._out.flush()


@contextmanager
def _interruptible(writer: _Writer) -> Iterator[Callable[[], bool]]:
    """Ctrl-C lets the token in work come to its end, so that text and statistics agree.

    Before the first token, and the second time, it interrupts at once. Yields whether it came.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or not writer.ids:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _result(model: str, decoder: Decoder, writer: _Writer, interrupted: bool) -> GenerateResult:
    from minidecode.bench import device
    from minidecode.records import GenerateResult, gb_per_s, percent

    last = decoder.last
    assert last is not None  # the token loop is over
    try:
        read_bw = device.read_bandwidth(decoder.device)
    except MinidecodeError:  # the text is there, and worth more than a percentage
        read_bw = None
    speed = gb_per_s(last.bytes_per_token or 0.0, last.step_us)
    return GenerateResult(
        text=writer.text,
        token_ids=tuple(writer.ids),
        stop_reason="interrupted" if interrupted else last.stop_reason,
        n_prompt=last.n_prompt,
        n_gen=len(writer.ids),
        load_s=decoder.load_seconds,
        build_s=decoder.build_seconds,
        prefill_s=last.prefill_s,
        ttft_s=last.ttft_s,
        decode_tok_s=last.decode_tok_s,
        step_us=last.step_us,
        gb_s=speed,
        read_bw_gb_s=read_bw,
        pct_read_bw=percent(speed, read_bw),
        peak_memory_bytes=last.peak_memory_bytes,
        logits_hash=last.logits_hash,
        kernel=decoder.kernel_set.name,
        engine=last.engine,
        model=model,
        environment=device.environment(decoder.device),
    )


def _statistics(result: GenerateResult, wanted: int) -> str:
    """Four lines for a person; `wanted` tokens were asked for."""
    from minidecode.records import WHY_ABOVE, is_above

    short = result.stop_reason == "length" and result.n_gen < wanted
    ended = "the context was full" if short else result.stop_reason
    peak, share, step_us = result.peak_memory_bytes, result.pct_read_bw, result.step_us
    speed = _amount(result.gb_s, "GB/s")
    if share is not None:
        speed += f", {_amount(share, '%')} of the {_amount(result.read_bw_gb_s, 'GB/s')} measured"
        if is_above(share):
            speed += f": {WHY_ABOVE}"
    rows = [
        (
            "load",
            _time(result.load_s),
            f"build {_time(result.build_s)}",
            f"prefill {_time(result.prefill_s)} ({result.n_prompt} tokens)",
            f"first token {_time(result.ttft_s)}",
        ),
        (
            "decode",
            _amount(result.decode_tok_s, "tokens/s"),
            f"{_time(None if step_us is None else step_us / 1e6)} a token",
            speed,
        ),
        (
            "tokens",
            f"{result.n_gen}, then {ended}",
            f"peak memory {_amount(None if peak is None else peak / 1e9, 'GB')}",
            f"last logits {result.logits_hash or '–'}",
        ),
        ("kernel", f"{result.kernel} ({result.engine})", result.model, result.environment.hardware),
    ]
    return "\n".join(f"{name:<8}{'   '.join(parts)}" for name, *parts in rows)


def _amount(value: float | None, unit: str) -> str:
    """Three digits or so, and the unit; – for what could not be measured."""
    if value is None:
        return "–"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _time(seconds: float | None) -> str:
    """In s, ms or µs, whichever gives a number from 1 up; no seconds at all are 0."""
    if not seconds:
        return "–" if seconds is None else "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return _amount(seconds * scale, unit)
    return _amount(seconds * 1e6, "µs")
