"""What can go wrong. Every message names the field, what was given and what was expected."""

from __future__ import annotations


class AssayError(Exception):
    """The class of all errors of this package."""


class SpecError(AssayError, ValueError):
    """A spec that is none: an unknown project, option or field, or a number out of range."""


class ProblemError(AssayError, ValueError):
    """A problem that cannot be generated, read or evaluated under its spec."""


class OutputError(AssayError, ValueError):
    """An output that cannot be judged: missing, unknown, or of another shape, dtype, device or layout.

    Attributes:
        field: The output's name.
        given: What was there.
        expected: What would have been accepted.
    """

    def __init__(self, field: str, given: str, expected: str) -> None:
        super().__init__(field, given, expected)
        self.field, self.given, self.expected = field, given, expected

    def __str__(self) -> str:
        return f"`{self.field}`: got {self.given}, expected {self.expected}"


class KernelFailure(AssayError, AssertionError):
    """A kernel whose numbers are wrong; the message is the report. pytest shows it as a failed assertion."""


class KernelCrashed(AssayError):
    """A kernel that ended its process.

    Attributes:
        signal: The number of the signal that ended it; None where it exited by itself.
    """

    def __init__(self, reason: str, signal: int | None = None) -> None:
        super().__init__(reason, signal)
        self.signal = signal

    def __str__(self) -> str:
        return str(self.args[0])


class KernelTimeout(AssayError, TimeoutError):
    """A kernel that was not done in time, and has been stopped."""


class NotReproducible(AssayError):
    """A kernel that returned other bits when it was called again with the same problem."""


class InputMutated(AssayError):
    """A kernel that wrote to an input.

    Attributes:
        field: The input's name; None where it stands in the message alone.
    """

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])
