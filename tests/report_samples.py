"""Records with plausible values for the tests of records and of the report writers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from minidecode.records import (
    FASTER,
    ABResult,
    Arm,
    CheckCase,
    CheckResult,
    Environment,
    GateResult,
    GemvReport,
    GemvRow,
    GenerateResult,
    GpuState,
    LayerReport,
    LayerRow,
    Run,
)

STATE = GpuState(sm_clock_mhz=1980.0, memory_clock_mhz=3201.0, temperature_c=41.0, power_w=310.0)
CEILING_GB_S = 4265.0


def environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "minidecode": "0.1.0",
        "commit": "0123456789ab",
        "time": "2026-11-30T12:00:00Z",
        "python": "3.11.9",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "cuda": "13.0",
        "nvcc": "13.0",
        "driver": "580.65",
        "os": "Linux 6.1 x86_64",
        "cpu": "A CPU",
        "cpu_cores": 16,
        "cpu_threads": 16,
        "device": "cuda:0",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "sm_count": 132,
        "l2_bytes": 62914560,
        "gpu_memory_bytes": 150121545728,
        "state": STATE,
        "read_bw_gb_s": CEILING_GB_S,
    }
    return Environment(**{**values, **changes})


def generate_result(**changes: Any) -> GenerateResult:
    values: dict[str, Any] = {
        "text": " Paris.",
        "token_ids": (7042, 30),
        "stop_reason": "eos",
        "n_prompt": 5,
        "n_gen": 2,
        "decode_tok_s": 3000.5,
        "gb_s": 812.0,
        "kernel": "half2_block",
        "engine": "composed",
        "model": "example",
        "environment": environment(),
    }
    return GenerateResult(**{**values, **changes})


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "build_commit": "0123456789ab",
        "cpu_info": "A CPU",
        "gpu_info": "NVIDIA H200",
        "backend": "CUDA",
        "model": "synthetic:llama-3.1-8b",
        "model_type": "llama 8.03B F16",
        "model_size": 16_060_000_000,
        "model_n_params": 8_030_000_000,
        "n_prompt": 0,
        "n_gen": 128,
        "n_depth": 128,
        "test_time": "2026-11-30T12:00:00Z",
        "avg_ns": 4.7e8,
        "stddev_ns": 1e6,
        "avg_ts": 271.34,
        "stddev_ts": 0.42,
        "samples_ns": (4.7e8, 4.71e8),
        "samples_ts": (272.0, 271.0),
        "kernel": "fused",
        "engine": "fused",
        "step_us": 3680.0,
        "bytes_per_token": 15_010_000_000,
        "gb_s": 4078.8,
        "read_bw_gb_s": CEILING_GB_S,
        "pct_read_bw": 95.6,
        "peak_memory_bytes": 17_000_000_000,
        "environment": environment(),
    }
    return Run(**{**values, **changes})


def layer_row(**changes: Any) -> LayerRow:
    values: dict[str, Any] = {
        "name": "layers.0.attn.o",
        "kind": "o",
        "layer": 0,
        "engine": "fused",
        "kernels": ("gemv_residual",),
        "shape": (2048, 2048),
        "bytes": 8_388_608,
        "median_us": 3.4,
    }
    return LayerRow(**{**values, **changes})


# kind, part of the block, shape, exposed µs: the 1B model as the fused engine runs it on an H200.
_BLOCK = (
    ("qkv", "attn", (3072, 2048), 3.2),
    ("attention", "attn", (32, 64), 5.3),
    ("o", "attn", (2048, 2048), 3.4),
    ("gate_up", "mlp", (16384, 2048), 16.1),
    ("down", "mlp", (2048, 8192), 7.4),
)


def layer_rows(layers: int = 16, vs: bool = False) -> list[LayerRow]:
    """A row an op, times varied a little and without chance from layer to layer."""
    rows = []
    for layer in range(layers):
        for i, (kind, part, shape, us) in enumerate(_BLOCK):
            size = 2 * shape[0] * shape[1] if kind != "attention" else 2 * 2 * 128 * 8 * 64
            median = us * (1 + 0.02 * ((layer * 7 + i * 3) % 5 - 2))
            rows.append(
                layer_row(
                    name=f"layers.{layer}.{part}.{kind}",
                    kind=kind,
                    layer=layer,
                    kernels=(f"gemv_{kind}" if kind != "attention" else "decode_attention",),
                    shape=shape,
                    bytes=size,
                    median_us=median,
                    p95_us=median * 1.08,
                    duration_us=median * 1.5,
                    alone_us=median * 1.3,
                    vs_us=median * (1.25 if kind != "attention" else 0.99) if vs else None,
                )
            )
    for name, kind, shape, size, us in (
        ("head", "head", (128256, 2048), 2 * 128256 * 2048, 121.0),
        ("next", "next", (128256,), 4096, 1.9),
    ):
        rows.append(
            layer_row(
                name=name,
                kind=kind,
                layer=None,
                kernels=(name,),
                shape=shape,
                bytes=size,
                median_us=us,
                p95_us=us * 1.01,
                duration_us=us * 1.1,
                alone_us=us * 1.05,
                vs_us=us * 1.04 if vs else None,
            )
        )
    return rows


def layer_report(
    rows: Sequence[LayerRow] | None = None,
    *,
    vs: bool = False,
    step_us: float | None = None,
    read_bw_gb_s: float | None = CEILING_GB_S,
    **changes: Any,
) -> LayerReport:
    rows = layer_rows(vs=vs) if rows is None else rows
    values: dict[str, Any] = {
        "model": "synthetic:llama-3.2-1b",
        "kernel": "fused",
        "engine": "fused",
        "vs": "cublas" if vs else None,
        "vs_step_us": 905.0 if vs else None,
        "depth": 128,
        "samples": 50,
        "method": "CUPTI kernel records of graph replays",
        "command": "minidecode report -m synthetic:llama-3.2-1b -d 128",
        "environment": environment(),
    }
    if step_us is None:
        step_us = 1.013 * sum(row.median_us for row in rows)
    return LayerReport.build(
        rows, step_us=step_us, read_bw_gb_s=read_bw_gb_s, **{**values, **changes}
    )


def gates(**changes: Any) -> tuple[GateResult, ...]:
    return tuple(
        GateResult(
            **{
                "kernel": kernel,
                "when": when,
                "against": "fp32 reference",
                "positions": 64,
                "rel_err": 1.2e-3,
                "kl": 3.1e-6,
                "top1_agreement": 1.0,
                "passed": True,
                **changes,
            }
        )
        for when in ("before", "after")
        for kernel in ("cublas", "half2_stream")
    )


def ab_result(**changes: Any) -> ABResult:
    a = Arm(
        kernel="cublas",
        engine="composed",
        tokens_s=795.0,
        step_us=1257.9,
        bytes_per_token=2_471_600_000,
        gb_s=1964.9,
        pct_read_bw=46.1,
        samples_us=(1257.0, 1258.0, 1258.8),
    )
    b = Arm(
        kernel="half2_stream",
        engine="composed",
        tokens_s=978.6,
        step_us=1021.9,
        bytes_per_token=2_471_600_000,
        gb_s=2418.6,
        pct_read_bw=56.7,
        samples_us=(1021.0, 1022.0, 1022.2),
    )
    values: dict[str, Any] = {
        "model": "synthetic:llama-3.2-1b",
        "depth": 128,
        "rounds": 3,
        "a": a,
        "b": b,
        "gates": gates(),
        "ratio": 1.231,
        "ratio_low": 1.222,
        "ratio_high": 1.24,
        "noise_ratio": 1.0002,
        "noise_low": 0.9988,
        "noise_high": 1.0011,
        "noise_samples_us": (1257.0, 1257.5, 1258.0, 1257.2),
        "verdict": FASTER,
        "read_bw_gb_s": CEILING_GB_S,
        "drift_pct": 0.1,
        "state_before": STATE,
        "state_after": STATE,
        "command": "minidecode ab cublas half2_stream -m synthetic:llama-3.2-1b",
        "environment": environment(),
    }
    return ABResult(**{**values, **changes})


def gemv_report(**changes: Any) -> GemvReport:
    rows = []
    for n in (1024, 2048, 4096, 8192):
        size = 2 * n * n
        for kernel, share in (("column_atomic", 0.05), ("half2_stream", 0.98), ("cublas", 0.85)):
            read_us = size / CEILING_GB_S / 1e3
            cached = n == 1024 and kernel == "half2_stream"
            us = read_us / (2.0 if cached else share)
            rows.append(
                GemvRow(
                    kernel=kernel,
                    n=n,
                    k=n,
                    dtype="fp16",
                    bytes=size,
                    median_us=us,
                    gb_s=size / us / 1e3,
                    read_us=read_us,
                    pct_of_read=100 * read_us / us,
                    vs_cublas=read_us / 0.85 / us,
                    occupancy=0.75,
                    rel_err=2.5e-4,
                    served_from_cache=cached,
                )
            )
    rows.append(
        GemvRow(
            kernel="triton_rowblock",
            n=1024,
            k=1024,
            dtype="fp16",
            bytes=2 * 1024 * 1024,
            reason="triton is not installed",
        )
    )
    values: dict[str, Any] = {
        "rows": rows,
        "read_bw_gb_s": CEILING_GB_S,
        "command": "minidecode gemv --kernel all",
        "environment": environment(),
    }
    return GemvReport(**{**values, **changes})


def check_result(**changes: Any) -> CheckResult:
    values: dict[str, Any] = {
        "kernel": "half2_block",
        "device": "cuda:0",
        "passed": False,
        "cases": (
            CheckCase(name="square", n=1024, k=1024, dtype="fp16", rel_err=2.5e-4, passed=True),
            CheckCase(
                name="odd k",
                n=3,
                k=7,
                dtype="fp16",
                rel_err=None,
                passed=False,
                message="output 2 was not written",
            ),
            CheckCase(name="fp32", n=3, k=8, dtype="fp32", passed=True, supported=False),
        ),
        "environment": environment(),
    }
    return CheckResult(**{**values, **changes})


def md_tables(text: str) -> list[list[list[str]]]:
    """The tables as lists of rows of cells, split where GitHub splits: at unescaped pipes."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]
            if not inside:
                found.append([])
            found[-1].append(cells)
        inside = line.startswith("|")
    return found
