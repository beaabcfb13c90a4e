"""The errors of the package. Every message names the field, what was given and what was expected."""

from __future__ import annotations


class AssayError(Exception):
    """The base class of all errors of this package.

    Examples:
        >>> import assay
        >>> try:
        ...     assay.spec("trl", beta="much")
        ... except assay.AssayError as error:
        ...     print(type(error).__name__)
        SpecError
    """


class SpecError(AssayError, ValueError):
    """An invalid spec: an unknown project, option or field, or a number out of range.

    Examples:
        >>> import assay
        >>> try:
        ...     assay.spec("trl", bta=0.1)
        ... except assay.SpecError as error:
        ...     print("is `beta` meant?" in str(error))
        True
    """


class ProblemError(AssayError, ValueError):
    """A problem that cannot be generated, read or evaluated under its spec.

    Examples:
        >>> import assay
        >>> try:
        ...     assay.load("nowhere.safetensors")
        ... except assay.ProblemError as error:
        ...     print("nowhere.safetensors" in str(error))
        True
    """


class OutputError(AssayError, ValueError):
    """An output that cannot be judged: missing, unknown, or of another shape, dtype, device or layout.

        >>> import assay, numpy as np
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> try:
        ...     problem.check({"loss": np.zeros((), np.float32), "dlogits": np.zeros(7, np.float32)})
        ... except assay.OutputError as error:
        ...     print(error.field)
        dlogits

    Attributes:
        field: The output's name.
        given: The output that was given, in words.
        expected: The output that would have been accepted, in words.
    """

    def __init__(self, field: str, given: str, expected: str) -> None:
        super().__init__(field, given, expected)
        self.field, self.given, self.expected = field, given, expected

    def __str__(self) -> str:
        return f"`{self.field}`: got {self.given}, expected {self.expected}"


class KernelFailure(AssayError, AssertionError):
    """A kernel whose numbers are wrong; the message is the report. pytest shows it as a failed assertion.

    Examples:
        >>> import assay
        >>> issubclass(assay.KernelFailure, AssertionError)
        True
    """


class KernelCrashed(AssayError):
    """A kernel that ended its process, under `isolate=True`.

        >>> import assay
        >>> assay.KernelCrashed("my_loss ended by SIGSEGV", signal=11).signal
        11

    Attributes:
        signal: The number of the signal that ended it; None if it exited by itself.
    """

    def __init__(self, reason: str, signal: int | None = None) -> None:
        super().__init__(reason, signal)
        self.signal = signal

    def __str__(self) -> str:
        return str(self.args[0])


class KernelTimeout(AssayError, TimeoutError):
    """A kernel that did not answer in time, under `isolate=True`, and was stopped.

    Examples:
        >>> import assay
        >>> issubclass(assay.KernelTimeout, TimeoutError)
        True
    """


class NotReproducible(AssayError):
    """A kernel that returned other bits when it was called again with the same problem.

    Examples:
        >>> import assay
        >>> issubclass(assay.NotReproducible, assay.AssayError)
        True
    """


class InputMutated(AssayError):
    """A kernel that wrote to an input, without `inplace=True`.

        >>> import assay
        >>> assay.InputMutated("my_loss wrote to `ids`", field="ids").field
        'ids'

    Attributes:
        field: The input's name; None if only the message has it.
    """

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


# Messages, as in a summary of tests, have the names that users import.
for _error in (
    AssayError,
    SpecError,
    ProblemError,
    OutputError,
    KernelFailure,
    KernelCrashed,
    KernelTimeout,
    NotReproducible,
    InputMutated,
):
    _error.__module__ = "assay"
