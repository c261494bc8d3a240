"""The gate before and after every measurement of a decoder: are a kernel set's logits right?

Each GEMV that composes the set first passes `kernels/check` on the model's own shapes. Then the
whole step runs teacher-forced over a real text, every buffer that an op writes filled with NaN
before each token, and its logits are compared with the same weights in FP32 (`plan/exact`).

A set is wrong if one logit is not finite; if ‖logits − reference‖ / ‖reference‖ is above
MAX_REL_ERR over all positions, or above MAX_POSITION_ERR at one of them; if the mean
KL(reference ‖ logits) is above MAX_KL nats; or if it picks another token than the reference where
the reference's lead over its second choice is CLEAR_LEAD times what MAX_REL_ERR allows to a logit.
Where the lead is smaller, rounding decides. FP16 itself costs about 3e-3, 1e-2, 2e-5 and nothing.
Two arms may differ from each other by twice as much (four times in KL, which goes by the square).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minidecode.errors import KernelWrongError, MinidecodeError
from minidecode.kernels.check import check
from minidecode.plan import exact
from minidecode.records import GateResult

if TYPE_CHECKING:
    from minidecode.decode import Decoder
    from minidecode.kernels.registry import Gemv
    from minidecode.plan import KernelSet

POSITIONS = 64
MAX_REL_ERR = 0.02
MAX_POSITION_ERR = 0.05
MAX_KL = 1e-3
CLEAR_LEAD = 4.0

REFERENCE = "fp32 reference"

# Called with the fraction done, or None, and what is being done.
Progress = Callable[[float | None, str], None]

# Lewis Carroll, Alice's Adventures in Wonderland, 1865: in the public domain.
PASSAGE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had "
    "no pictures or conversations in it, “and what is the use of a book,” thought Alice, “without "
    "pictures or conversations?” So she was considering in her own mind (as well as she could, for "
    "the hot day made her feel very sleepy and stupid), whether the pleasure of making a "
    "daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a "
    "White Rabbit with pink eyes ran close by her."
)


def random_ids(vocab: int, n: int = POSITIONS) -> list[int]:
    """The same pseudo-random token ids every time: the text of a model without a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (n,), generator=generator).tolist()


@dataclass(frozen=True)
class Agreement:
    """How close logits are to a reference. Errors are None when a logit is not finite."""

    rel_err: float | None
    kl: float | None
    top1_agreement: float | None
    reason: str | None  # why that is not close enough

    def result(self, kernel: str, when: str, against: str, positions: int) -> GateResult:
        return GateResult(
            kernel=kernel,
            when=when,
            against=against,
            positions=positions,
            rel_err=self.rel_err,
            kl=self.kl,
            top1_agreement=self.top1_agreement,
            passed=self.reason is None,
            reason=self.reason,
        )


def compare(logits: torch.Tensor, reference: torch.Tensor, slack: float = 1.0) -> Agreement:
    """Judges FP32 logits [positions, vocab] by a reference; `slack` multiplies what is allowed."""
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        return Agreement(None, None, None, f"logits at position {position} are not finite")
    difference = (logits - reference).norm(dim=-1)
    size = reference.norm(dim=-1)
    rel_err = float(difference.norm() / size.norm())
    by_position = difference / size
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    same = logits.argmax(-1) == reference.argmax(-1)
    best = reference.topk(min(2, reference.shape[-1]), dim=-1).values
    lead = best[:, 0] - best[:, -1]
    clear = lead > CLEAR_LEAD * slack * MAX_REL_ERR * reference.std(dim=-1)
    lost = (clear & ~same).nonzero().flatten()
    reason = None
    worst = int(by_position.argmax())
    if rel_err > slack * MAX_REL_ERR:
        reason = f"relative error {rel_err:.1e} of the logits, allowed {slack * MAX_REL_ERR:.0e}"
    elif float(by_position[worst]) > slack * MAX_POSITION_ERR:
        reason = (
            f"relative error {float(by_position[worst]):.1e} of the logits at position {worst}, "
            f"allowed {slack * MAX_POSITION_ERR:.0e}"
        )
    elif kl > slack**2 * MAX_KL:
        reason = f"KL divergence {kl:.1e} nats, allowed {slack**2 * MAX_KL:.0e}"
    elif len(lost):
        reason = f"another token than the reference's clear choice at position {int(lost[0])}"
    return Agreement(rel_err, max(kl, 0.0), float(same.float().mean()), reason)


def teacher_forced(
    decoder: Decoder, kernels: KernelSet, ids: Sequence[int], progress: Progress | None = None
) -> torch.Tensor:
    """FP32 [len(ids), vocab]: the logits that a step of `kernels` gives after each of `ids`."""
    state = decoder.prepare(len(ids))
    runner = decoder.runner(kernels)
    rows = []
    state.set_eos(())
    decoder.start(ids[0], 0)
    runner.warm_up(1)
    # All but the residual stream, which a step reads before it writes.
    written = {op.output.data_ptr(): op.output for op in runner.plan(0).ops}
    poisoned = [t for t in written.values() if t.is_floating_point() and t is not state.x]
    for position, token in enumerate(ids):
        decoder.start(token, position)
        for tensor in poisoned:
            tensor.fill_(float("nan"))
        runner.step(1)
        rows.append(state.logits.clone())
        if progress is not None:
            progress((position + 1) / len(ids), f"checking {kernels.name}")
    return torch.stack(rows)


class Gate:
    """Holds the reference of one text, so that it is computed once for all kernel sets.

    `check` says yes, or raises KernelWrongError with the number that is out of bounds.
    """

    def __init__(
        self, decoder: Decoder, ids: Sequence[int], progress: Progress | None = None
    ) -> None:
        self._decoder, self._ids, self._progress = decoder, list(ids), progress
        layers = decoder.config.num_layers

        def on_layer(done: int) -> None:
            if progress is not None:
                progress(done / layers, "computing the FP32 reference")

        self._reference = exact.logits(
            decoder.blueprint, decoder.weights, decoder.config, self._ids, on_layer
        )
        self._checked: set[Gemv] = set()

    def check(self, arms: Sequence[tuple[str, KernelSet]], when: str) -> tuple[GateResult, ...]:
        """Each named arm against FP32, and the second against the first.

        `when` is "before" or "after" the timed part. Raises KernelWrongError for the first arm
        that is wrong.
        """
        results: list[GateResult] = []
        first: tuple[str, torch.Tensor] | None = None
        for name, kernels in arms:
            check_gemvs(self._decoder, kernels, self._progress, self._checked)
            logits = teacher_forced(self._decoder, kernels, self._ids, self._progress)
            results.append(self._judge(name, when, REFERENCE, compare(logits, self._reference)))
            if first is None:
                first = name, logits
            else:
                results.append(self._judge(name, when, first[0], compare(logits, first[1], 2.0)))
        return tuple(results)

    def _judge(self, name: str, when: str, against: str, agreement: Agreement) -> GateResult:
        if agreement.reason is not None:
            raise KernelWrongError(
                f"kernel {name} is wrong, {when} the timed part, against the {against}: "
                f"{agreement.reason}"
            )
        return agreement.result(name, when, against, len(self._ids))


def check_gemvs(
    decoder: Decoder,
    kernels: KernelSet,
    progress: Progress | None = None,
    passed: set[Gemv] | None = None,
) -> None:
    """Each GEMV of a kernel set by itself on the shapes that it gets in this model.

    Those in `passed` are left out, and those that pass are added. Raises KernelWrongError, and
    MinidecodeError for a layer that the kernel does not support, and where there was no memory to
    check in.
    """
    passed = set() if passed is None else passed
    decoder.prepare(1)
    used = [kernels.gemv, *kernels.swapped.values()]
    gemvs = {gemv.name: gemv for gemv in used if gemv is not None}
    layers: dict[Gemv, dict[tuple[int, int], str]] = {}
    for op in decoder.runner(kernels).plan(0).ops:
        gemv = gemvs.get(op.kernel)
        if gemv is not None and op.engine == "composed" and gemv not in passed:
            n, k = op.shape
            layers.setdefault(gemv, {}).setdefault((n, k), op.name)
    for gemv, named in layers.items():

        def show(case: str, name: str = gemv.name) -> None:
            if progress is not None:
                progress(None, f"checking {name}: {case}")

        report = check(
            gemv,
            decoder.device,
            dtypes=("fp16",),
            shapes=list(named),
            stop_at_failure=True,
            on_case=show,
        )
        wrong = any(not case.passed for case in report.cases if (case.n, case.k) in named)
        for (n, k), layer in named.items():
            mine = [case for case in report.cases if (case.n, case.k) == (n, k)]
            # All of them: what lies off its alignment, as no weight does here, it may refuse.
            if mine and not wrong and not any(case.supported for case in mine):
                raise MinidecodeError(f"{layer}: kernel {gemv.name} does not support n={n}, k={k}")
        report.require()
        passed.add(gemv)
