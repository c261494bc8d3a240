"""tests/gpu_receipt.json: what ran on a GPU, for exactly which sources.

CI has no GPU. The receipt says what became of the GPU tests, the sanitizer and the benchmark for
the CUDA sources and what launches them, by a hash of these files; tests/test_receipt.py fails when
they have changed since. `scripts/gpu_suite.sh` writes it.

    python scripts/receipt.py show                is it of these sources, and what does it say
    python scripts/receipt.py take FILE           put a receipt from a GPU machine in place
    python scripts/receipt.py not-run "REASON"    say that these sources were run nowhere, and why
    python scripts/receipt.py not-run "REASON" PART ...   say it of these parts alone

A receipt says "passed" only for what the suite itself saw pass.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECEIPT = ROOT / "tests" / "gpu_receipt.json"
SCHEMA_VERSION = 1

# What the receipt is about, relative to the root.
SOURCES = ("cuda", "minidecode/kernels", "minidecode/plan", "minidecode/decode.py")
SUFFIXES = (".cu", ".cuh", ".cpp", ".h", ".py", ".json")

# What a complete run consists of.
PARTS = ("tests", "sanitizer", "bench")

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class ReceiptError(Exception):
    """A receipt that cannot be used; str() says why."""


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """Every file that the receipt is about, in a fixed order."""
    for name in SOURCES:
        top = root / name
        found = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in found:
            if path.is_file() and path.suffix in SUFFIXES:
                yield path


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 of the names and contents of these files."""
    digest = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


def now() -> str:
    """UTC, to the second."""
    time = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return time.isoformat().replace("+00:00", "Z")


def read(path: Path = RECEIPT) -> dict[str, Any]:
    """The receipt in `path`. Raises ReceiptError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReceiptError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ReceiptError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        raise ReceiptError(f"{path} is no receipt of version {SCHEMA_VERSION}")
    return found


def write(receipt: Mapping[str, Any], path: Path = RECEIPT) -> None:
    """Replace `path` in one step."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(receipt, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def result_of(parts: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """(result, reason) of a run with these parts."""
    failed = [name for name in PARTS if name in parts and parts[name]["result"] == FAILED]
    if failed:
        return FAILED, ", ".join(f"{name}: {parts[name]['summary']}" for name in failed)
    missing = [name for name in PARTS if parts.get(name, {}).get("result") != PASSED]
    if missing:
        return NOT_RUN, f"not run yet: {', '.join(missing)}"
    return PASSED, ""


def make(
    parts: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, Any] | None,
    earlier: Mapping[str, Any] | None = None,
    root: Path = ROOT,
) -> dict[str, Any]:
    """The receipt of parts just run; `earlier` gives the others, if it is of these sources."""
    sources = source_hash(root)
    kept = earlier.get("parts", {}) if earlier and earlier.get("sources") == sources else {}
    together = {name: {**kept, **parts}[name] for name in PARTS if name in {**kept, **parts}}
    result, reason = result_of(together)
    return {
        "schema_version": SCHEMA_VERSION,
        "sources": sources,
        "result": result,
        "reason": reason,
        "time": now(),
        "environment": dict(environment) if environment is not None else None,
        "parts": together,
    }


def not_run(
    reason: str,
    parts: Sequence[str] = PARTS,
    earlier: Mapping[str, Any] | None = None,
    root: Path = ROOT,
) -> dict[str, Any]:
    """The receipt of sources of which these parts were not run, or not as they should be.

    `earlier` gives the others, if it is of these sources; what the suite said of one of these parts
    where it failed is added to the reason. Raises ReceiptError without a reason, and where one of
    the others failed.
    """
    if len(reason.split()) < 3:
        raise ReceiptError("say in a few words why these sources were not run on a GPU")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ReceiptError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    environment = earlier["environment"] if earlier else None
    made = make({}, environment, earlier, root)
    kept = {name: part for name, part in made["parts"].items() if name not in parts}
    result, why = result_of(kept)
    if result == FAILED:
        raise ReceiptError(f"of these sources is known what failed: {why}")
    reason = reason.strip()
    if made["result"] == FAILED:
        reason += f"; the suite said {made['reason']}"
    stated = {"result": result, "reason": reason, "environment": environment if kept else None}
    return {**made, **stated, "parts": kept}


def problem(receipt: Mapping[str, Any], root: Path = ROOT) -> str:
    """Why the receipt does not do for the sources in `root`, or "" if it does."""
    if receipt.get("sources") != source_hash(root):
        return (
            "cuda/, minidecode/kernels, minidecode/plan or minidecode/decode.py changed since the"
            " receipt: run scripts/gpu_suite.sh on a GPU, or say why not with"
            ' python scripts/receipt.py not-run "REASON"'
        )
    result, reason = result_of(receipt.get("parts", {}))
    if result == FAILED or receipt.get("result") == FAILED:
        return f"the GPU suite failed: {reason or receipt.get('reason')}"
    if receipt.get("result") != result:
        return f"the receipt says {receipt.get('result')!r}, its parts say {result!r}"
    if result == NOT_RUN and not str(receipt.get("reason", "")).strip():
        return "the receipt says 'not run' and not why"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show")
    commands.add_parser("take").add_argument("file", type=Path)
    unseen = commands.add_parser("not-run")
    unseen.add_argument("reason")
    unseen.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args(arguments)
    try:
        if args.command == "not-run":
            earlier = None
            with contextlib.suppress(ReceiptError):
                earlier = read()
            write(not_run(args.reason, args.parts or PARTS, earlier))
        elif args.command == "take":
            taken = read(args.file)
            if taken.get("sources") != source_hash():
                raise ReceiptError(f"{args.file} is of other sources than those here")
            write(taken)
        receipt = read()
    except ReceiptError as error:
        print(f"receipt.py: {error}", file=sys.stderr)
        return 1
    found = problem(receipt)
    print(f"{receipt['result']}  {receipt['time']}  {receipt['reason']}".rstrip())
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
