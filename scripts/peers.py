"""Other decoders on the same model in the same run, in the table of `minidecode bench`.

  PYTHONPATH=. python scripts/peers.py -m synthetic:llama-3.1-8b --llama-bench llama-bench.json

minidecode is the first line. The others decode greedily at batch one from FP16 weights: of a
directory of Hugging Face's the same ones, of a synthetic model random ones of the same shapes.

- transformers: generate() as it is, eager, with its dynamic cache
- transformers-static: generate(cache_implementation="static"), whose forward is compiled
- compile: a plain torch step over minidecode's own weights, compiled as gpt-fast does it: with
  coordinate descent tuning, and with CUDA graphs unless torch logs that it made none
- a llama-bench that was run on this machine: its `-o json` or `-o jsonl`, text tests (tg) only

Rates are wall clock over the tokens after the first, compilation excluded. `step µs` of the others
is wall clock as well, since they cannot be told apart from their host code.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from minidecode import cli
from minidecode.cli import measure, options, outputs, streams
from minidecode.cli.progress import Progress
from minidecode.errors import MinidecodeError, UsageError

if TYPE_CHECKING:
    from minidecode.decode import Decoder
    from minidecode.records import Run

FORMATS = ("txt", "md", "json", "jsonl", "csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    for flag, name, default, what in (
        ("-n", "n", 128, "tokens after the first"),
        ("-d", "depth", 128, "tokens in the cache before"),
        ("-r", "repeats", 3, "repeats, after two that compile and capture"),
    ):
        said = f"{what} (default {default})"
        parser.add_argument(
            flag, dest=name, type=options.positive, default=default, metavar="N", help=said
        )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        metavar="NAME,…",
        help="default: %(default)s; an empty list is minidecode alone",
    )
    parser.add_argument("--llama-bench", type=Path, metavar="FILE", help="its JSON")
    options.add_kernel(parser)
    options.add_device(parser)
    parser.add_argument("-o", "--output", choices=FORMATS, default="md", help="default md")
    options.add_quiet(parser)
    args = parser.parse_args(arguments)
    return cli.guarded("peers.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.peers.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise UsageError(f"no peer {name!r}; there are {', '.join(PEERS)}")
    options.check_kernel(args.kernel)
    theirs = [] if args.llama_bench is None else read_llama_bench(args.llama_bench)
    options.check_device(args.device)
    with Progress(args.quiet) as progress, options.show_builds(progress):
        runs, failed = _measure(args, names, progress)
    runs += theirs
    streams.show(outputs.rendered(args.output, "runs", runs))
    for name, reason in failed.items():
        print(f"peers.py: {name} did not run: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _measure(
    args: argparse.Namespace, names: list[str], progress: Progress
) -> tuple[list[Run], dict[str, str]]:
    """The lines of the table, and the peers that failed with the reason."""
    from minidecode.bench import stats, throughput
    from minidecode.bench.gate import Gate

    decoder = measure.load(args, args.kernel, progress)
    case = throughput.Case(0, args.n, args.depth)
    environment = measure.environment(decoder, progress)
    model = options.model_name(args.model)
    kernels = decoder.kernel_set
    decoder.prepare(case.positions(decoder))
    Gate(decoder, measure.gate_ids(decoder), progress).check([(kernels.name, kernels)], "before")
    ours = throughput.run_case(
        decoder,
        kernels,
        case,
        repeats=args.repeats,
        model=model,
        environment=environment,
        progress=progress,
    )
    results, failed = [ours], {}
    for name in names:
        progress(None, f"measuring {name}")
        try:
            samples = PEERS[name](decoder, args.model, args.n, args.depth, args.repeats)
        except Exception as error:  # one library's trouble is no reason to lose the others' times
            failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
            continue
        finally:
            gc.collect()
        result = throughput.record(
            decoder,
            case,
            samples,
            name,
            "torch.compile" if name == "compile" else "transformers",
            model,
            environment,
            step_us=stats.median([ns / 1e3 / args.n for ns in samples]),
            bytes_per_token=ours.bytes_per_token,
        )
        # These are minidecode's, and what it holds is in the peak of the others.
        results.append(
            dataclasses.replace(result, peak_memory_bytes=None, load_s=None, build_s=None)
        )
    return results, failed


# --- transformers ---------------------------------------------------------------------------------


def transformers_eager(decoder: Decoder, spec: str, n: int, depth: int, repeats: int) -> list[int]:
    """ns of `n` tokens after the first, of generate() as it is."""
    return _generate(decoder, spec, n, depth, repeats, {})


def transformers_static(decoder: Decoder, spec: str, n: int, depth: int, repeats: int) -> list[int]:
    """ns of `n` tokens after the first, of generate() with a static cache and compiled forward."""
    from transformers.generation import CompileConfig

    compiled = CompileConfig(mode="reduce-overhead", fullgraph=False)
    compiled._compile_all_devices = True  # or a CPU stays eager without a word
    extra = {"cache_implementation": "static", "compile_config": compiled}
    return _generate(decoder, spec, n, depth, repeats, extra)


def _generate(
    decoder: Decoder, spec: str, n: int, depth: int, repeats: int, extra: dict[str, Any]
) -> list[int]:
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = _transformers_model(decoder, spec)
    model.generation_config.eos_token_id = None  # all texts are equally long
    ids = torch.tensor([_random_ids(decoder, depth)], device=decoder.device)

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Reads the clock at the first and at the last token; never stops."""

        def __init__(self) -> None:
            self.tokens = 0
            self.times: list[int] = []

        def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            self.tokens += 1
            if self.tokens in (1, n + 1):
                _wait(decoder)
                self.times.append(time.perf_counter_ns())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    samples = []
    for turn in range(repeats + 2):  # the first compiles, the second captures
        clock = Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=n + 1,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **extra,
            )
        if turn >= 2:
            samples.append(clock.times[1] - clock.times[0])
    return samples


def _transformers_model(decoder: Decoder, spec: str) -> Any:
    """The model in FP16 on the decoder's device, in transformers' own classes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if decoder.directory is not None:
        model = AutoModelForCausalLM.from_pretrained(
            str(decoder.directory), dtype=torch.float16, local_files_only=True
        )
        return model.to(decoder.device).eval()
    from minidecode.models import synthetic

    raw = dict(synthetic.SHAPES[spec.removeprefix(synthetic.PREFIX)])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device(decoder.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()


# --- a compiled torch step ------------------------------------------------------------------------


class TorchStep:
    """One greedy decode step in plain torch over minidecode's weights, for torch.compile."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        from minidecode.models.stages import Attention
        from minidecode.plan.state import rope_table

        c = decoder.config
        self.config, self.capacity = c, capacity
        weights, blueprint = decoder.weights, decoder.blueprint
        shape = (c.num_layers, c.num_kv_heads, capacity, c.head_dim)
        self.keys, self.values = (
            torch.randn(shape, device=decoder.device).half() for _ in range(2)
        )
        self.rope = rope_table(c, decoder.device, capacity)
        self.seen = torch.arange(capacity, device=decoder.device)
        self.embedding = weights[blueprint.embedding]

        def tensors(stage: Any) -> dict[str, Any]:
            names = ("norm", "weight", "bias", "q_norm", "k_norm")
            found = {name: getattr(stage, name, None) for name in names}
            return {name: None if p is None else weights[p] for name, p in found.items()}

        self.layers = [[tensors(stage) for stage in layer] for layer in blueprint.layers]
        self.windows = [
            stage.window
            for layer in blueprint.layers
            for stage in layer
            if isinstance(stage, Attention)
        ]
        self.head = tensors(blueprint.head)
        # A CUDA graph copies its other inputs before each replay, and is not made at all if one of
        # those is written to.
        stages = [*itertools.chain(*self.layers), self.head]
        held = [t for stage in stages for t in stage.values() if t is not None]
        for tensor in (self.embedding, self.keys, self.values, self.rope, self.seen, *held):
            torch._dynamo.mark_static_address(tensor)

    def __call__(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """FP16 logits [1, vocab] after `token` INT64 [1], which is at `position` INT64 [1]."""
        x = self.embedding[token]
        cos, sin = self.rope[position].unbind(-1)
        for i, (qkv, attention, o, gate_up, down) in enumerate(self.layers):
            heads = self._attend(i, self._normed(qkv, x), attention, position, cos, sin)
            x = x + F.linear(heads, o["weight"], o["bias"])
            gate, up = self._normed(gate_up, x).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down["weight"], down["bias"])
        return self._normed(self.head, x)

    def _normed(self, stage: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(x, stage["norm"]), stage["weight"], stage["bias"])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), weight.shape, weight.float(), self.config.rms_norm_eps)
        return normed.to(x.dtype)

    def _attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        stage: Any,
        position: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        c = self.config
        q, k, v = (
            part.view(-1, c.head_dim) for part in qkv[0].split([c.q_size, c.kv_size, c.kv_size])
        )
        if stage["q_norm"] is not None:
            q, k = self._norm(q, stage["q_norm"]), self._norm(k, stage["k_norm"])

        def turned(heads: torch.Tensor) -> torch.Tensor:
            low, high = heads.float().chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).half()

        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(1, position, turned(k)[:, None])
        values.index_copy_(1, position, v[:, None])
        mask = self.seen <= position
        window = self.windows[layer]
        if window is not None:
            mask &= self.seen > position - window
        out = F.scaled_dot_product_attention(
            turned(q)[None, :, None],
            keys[None],
            values[None],
            attn_mask=mask[None, None, None],
            enable_gqa=True,
        )
        return out.reshape(1, c.q_size)


def compiled_step(decoder: Decoder, spec: str, n: int, depth: int, repeats: int) -> list[int]:
    """ns of `n` tokens of a compiled torch step."""
    import torch._inductor.config

    torch._inductor.config.coordinate_descent_tuning = True
    logits = TorchStep(decoder, depth + n)

    def greedy(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return logits(token, position).argmax(-1)

    step = torch.compile(greedy, mode="reduce-overhead", fullgraph=True)
    samples = []
    with torch.inference_mode():
        for turn in range(repeats + 2):  # the first compiles, the second captures
            token = torch.zeros(1, dtype=torch.int64, device=decoder.device)
            position = torch.full_like(token, depth)
            _wait(decoder)
            begin = time.perf_counter_ns()
            for _ in range(n):
                token = step(token, position).clone()  # its own output is overwritten by the next
                position = position + 1
            _wait(decoder)
            if turn >= 2:
                samples.append(time.perf_counter_ns() - begin)
    return samples


def _random_ids(decoder: Decoder, n: int) -> list[int]:
    from minidecode.bench.gate import random_ids

    return random_ids(decoder.config.vocab_size, n)


def _wait(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


PEERS: dict[str, Callable[[Decoder, str, int, int, int], list[int]]] = {
    "transformers": transformers_eager,
    "transformers-static": transformers_static,
    "compile": compiled_step,
}


# --- llama-bench ----------------------------------------------------------------------------------


def read_llama_bench(path: Path) -> list[Run]:
    """The text tests in the JSON that `llama-bench -o json` or `-o jsonl` has written.

    Raises MinidecodeError when the file is not that.
    """
    from minidecode import __version__
    from minidecode.records import SCHEMA_VERSION, Environment, Run

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MinidecodeError(f"{path}: {error.strerror}") from error
    try:
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
        runs = []
        for row in rows:
            if row["n_gen"] == 0 or row["n_prompt"] > 0:
                continue
            environment = Environment(
                minidecode=__version__,
                time=row["test_time"],
                python="",
                os="",
                cpu=row["cpu_info"],
                gpu=row["gpu_info"] or None,
            )
            known = {
                **row,
                "n_depth": row.get("n_depth", 0),
                "backend": row.get("backends") or ("CUDA" if row["gpu_info"] else "CPU"),
                "model": Path(row.get("model_filename", row["model_type"])).name,
                "kernel": "llama.cpp",
                "engine": "llama.cpp",
                "schema_version": SCHEMA_VERSION,
                "environment": environment.to_dict(),
            }
            runs.append(Run.from_dict(known))
    except KeyError as error:
        raise MinidecodeError(f"{path}: no JSON of llama-bench: a row has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise MinidecodeError(f"{path}: no JSON of llama-bench: {error}") from error
    return runs


if __name__ == "__main__":
    sys.exit(main())
