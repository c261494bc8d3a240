"""Errors that a user can act on. Each class carries the exit code the command line ends with."""

from __future__ import annotations


class MinidecodeError(Exception):
    """Something failed at run time: a model that is not there, a file that is broken."""

    exit_code = 1


class UsageError(MinidecodeError):
    """The command was called wrongly: an unknown kernel, a value out of range."""

    exit_code = 2


class KernelWrongError(MinidecodeError):
    """A kernel computed wrong results, so nothing measured with it would mean anything."""

    exit_code = 3


class SlowerError(MinidecodeError):
    """The second arm of an A/B run was slower than `--fail-if-slower` allows."""

    exit_code = 4


class MissingError(MinidecodeError):
    """A needed GPU, compiler or package is missing; the message says which and what to install."""

    exit_code = 5
