"""Runs the commands whose results we quote and keeps what they write. Called by measure.sh.

JSON, Markdown, HTML and text go to scripts/results/<gpu>/; where $OUT is set, they are packed into
$OUT/results.tar after each command, so that a run cut short keeps them. Every command is one that a
user could type; each has a process of its own, those of minidecode forked after the imports, which
are most of the start-up time of a short measurement. What an earlier run kept is replaced once a
command has succeeded. LIMIT (300 by default) is the most seconds for one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL, MEDIUM, LARGE = (
    f"synthetic:{name}" for name in ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
)
SETS = "fused,half2_stream,half2_block,cublas"
RIGHT = "tests/fixtures/hostile/hostile.py:right"
HALF_AS_FAST = "tests/fixtures/user_kernels.py:half_as_fast"
IMPORTS = ("torch", "transformers", "minidecode.cli.measure", "minidecode.decode")

# What a command may begin with that is not one of minidecode's.
PROGRAMS = (sys.executable, "bash")

# The file that takes a command's standard output, and the command.
Kept = tuple[str, list[str]]


def short(model: str) -> str:
    """The model's name without its scheme."""
    return model.rpartition(":")[2]


def example(_: str) -> Iterator[Kept]:
    """The same text from three kernel sets."""
    for kernel in ("half2_block", "cublas", "fused"):
        asked = ["--prompt", "The capital of France is", "--max-new-tokens", "40"]
        yield f"generate-{kernel}.json", ["generate", "--kernel", kernel, "--json", *asked]


def bench_command(model: str, depth: int, repeats: int, kernels: str) -> list[str]:
    sizes = ["-p", "0", "-d", str(depth), "-n", "128", "-r", str(repeats)]
    return ["bench", "-m", model, *sizes, "--kernel", kernels, "-o", "json"]


def bench(_: str) -> Iterator[Kept]:
    """Decode rates of all kernel sets."""
    for model in ("example", SMALL, MEDIUM, LARGE):
        yield f"bench-{short(model)}.json", bench_command(model, 128, 5, SETS)


def long(_: str) -> Iterator[Kept]:
    """16,000 tokens in the cache."""
    for model in (MEDIUM, LARGE):
        yield f"bench-{short(model)}-16k.json", bench_command(model, 16_000, 3, "fused")


def loop(_: str) -> Iterator[Kept]:
    """The wall clock of a text's tokens, to set beside the device time of bench."""
    for model in (SMALL, MEDIUM):
        asked = ["--prompt", "a", "--max-new-tokens", "128", "--ignore-eos", "--json"]
        yield f"generate-{short(model)}.json", ["generate", model, *asked]


def families(_: str) -> Iterator[Kept]:
    """Other models, and of other families."""
    for name in ("llama-3.2-3b", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b"):
        yield f"bench-{name}.json", bench_command(f"synthetic:{name}", 128, 3, "fused,cublas")


def prompts(_: str) -> Iterator[Kept]:
    """Prefill, and several depths, in one call."""
    sizes = ["-p", "512", "-n", "128", "-d", "128,4096"]
    asked = ["-m", MEDIUM, *sizes, "--kernel", "fused,cublas", "-o", "json"]
    yield f"bench-{short(MEDIUM)}-prompts.json", ["bench", *asked]


def sampling(_: str) -> Iterator[Kept]:
    """What drawing a token costs, beside taking the greatest."""
    drawn = ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.02"]
    for name, options in (("greedy", []), ("sampled", [*drawn, "--seed", "1"])):
        asked = ["--prompt", "a", "--max-new-tokens", "256", "--ignore-eos", "--json", *options]
        yield f"generate-{short(LARGE)}-{name}.json", ["generate", LARGE, *asked]


def layers(_: str) -> Iterator[Kept]:
    """Every linear layer's shape alone."""
    small = ("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b")
    for name in (*small, "qwen2.5-7b", "mistral-7b", "llama-3.1-8b"):
        kernels = ["--kernel", "half2_stream,cublas", "-o", "json"]
        yield f"gemv-{name}.json", ["gemv", "-m", f"synthetic:{name}", *kernels]


def gemv(_: str) -> Iterator[Kept]:
    """Every kernel alone at the square sizes."""
    kernels = "naive,column_atomic,shared_tree,warp_row,half2_block,half2_stream"
    kernels += ",triton_rowblock,inductor,cublas"
    yield "gemv.json", ["gemv", "--dtype", "both", "-o", "json", "--kernel", kernels]


def report(results: str) -> Iterator[Kept]:
    """Where a step's time goes, against cublas."""
    for model in ("example", LARGE):
        files = [f"--{kind}={results}/report-{short(model)}.{kind}" for kind in ("json", "html")]
        asked = ["-m", model, "-d", "128", "--vs", "cublas", *files]
        yield f"report-{short(model)}.txt", ["report", *asked]


def ab(results: str) -> Iterator[Kept]:
    """The pairs that people ask for; the user's kernel is the README's."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    mine = Path(results) / "mine.cu"
    mine.write_text(readme.partition("```cuda\n")[2].partition("```")[0], encoding="utf-8")
    pairs = {
        "half2_block": ("cublas", "half2_block"),
        "fused": ("cublas", "fused"),
        "user": ("half2_block", str(mine)),
    }
    for model in ("example", LARGE):
        for name, pair in pairs.items():
            file = f"ab-{short(model)}-{name}"
            yield f"{file}.txt", ["ab", *pair, "-m", model, "--json", f"{results}/{file}.json"]


def slow(results: str) -> Iterator[Kept]:
    """A right kernel at half the speed, in one kind of layer, is found there."""
    only = ["--only", "down_proj", "-m", LARGE]
    asked = ["--kernel", RIGHT, "--vs", HALF_AS_FAST, "--json", f"{results}/slow-report.json"]
    yield "slow-report.txt", ["report", *asked, *only]
    asked = ["--json", f"{results}/slow-ab.json"]
    yield "slow-ab.txt", ["ab", RIGHT, HALF_AS_FAST, *asked, *only]


def aa(_: str) -> Iterator[Kept]:
    """Ten runs of a kernel set against itself."""
    for i in range(10):
        yield f"aa-{i}.json", ["ab", "fused", "fused", "-m", "example", "-q", "--json", "-"]


def peers(_: str) -> Iterator[Kept]:
    """transformers and a compiled torch step, one a run: they compile for minutes."""
    from peers import PEERS

    for peer in PEERS:
        asked = ["-m", MEDIUM, "--peers", peer, "-o", "json"]
        yield f"peers-{short(MEDIUM)}-{peer}.json", [sys.executable, "scripts/peers.py", *asked]


def ncu(_: str) -> Iterator[Kept]:
    """What the hardware's counters say of each GEMV."""
    yield "ncu.md", ["bash", "scripts/ncu.sh"]


PARTS: dict[str, Callable[[str], Iterator[Kept]]] = {
    part.__name__: part
    for part in (
        *(example, bench, long, prompts, loop, sampling, families, gemv, layers),
        *(report, ab, slow, aa, peers, ncu),
    )
}


def run(target: Path, log: Path, command: list[str], limit: float) -> int:
    """Run a command with its output in these files; its exit status, 124 if it was too slow."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that what it starts can be ended with it
        code = 1
        with contextlib.suppress(BaseException):
            os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
            if command[0] in PROGRAMS:
                os.execvp(command[0], command)
            from minidecode import cli

            code = cli.main(command)
        os._exit(code)
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def gpu_name() -> str | None:
    """The GPU's name as a folder's; asked in a process of its own, so that none is in use."""
    code = "import torch; print(torch.cuda.get_device_name(0))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    name = asked.stdout.strip().lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") if asked.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    gpu = gpu_name()
    if gpu is None:
        print("measure: torch sees no CUDA GPU here; nothing was run", file=sys.stderr)
        return 5
    results = Path("scripts/results") / gpu
    (ROOT / results).mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    for module in IMPORTS:
        importlib.import_module(module)
    failed = False
    for name in names:
        for file, command in PARTS[name](str(results)):
            began = time.monotonic()
            new, log = results / f"{file}.part", results / f"{file}.log"
            status = run(new, log, command, float(os.environ.get("LIMIT", "300")))
            took = f"({time.monotonic() - began:.0f} s)"
            if status == 0:
                new.replace(results / file)
                print(f"{results / file} {took}", flush=True)
            else:
                failed = True
                new.unlink()
                words = log.read_text(encoding="utf-8", errors="replace").split("\n")[-3:]
                print(f"{results / file} FAILED {took}: {status} {' '.join(words)}", flush=True)
            log.unlink(missing_ok=True)
            if "OUT" in os.environ:
                with tarfile.open(Path(os.environ["OUT"]) / "results.tar", "w") as packed:
                    packed.add(ROOT / "scripts" / "results", "results")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
