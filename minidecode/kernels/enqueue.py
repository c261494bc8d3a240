"""Calling a kernel library's function on the current stream, and naming its statuses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

from minidecode.errors import MinidecodeError


def enqueue(
    function: Callable[..., int],
    arguments: tuple[object, ...],
    device: torch.device,
    held: object,
    what: str,
    library: ctypes.CDLL | None = None,
) -> Callable[[], None]:
    """A call that runs `function(*arguments, stream)` with `device` current.

    It raises MinidecodeError, which starts with `what`, for a status other than 0, and keeps
    `held` alive.
    """
    index = device.index or 0
    stream_of = raw_stream_getter()
    current_device = torch.cuda.current_device

    def call(_held: object = held) -> None:
        if current_device() == index:
            status = function(*arguments, ctypes.c_void_p(stream_of(index)))
        else:
            with torch.cuda.device(index):
                status = function(*arguments, ctypes.c_void_p(stream_of(index)))
        if status != 0:
            raise MinidecodeError(f"{what} failed: {status_name(library, status)}")

    return call


def raw_stream_getter() -> Callable[[int], int]:
    """Device index -> the current stream's handle, without making a Stream object if torch can."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw  # type: ignore[no-any-return]
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)


def status_name(library: ctypes.CDLL | None, status: int) -> str:
    """A cudaError_t as the runtime that the kernel is linked with names it."""
    name = f"CUDA error {status}"
    with contextlib.suppress(AttributeError):
        describe = library.cudaGetErrorString  # type: ignore[union-attr]
        describe.restype = ctypes.c_char_p
        text = describe(ctypes.c_int(status))
        if text:
            name += f", {text.decode(errors='replace')}"
    return name
