import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from ._frameworks import Arrays

__all__ = [
    "Array",
    "Campaign",
    "Problem",
    "Problems",
    "Spec",
    "Verdicts",
    "agreement_page",
    "agreement_text",
    "__version__",
    "answer",
    "available_bytes",
    "compare_logp",
    "load",
    "gpu_enqueue",
    "gpu_numbers",
    "gpu_plan",
    "gpu_settled",
    "gpu_takes_one_pass",
    "op_divergence",
    "op_divergence_gradient",
    "op_gather_logp",
    "op_gather_logp_gradient",
    "op_gradient",
    "op_head_gather_logp",
    "op_head_gather_logp_gradient",
    "op_head_gradient",
    "op_head_loss",
    "op_head_loss_and_gradient",
    "op_loss",
    "op_sequences",
    "page",
    "programs_markdown",
    "programs_page",
    "programs_text",
    "report_markdown",
    "report_text",
    "run",
    "spec_of_cotangents",
    "spec_of_fields",
    "spec_of_file",
    "spec_of_preset",
    "unmasked_problem",
    "with_memory",
    "mosaic_kernels",
    "plan",
    "ptx_kernels",
    "xla_handlers",
]

__version__: str

@final
class Array:
    """An array of a problem's, lent. NumPy takes it by the buffer protocol (bf16 as its bits, uint16), PyTorch and JAX by
    DLPack, none with a copy where its memory is aligned for them: what has 1 KiB and more is, at a multiple of 64 bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
    @property
    def dtype(self) -> str:
        """`f64`, `f32`, `bf16`, `f16`, `i64` or `bool`."""
    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
    @property
    def writable(self) -> bool:
        """Whether it may be written to."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The array as a DLPack capsule. Where the consumer takes version 1, it says that the array is to be read only.

        Raises:
            BufferError: Another device was asked for.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Type and number of the device: (1, 0), the CPU."""

@final
class Spec:
    """One GRPO loss, in full; equal to another that computes the same. `assay.spec` makes them."""

    def describe(self) -> str:
        """What it computes, in words and formulas."""
    @property
    def yaml(self) -> str:
        """Every field, as a file that `assay.spec(path)` and `assay judge --spec` read."""
    def to_json(self) -> str:
        """Every field, as JSON."""
    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain data: the numbers that a kernel needs, such as
        `spec.to_dict()["objective"]["ppo_clip"]["epsilon_low"]`."""
    @property
    def _json(self) -> str:
        """As `to_json`, which what traces Python cannot call."""
    @classmethod
    def _of_json(cls, json: str) -> Spec: ...

@final
class Problem:
    """One GRPO batch under one loss.

    An array that it does not have is an AttributeError, which says what it has. Arrays of floats that are told to tokens are f32 where that is exact for the whole array, as it is for all that are
    generated, and f64 where it is not.
    """

    @property
    def spec(self) -> Spec:
        """The loss."""
    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T, V), or (B, T, H, V) with an LM head."""
    @property
    def dtype(self) -> str:
        """`f32`, `bf16`, `f16` or `f64`: of the logits, or of hidden states and LM head."""
    @property
    def layout(self) -> str | None:
        """How the LM head lies, `hv` for [H,V] or `vh` for [V,H]; None where there is none."""
    @property
    def recipe(self) -> dict[str, Any] | None:
        """What it was generated from; None where it was not."""
    @property
    def logits(self) -> Array:
        """[B,T,V], where it has no LM head."""
    @property
    def hidden(self) -> Array:
        """[B,T,H], with an LM head."""
    @property
    def lm_head(self) -> Array:
        """[H,V] or [V,H], as `layout` says, with an LM head."""
    @property
    def ids(self) -> Array:
        """[B,T] i64: the sampled tokens; anything may stand where the mask is false."""
    @property
    def mask(self) -> Array:
        """[B,T] bool: true for the tokens that count."""
    @property
    def dlogp(self) -> Array:
        """`[B,T]`, or as the ids: the cotangent of logp, where logp and entropy are the result."""
    @property
    def dentropy(self) -> Array:
        """`[B,T]`: the cotangent of entropy, where the spec reads it."""
    @property
    def advantages(self) -> Array:
        """[B] or [B,T], as the spec has it."""
    @property
    def old_logp(self) -> Array:
        """[B,T], nats: log-probabilities under the policy that sampled, or that the last epoch left."""
    @property
    def ref_logp(self) -> Array:
        """[B,T], nats: log-probabilities under the reference policy of the KL penalty."""
    @property
    def rollout_logp(self) -> Array:
        """[B,T], nats: log-probabilities under the policy that the sampler ran; NaN: not scored."""
    @property
    def rollout_weights(self) -> Array:
        """[B,T] or [B,1]: importance weights against the sampler's policy."""
    @property
    def token_weights(self) -> Array:
        """[B,T] or [B,1]: weights of tokens that the trainer gives."""
    @property
    def temperature(self) -> Array:
        """[B,T] or [B,1]: softmax temperatures, where the spec has them given."""
    @property
    def kept_ids(self) -> Array:
        """[B,T,K] i64: the vocabulary entries that the sampler has kept for each token, -1 for no entry."""
    @property
    def teacher_logits(self) -> Array:
        """[B,T,V]: the teacher's logits, nats."""
    @property
    def teacher_logp(self) -> Array:
        """[B,T,K], nats: the teacher's log-probabilities of its likeliest entries."""
    @property
    def teacher_ids(self) -> Array:
        """[B,T,K] i64: the ids of the teacher's likeliest entries."""
    @property
    def selected(self) -> Array:
        """[B,T] bool: the tokens that KL-Cov penalizes, or that Clip-Cov leaves out."""
    @property
    def bias(self) -> Array:
        """[V]: bias of the LM head."""
    @property
    def cu_seqlens(self) -> Array:
        """[S+1] i64, where S sequences are packed into one row, [1,N]: 0, and where each ends."""
    def pack(self) -> Problem:
        """The same with its sequences packed into one row, each without the tokens behind the last that counts.

        Raises:
            ProblemError: They are packed already.
        """
    def numpy(self) -> Arrays:
        """The arrays as NumPy's, read-only. bf16 is `ml_dtypes.bfloat16` where that package is installed; where not,
        `logits_bits` has the bits as uint16."""
    def torch(self, device: Any = None) -> Arrays:
        """The arrays as tensors of PyTorch's, on the CPU or on `device`. On the CPU they share this problem's memory: do not write to them."""
    def jax(self, device: Any = None) -> Arrays:
        """The arrays as JAX's, on its default device or on `device`."""
    def check(self, outputs: Mapping[str, Any], *, grade: str = "standard", allow: Sequence[str] = ...) -> Verdicts:
        """Judges what a kernel made of this problem.

        Args:
            outputs: `loss`, a scalar, and `dlogits` [B,T,V]; with an LM head `dhidden` [B,T,H] and `dlm_head` of the LM
                head's shape instead, and if it is not that of `dhidden`, `dlogits_dtype`. Each optional: `logp`, `entropy`
                and `token_loss`, [B,T]. Arrays of NumPy, PyTorch or JAX, or anything with `__dlpack__` or the buffer
                protocol, of f32, bf16, f16 or f64; read where they lie, those of a GPU after their framework's own copy.
            grade: `standard`, as textbook formulas are, carefully evaluated in f32, or `exact`.
            allow: Edges at which failures are waived: `overflow`, `minus_infinity`, `lowest_float`, `masked`.

        Raises:
            OutputError: An output that is missing, unknown, or of another shape, dtype or layout.
        """
    def select(
        self,
        *,
        batch: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        units: Sequence[int] | None = None,
    ) -> Problem:
        """A part of it, a problem of its own: all of an axis where nothing is given. A token whose sampled column is left out
        no longer counts, and its id is −1.

        Args:
            batch: Sequences, in the order in which they shall stand, as the others do.
            tokens: Tokens, the same of every sequence.
            columns: Columns of the vocabulary.
            units: Units of the hidden states, with an LM head.

        Raises:
            ProblemError: No index, one that its axis has not, or `units` without an LM head.
        """
    def simplify(self, fails: Callable[[Problem], object], *, calls: int = 400) -> Problem:
        """The smallest problem that is found for which `fails` still says yes: first fewer sequences, tokens and columns, then
        plainer numbers. What a campaign does with what it finds, for a question of your own.

        Args:
            fails: Whether what is looked for is still there; asked of problems in which a token counts. What it raises ends
                the search.
            calls: How often it is called at most, beside the first time.

        Raises:
            ProblemError: `fails` says no of the problem itself.
        """
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as `assay generate` does, for `assay.load` and `assay judge`.

        Raises:
            ProblemError: The system refuses.
        """

@final
class Problems(Iterator[Problem]):
    def __new__(
        cls,
        spec: Spec,
        first: int,
        deck: dict[str, Any],
    ) -> Problems: ...
    def __iter__(self) -> Problems: ...
    def __next__(self) -> Problem: ...

@final
class Campaign:
    def __new__(
        cls,
        *,
        kernel: str,
        spec: Spec,
        deck: dict[str, Any],
        seconds: float | None,
        grade: str,
        allow: list[str],
        shrink: bool,
        power: bool,
        repros: str | os.PathLike[str] | None,
        invariant: list[str] | None,
        alone: bool,
    ) -> Campaign: ...
    def run(
        self,
        function: Callable[..., Mapping[str, Any]],
        outputs: list[str] | None,
        device: str | None,
        inplace: bool,
        progress: Callable[[int, int, int], object] | None,
        ways: list[tuple[str, bool, bool]],
    ) -> str: ...
    def run_isolated(
        self,
        command: list[str],
        timeout: float,
        progress: Callable[[int, int, int], object] | None,
        ranks: tuple[int, str] | None,
    ) -> str: ...

@final
class Verdicts:
    """What the judge says of one candidate, a verdict a gate; true where all pass. Its repr is the judge's table."""

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
    @property
    def failures(self) -> list[str]:
        """Each gate that failed, in words: where, expected and actual, the error against its limit."""
    def __bool__(self) -> bool: ...
    def to_json(self) -> str:
        """As `assay judge --json` writes them."""
    def raise_for_failure(self) -> None:
        """Raises `KernelFailure` with the failures in words, unless all pass."""

def run(arguments: list[str]) -> int: ...
def load(path: str | os.PathLike[str], spec: Spec | None, logits: str, old_logp: str) -> Problem: ...
def spec_of_preset(name: str, function: str | None, options: str, batch: str) -> Spec: ...
def spec_of_file(path: str | os.PathLike[str]) -> Spec: ...
def spec_of_fields(fields: str) -> Spec: ...
def spec_of_cotangents(entropy: bool, options: str) -> Spec: ...
def answer(
    function: Callable[[Problem], Any],
    problem: Problem,
    outputs: list[str] | None,
    device: str | None,
    inplace: bool,
    path: str | os.PathLike[str],
    share: tuple[str, int, int] | None,
) -> None: ...
def available_bytes() -> int | None: ...
def agreement_page(json: str) -> str: ...
def agreement_text(json: str) -> str: ...
def compare_logp(
    trainer: Any,
    sampler: Any,
    mask: list[list[bool]] | None,
    advantages: list[list[float]] | None,
    ids: list[list[int]] | None,
    logits: Any,
    head: tuple[Any, Any, str] | None,
    spec: Spec,
    options: Mapping[str, Any],
) -> str: ...
def page(json: str) -> str: ...
def programs_markdown(json: str) -> str: ...
def programs_page(json: str) -> str: ...
def programs_text(json: str) -> str: ...
def unmasked_problem(
    spec: Spec, extents: list[int], dtype: str, *, layout: str, seed: int, device: str | None = None, inplace: bool = False
) -> Problem: ...
def with_memory(report: str, found: str, allow: list[str]) -> str: ...
def report_markdown(json: str) -> str: ...
def report_text(json: str, details: bool, call: str | None) -> str: ...
def plan(spec: Spec, width: int | None, native: bool) -> str: ...
def mosaic_kernels(spec: Spec, shape: tuple[int, int, int], dtype: str, target: str) -> str: ...
def ptx_kernels(spec: Spec, shape: tuple[int, int, int], dtype: str, target: str) -> str: ...
def gpu_plan(spec: Spec, width: int | None) -> str: ...
def gpu_settled(
    spec: Spec, shape: tuple[int, int, int], arrays: dict[str, Any]
) -> tuple[dict[str, Array], list[int] | None]: ...
def gpu_numbers(spec: Spec, sequences: int, width: int | None) -> list[float]: ...
def gpu_takes_one_pass(spec: Spec, place: int, vocab: int, dtype: str) -> bool: ...
def gpu_enqueue(
    spec: Spec,
    kernel: str,
    place: tuple[int, int],
    extents: tuple[int, int, int],
    dtype: str,
    of_tokens: tuple[bool, bool],
    sent: tuple[bool, bool, bool],
    arrays: dict[str, tuple[int, int]],
) -> None: ...
def xla_handlers() -> list[tuple[str, int]]: ...
def op_sequences(
    mask: Sequence[bool], *, cu_seqlens: Sequence[int] | None = None, segment_ids: Sequence[int] | None = None
) -> list[int]: ...
def op_loss(
    spec: Spec, logits: Any, arrays: dict[str, Any], normalizer: float | None
) -> tuple[float, Array, Array, Array, Array]: ...
def op_gradient(
    spec: Spec,
    logits: Any,
    dlogits: Any | None,
    arrays: dict[str, Any],
    normalizer: float | None,
    loss: float,
    logp: Any | None,
    entropy: Any | None,
) -> None: ...
def op_divergence(
    spec: Spec, logits: Any, teacher: tuple[Any | None, Any | None, Any | None], mask: Any | None
) -> tuple[Array, Array]: ...
def op_divergence_gradient(
    spec: Spec,
    logits: Any,
    dlogits: Any | None,
    teacher: tuple[Any | None, Any | None, Any | None],
    mask: Any | None,
    kept: Any,
    cotangents: Any,
) -> None: ...
def op_gather_logp(spec: Spec, logits: Any, ids: Any, mask: Any) -> Array: ...
def op_gather_logp_gradient(spec: Spec, logits: Any, dlogits: Any, ids: Any, mask: Any, dlogp: Any) -> None: ...
def op_head_gather_logp(spec: Spec, head: tuple[Any, Any, bool, int], ids: Any, mask: Any) -> Array: ...
def op_head_gather_logp_gradient(
    spec: Spec, head: tuple[Any, Any, bool, int], asked: tuple[bool, bool], ids: Any, mask: Any, dlogp: Any
) -> tuple[Array | None, Array | None]: ...
def op_head_loss(
    spec: Spec, head: tuple[Any, Any, bool, int], arrays: dict[str, Any], normalizer: float | None
) -> tuple[float, Array, Array, Array, Array]: ...
def op_head_loss_and_gradient(
    spec: Spec,
    head: tuple[Any, Any, bool, int],
    asked: tuple[bool, bool],
    arrays: dict[str, Any],
    normalizer: float | None,
    loss: float,
) -> tuple[tuple[float, Array, Array, Array, Array], tuple[Array | None, Array | None]]: ...
def op_head_gradient(
    spec: Spec,
    head: tuple[Any, Any, bool, int],
    asked: tuple[bool, bool],
    arrays: dict[str, Any],
    normalizer: float | None,
    loss: float,
    logp: Any | None,
    entropy: Any | None,
) -> tuple[Array | None, Array | None]: ...
