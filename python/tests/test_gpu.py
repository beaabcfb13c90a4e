"""The loss on a GPU without one: kernels on NumPy's arrays, run by the interpreter behind a driver, before the judge."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from on_fake_gpu import STREAM, Fake, Host, aligned, computed, given

import assay
from assay import _gpu

from on_fake_gpu import fake  # noqa: F401  isort: skip

#: Masks and temperatures that are no f32 are cast by NumPy, garbage under the mask too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_PEERS = pathlib.Path(__file__).parents[2] / "fixtures/peers"
_KL = {"beta": 0.04, "estimator": "k3"}
_SAMPLER = (
    "sampling_per_token_logps",
    "sampling_logps",
    "rollout_logps",
    "rollout_log_prob",
    "rollout_log_probs",
    "rollout_logprobs",
    "generation_logprobs",
    "inference_logprobs",
)
_WEIGHTS = {
    "rollout_weights": ("importance_sampling_ratio", "rollout_is_weights", "vllm_is_ratio", "sampler_is_weights", "rollout_weights"),
    "token_weights": ("token_weights", "loss_weights", "rl_weights", "sample_weight"),
}


#: What is decided over more than a row, the terms of all columns, or what there is without a token.
_REFUSED = {
    "cross_entropy_liger_linear_0.001_0.1.json": "`objective.cross_entropy.label_smoothing`",
    "cross_entropy_maxtext.json": "`objective.cross_entropy.z_loss`",
    "cross_entropy_torch_linear_0.1.json": "`objective.cross_entropy.label_smoothing`",
    "cross_entropy_torch_sum_0.3.json": "`objective.cross_entropy.label_smoothing`",
    "trl_gmpo_basic.json": "`objective.importance_sampling.empty_rows`",
    "trl_gmpo_kl_empty.json": "`objective.importance_sampling.empty_rows`",
    "trl_grpo_top_entropy.json": "`top_entropy`",
    "trl_grpo_top_entropy_kl.json": "`top_entropy`",
    "verl_clip_cov.json": "`objective.clip_cov.selection`",
    "verl_kl_cov.json": "`objective.kl_cov.selection`",
}


def one(spec: assay.Spec | None = None, dtype: str = "f32", shape: str = "3x5x257", seed: int = 3) -> assay.Problem:
    return next(iter(assay.problems(spec or assay.spec(kl=_KL), 1, seed, dtypes=(dtype,), shapes=[shape])))


def judged(problem: assay.Problem, outputs: dict[str, Any], name: object = "") -> None:
    verdicts = problem.check(outputs, grade="exact")
    assert verdicts, f"{name}\n{verdicts}"


def recorded() -> dict[str, tuple[str, assay.Spec]]:
    """The losses of all recorded runs of other projects, by their JSON, each with one file that has it."""
    found = {}
    for path in sorted(_PEERS.glob("*.json")):
        run = json.loads(path.read_text())
        arrays = {name for name, array in run["inputs"].items() if array is not None}
        inputs = run["inputs"]
        batch: dict[str, Any] = {
            "old_logps": "old_logps" in arrays,
            "ref_logps": "ref_logps" in arrays,
            "sampling_logps": bool(arrays.intersection(_SAMPLER)),
            "advantages": "token" if isinstance(inputs["advantages"][0], list) else "sequence",
        }
        for name in ("num_items_in_batch", "total_valid_token_count"):
            if name in arrays:
                batch["num_items_in_batch"] = inputs[name]
        for field, names in _WEIGHTS.items():
            for weights in (inputs[name] for name in names if name in arrays):
                is_flat = not isinstance(weights[0], list)
                batch[field] = True if field == "token_weights" else "flat" if is_flat else "token" if len(weights[0]) > 1 else "sequence"
        spec = assay.spec(run["peer"], function=run["function"], batch=batch, **run["options"])
        found[spec.to_json()] = (path.name, spec)
    return found


def test_recorded_losses_are_exact_or_refused_by_name(fake: Fake) -> None:  # noqa: F811
    """Each on a batch of its own, one of three padded, masked and filled with garbage; some packed, some in place. Those that one token
    decides are made in one pass too."""
    refused, passed, in_one_pass = {}, 0, 0
    for i, (name, spec) in enumerate(recorded().values()):
        dtype = ("f32", "bf16", "f16")[i % 3]
        problem = one(spec, dtype, "2x3x41" if i % 2 else "2x4x48", seed=i)
        if i % 5 == 0 and "fixed_length" not in spec.to_json():
            problem = problem.pack()
        try:
            outputs = computed(problem, inplace=i % 4 == 0)
        except assay.AssayError as reason:
            refused[name] = str(reason).split(":")[0]
            continue
        judged(problem, outputs, name)
        passed += 1
        if _gpu.takes_one_pass(Host(), spec.to_json(), problem.shape[-1], dtype):
            judged(problem, computed(problem, inplace=i % 3 == 0, one_pass=True), f"{name} in one pass")
            in_one_pass += 1
    print(f"{passed} passed, {in_one_pass} in one pass; refused: {refused}")
    # No kernel for a GPU is given a teacher.
    of_teachers = {name: "`objective`" for name, _ in recorded().values() if name.startswith("divergence_")}
    assert passed >= 181 and in_one_pass >= 148 and refused == _REFUSED | of_teachers, (passed, in_one_pass, refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"logits": {"softcap": 20.0, "scale": 0.7}, "temperature": "given"},
        {"logits": {"scale": -1.3}, "entropy_coef": 0.02},
        {"logits": {"bias": True}, "support": {"vocab": 250, "excluded_ids": [0, 3, 999], "keep_sampled": True}},
        {"temperature": 0.7, "temperature_divides": "logp", "entropy_coef": 0.01},
        {"temperature": "given", "ratio": {"level": "sequence"}},
        {
            "reduction": "token_mean",
            "kl": {**_KL, "averaging": {"reduction": {"sequence_mean": {"rows": "non_empty"}}, "denominator_epsilon": 0.5}},
            "entropy_coef": 0.02,
            "entropy_averaging": {"reduction": {"sequence_sum": {"rows": "all"}}},
        },
    ],
    ids=["softcap", "flipped", "columns", "logp", "tempered", "averages"],
)
def test_what_a_spec_does_to_logits_and_terms_is_done(fake: Fake, fields: dict[str, Any]) -> None:  # noqa: F811
    for dtype in ("f32", "f16"):
        # Threads take turns in another order the second time.
        fake.set("devices=3,capability=9.0/8.0/7.5" + (",shuffled=5" if dtype == "f16" else ""))
        problem = one(assay.spec(**{"kl": _KL, **fields}), dtype)
        judged(problem, computed(problem))
        if "ratio" not in fields:
            judged(problem, computed(problem, one_pass=True), "in one pass")


@pytest.mark.parametrize("g", [1.0, 1 / 7, 65536.0])
def test_a_scaled_loss_has_a_gradient_of_one_rounding(fake: Fake, g: float) -> None:  # noqa: F811
    """Judged as that of a spec whose scale is g; in place and not, the same bits."""
    plain = assay.spec(kl=_KL)
    for dtype in ("f16", "bf16"):
        scaled = one(assay.spec(scale=float(np.float32(g)), kl=_KL), dtype)
        outputs, of_plain = computed(scaled), []
        for inplace in (False, True):
            logits = aligned(scaled.numpy().logits)
            of = _gpu.loss(Host(), plain.to_json(), logits, given(scaled), None)
            dlogits = logits if inplace else np.zeros_like(logits)
            sent = (np.float32(g), None, None)
            _gpu.gradient(Host(), plain.to_json(), logits, dlogits, given(scaled), of.kept, sent)
            judged(scaled, {**outputs, "dlogits": dlogits})
            of_plain.append(dlogits.view(np.uint16))
        assert np.array_equal(*of_plain)


def test_logp_and_entropy_are_differentiable_beside_the_loss(fake: Fake) -> None:  # noqa: F811
    """As those of the spec that has these cotangents, though this one has no entropy."""
    problem = one(assay.spec("logp", temperature=0.7, logits={"softcap": 30.0}))
    arrays = problem.numpy()
    none = assay.spec("logp", entropy=False, temperature=0.7, logits={"softcap": 30.0}).to_json()
    logits, tokens = aligned(arrays.logits), {**given(problem), "advantages": np.zeros(3, np.float32), "dentropy": None}
    of, dlogits = _gpu.loss(Host(), none, logits, tokens, None), np.zeros_like(logits)
    sent = (None, np.where(arrays.mask, arrays.dlogp, np.nan), np.where(arrays.mask, arrays.dentropy, np.nan))
    _gpu.gradient(Host(), none, logits, dlogits, tokens, of.kept, sent)
    judged(problem, {"logp": of.logp, "entropy": of.entropy, "dlogits": dlogits})


def test_dlogits_of_the_forward_pass_follow_the_loss(fake: Fake) -> None:  # noqa: F811
    """A step whose loss is multiplied as the last one was reads and writes nothing in its backward pass; any other makes dlogits anew."""
    plain = assay.spec(kl=_KL, scale=0.75).to_json()
    for g, is_new in [(1.0, False), (1 / 7, True), (1 / 7, False), (0.0, True), (1 / 7, False), (65536.0, True)]:
        scaled = one(assay.spec(scale=float(np.float32(0.75 * g)) or 1.0, kl=_KL), "bf16")
        logits, tokens = aligned(scaled.numpy().logits), given(scaled)
        dlogits = np.full_like(logits, 77)
        of = _gpu.loss(Host(), plain, logits, tokens, None, dlogits)
        made, logits_before = dlogits.copy(), logits.copy()
        dlogits[...] = 77
        _gpu.gradient(Host(), plain, logits, dlogits, tokens, of.kept, (np.float32(g), None, None), made=True)
        untouched = bool((dlogits == 77).all())
        assert untouched is not is_new and np.array_equal(logits_before, logits), g
        dlogits = made if untouched else dlogits
        if g == 0.0:
            assert not dlogits.astype(np.float32).any()
        else:
            outputs = {name: getattr(of, name) for name in ("loss", "logp", "entropy", "token_loss")}
            verdicts = scaled.check({**outputs, "loss": np.float32(of.loss * g), "dlogits": dlogits}, grade="exact")
            assert verdicts, f"{g}\n{verdicts}"


def test_dlogits_over_logits_are_multiplied_where_the_loss_is(fake: Fake) -> None:  # noqa: F811
    """Rounded once more where the loss has another cotangent than at the last step, and else as they are."""
    spec = assay.spec(kl=_KL, scale=1.25)
    problem = one(spec)
    tokens = given(problem)
    for g, is_new in ((0.5, True), (0.5, False), (1 / 7, True)):
        dlogits = aligned(problem.numpy().logits)
        of = _gpu.loss(Host(), spec.to_json(), dlogits, tokens, None, dlogits)
        before = dlogits.copy()
        _gpu.multiply(Host(), spec.to_json(), dlogits, tokens, of.kept, np.float32(g))
        assert np.array_equal(before, dlogits) is not is_new, g
        np.testing.assert_allclose(dlogits, computed(problem, g=g)["dlogits"], rtol=3e-6, atol=0)


def test_cotangents_of_logp_and_entropy_make_dlogits_anew(fake: Fake) -> None:  # noqa: F811
    problem = one()
    sent: dict[str, Any] = {"logp": np.linspace(-1, 2, 15).reshape(3, 5), "entropy": np.linspace(2, -1, 15).reshape(3, 5).astype(np.float32)}
    for only in ({"logp": sent["logp"], "entropy": None}, {"logp": None, "entropy": sent["entropy"]}, sent):
        apart, made = computed(problem, **only), computed(problem, **only, one_pass=True)
        np.testing.assert_allclose(apart["dlogits"], made["dlogits"], rtol=3e-6, atol=1e-9)
        assert not np.allclose(apart["dlogits"], computed(problem)["dlogits"], rtol=1e-2), only.keys()


def test_a_first_sequence_without_tokens_takes_nothing_from_the_others(fake: Fake) -> None:  # noqa: F811
    """In one pass the factor of an entropy bonus is a number of the batch, which one sequence works out for all."""
    problem = one(assay.spec(kl=_KL, entropy_coef=0.5))
    mask = np.ones((3, 5), bool)
    mask[0] = False
    apart, made = computed(problem, mask=mask), computed(problem, mask=mask, one_pass=True)
    np.testing.assert_allclose(apart["dlogits"], made["dlogits"], rtol=1e-5, atol=1e-9)
    assert not apart["dlogits"][0].any() and apart["dlogits"][1:].any()


_FORWARD = ("grpo_count", "grpo_statistics", "grpo_losses", "grpo_sums")
_ONE_PASS = ("grpo_count", "grpo_tokens", "grpo_one_pass", "grpo_losses", "grpo_sums")


def test_kernels_are_enqueued_on_the_callers_stream_and_device(fake: Fake) -> None:  # noqa: F811
    problem = one()
    for device in (0, 1):
        computed(problem, arrays=Host(device))
    launches = [call.split(" grid ")[0] for call in fake.launches]
    names = (*_FORWARD, "grpo_dlogits")
    assert launches == [f"cuLaunchKernelEx {name} device {d} stream {STREAM}" for d in (0, 1) for name in names]
    calls = {call.split()[0] for call in fake.calls}
    assert not calls.intersection({"cuEventSynchronize", "cuEventRecord", "cuMemAlloc_v2", "cuMemcpyHtoD_v2"}), calls
    computed(problem)
    assert sum(call.startswith("cuModuleLoadDataEx") for call in fake.calls) <= 10, "a kernel is assembled once"


class Counted(Host):
    """NumPy's arrays, counting what would be operations of a device: all that makes or changes an array."""

    def __init__(self, capturing: bool = False) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.is_capturing = capturing

    def full(self, shape: Any, value: float, dtype: str) -> Any:
        self.operations.append("full")
        return super().full(shape, value, dtype)

    def empty(self, shape: Any, dtype: str) -> Any:
        return Host.full(self, shape, 77, dtype)

    def ends(self, count: int, length: int) -> Any:
        self.operations.append("ends")
        return super().ends(count, length)

    def constant(self, numbers: Any, dtype: str, name: str = "") -> Any:
        if (dtype, name or numbers) not in self._CONSTANTS:
            self.operations.append("constant")
        return super().constant(numbers, dtype, name)

    def cast(self, array: Any, dtype: str) -> Any:
        array = np.asarray(array)
        if self.dtype(array) == dtype:
            return array
        self.operations.append(f"cast to {dtype}")
        return super().cast(array, dtype)

    def upload(self, array: Any) -> Any:
        self.operations.append("upload")
        return super().upload(array)

    def download(self, array: Any) -> Any:
        self.operations.append("download")
        return super().download(array)


_KINDS = [
    ({"kl": _KL}, 3),
    ({"kl": _KL, "entropy_coef": 0.01, "ratio": {"level": "sequence"}}, 3),
    ({"kl": _KL, "temperature": "given"}, 4),
    ({"rejection": [{"estimator": "k1", "level": "token", "max": 2.0}]}, 25),
]


@pytest.mark.parametrize(("fields", "most"), _KINDS, ids=["token", "sequence", "tempered", "settled"])
def test_a_step_takes_a_handful_of_operations_beside_its_kernels(fake: Fake, fields: dict[str, Any], most: int) -> None:  # noqa: F811
    """Forward and backward, after a first step; logits are read twice and dlogits written once, or each once."""
    problem = one(assay.spec(**fields), "bf16")
    routes = [False, True] if "ratio" not in fields else [False]
    for one_pass in routes:
        computed(problem, one_pass=one_pass)
        fake.set("devices=3,capability=9.0/8.0/7.5")
        counted = Counted()
        computed(problem, arrays=counted, one_pass=one_pass)
        assert len(counted.operations) <= most, counted.operations
        names = [call.split()[1] for call in fake.launches]
        assert names == [*(_ONE_PASS if one_pass else _FORWARD), "grpo_dlogits"]
    assert counted.operations, "masks are cast"


def test_a_step_in_a_graphs_capture_needs_one_before_it(fake: Fake) -> None:  # noqa: F811
    """Nothing is copied from or to the host, so that what is enqueued can run again; what cannot be captured is refused at once."""
    problem = one(assay.spec(kl=_KL, ratio={"level": "sequence"}))
    computed(problem)
    fake.set("devices=3,capability=9.0/8.0/7.5")
    capturing = Counted(capturing=True)
    computed(problem, arrays=capturing)
    assert not {"constant", "upload", "download"}.intersection(capturing.operations), capturing.operations
    assert [call.split()[1] for call in fake.launches] == [*_FORWARD, "grpo_dlogits"]
    fake.set("devices=3,capability=9.0/8.0/7.5")
    rejects = one(assay.spec(rejection=[{"estimator": "k1", "level": "token", "max": 2.0}]))
    with pytest.raises(assay.ProblemError, match="`spec`: got what the host works out from the batch, in the capture of a CUDA graph"):
        computed(rejects, arrays=Counted(capturing=True))
    packed = problem.pack()
    ids = np.repeat(np.arange(1, 4, dtype=np.int64), np.diff(packed.numpy().cu_seqlens))[None]
    with pytest.raises(assay.ProblemError, match="`segment_ids`: got what the host works out .* expected `cu_seqlens`"):
        computed(packed, arrays=Counted(capturing=True), cu_seqlens=None, segment_ids=ids)
    assert not fake.launches


def test_sequences_may_lie_apart_but_not_their_rows(fake: Fake) -> None:  # noqa: F811
    problem = one(shape="3x5x256")
    logits = problem.numpy().logits
    room = aligned(np.full((3, 7, 256), 7.0, np.float32))
    room[:, 1:6] = logits
    spec, tokens = problem.spec.to_json(), given(problem)
    of = _gpu.loss(Host(), spec, room[:, 1:6], tokens, None)
    _gpu.gradient(Host(), spec, room[:, 1:6], room[:, 1:6], tokens, of.kept, (np.float32(1), None, None))
    named = {name: getattr(of, name) for name in ("loss", "logp", "entropy", "token_loss")}
    judged(problem, {**named, "dlogits": np.ascontiguousarray(room[:, 1:6])})
    assert (room[:, [0, 6]] == 7).all()

    def refused(logits: Any) -> str:
        with pytest.raises(assay.AssayError) as error:
            _gpu.loss(Host(), spec, logits, tokens, None)
        return str(error.value)

    assert "`logits`: got rows of 256 that begin 260 elements apart" in refused(np.zeros((3, 5, 260), np.float32)[..., :256])
    assert "`logits`: got rows with a stride of 5" in refused(np.zeros((3, 256, 5), np.float32).transpose(0, 2, 1))
    late = aligned(logits, late=4)
    assert "array logits: it begins at 0x" in refused(late) and "a multiple of 16" in refused(late)
    # Rows that are no whole blocks may begin at any element: so do those of a sequence of a longer one.
    odd = one(shape="3x5x65")
    room = aligned(np.full((3, 6, 65), 7.0, np.float32))
    room[:, :-1] = odd.numpy().logits
    spec, tokens = odd.spec.to_json(), given(odd)
    of = _gpu.loss(Host(), spec, room[:, :-1], tokens, None)
    _gpu.gradient(Host(), spec, room[:, :-1], room[:, :-1], tokens, of.kept, (np.float32(1), None, None))
    named = {name: getattr(of, name) for name in ("loss", "logp", "entropy", "token_loss")}
    judged(odd, {**named, "dlogits": np.ascontiguousarray(room[:, :-1])})
    assert (room[:, -1] == 7).all()
    assert refused(logits.astype(np.float64)) == "`logits`: got dtype f64, expected f32, bf16 or f16"


def test_a_token_that_is_none_is_nan_and_nothing_else_is(fake: Fake) -> None:  # noqa: F811
    problem = one(assay.spec(kl=_KL, temperature="given"))
    mask, temperature = np.ones((3, 5), np.int64), np.linspace(0.6, 1.8, 15).reshape(3, 5)
    whole = computed(problem, mask=mask, temperature=temperature)
    assert np.isfinite(whole["loss"])
    ids, twice = np.array(problem.numpy().ids), mask.copy()
    ids[1, 2], twice[1, 2] = 257, 2
    none = np.where(np.arange(15).reshape(3, 5) == 7, -0.5, temperature)
    for changed in ({"ids": ids}, {"mask": twice}, {"temperature": none}):
        given: dict[str, Any] = {"mask": mask, "temperature": temperature, **changed}
        outputs = computed(problem, **given)
        assert np.isnan(outputs["loss"]) and np.isnan(outputs["logp"][1, 2]) and np.isnan(outputs["dlogits"][1, 2]).all()
        others = np.arange(15).reshape(3, 5) != 7
        assert np.array_equal(outputs["dlogits"][others], whole["dlogits"][others])
    packed = problem.pack()
    ends = np.array(packed.numpy().cu_seqlens)
    for wrong in ([1, *ends[1:]], [*ends[:-1], ends[-1] + 1], [0, ends[2], ends[1], ends[3]]):
        assert np.isnan(computed(packed, cu_seqlens=np.array(wrong))["loss"])


def test_what_does_not_fit_is_refused_by_name(fake: Fake) -> None:  # noqa: F811
    problem = one()

    def refused(problem: assay.Problem = problem, device: int = 0, **changed: Any) -> str:
        with pytest.raises(assay.AssayError) as error:
            computed(problem, arrays=Host(device), **changed)
        return str(error.value)

    assert refused(old_logp=None) == "`old_logp`: not given, expected shape [3, 5]: the spec reads it"
    assert refused(ids=np.zeros((3, 5), np.float32)) == "`ids`: got dtype f32, expected i64 or i32"
    assert refused(advantages=np.zeros(4, np.float32)).startswith("`advantages`: got shape [4], expected [3] ([B] of the logits")
    assert refused(mask=np.ones((3, 4), bool)) == "`mask`: got shape [3, 4], expected [3, 5] ([B,T] of the logits)"
    assert refused(one(assay.spec(top_entropy={"fraction": 0.2}))).startswith("`top_entropy`: got")
    assert refused(one(assay.spec(logits={"bias": True})), bias=None).startswith("`bias`: not given, expected shape [257]")
    given = one(assay.spec(temperature="given"))
    expected = "`temperature`: not given, expected shape [3, 5] because the spec has `temperature: given`"
    assert refused(given, temperature=None) == expected
    assert refused(given, temperature=np.ones(4)) == "`temperature`: got shape [4], expected [3, 5] or [3, 1]"
    rejects = one(assay.spec(rejection=[{"estimator": "k1", "level": "token", "max": 2.0}]))
    assert refused(rejects, mask=np.full((3, 5), 0.5)) == "`mask[0,0]`: got 0.5, expected 0 or 1"
    assert "it has no device 7; expected one of 0 to 2" in refused(device=7)
    assert "NVIDIA Fake: it is of sm_75, gpu-two-pass needs sm_80 and up" in refused(device=2)


_CALLS = ("cuCtxPushCurrent_v2", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute", "cuLaunchKernelEx")


@pytest.mark.parametrize("call", _CALLS)
def test_a_driver_that_fails_is_quoted_and_loses_nothing(fake: Fake, call: str) -> None:  # noqa: F811
    # A vocabulary of its own, whose kernels nobody has loaded.
    problem = one(shape=f"1x2x{70 + _CALLS.index(call)}")
    # Of a kernel six figures are asked, of which only the first must be known.
    for place in (1, 7 if call == "cuFuncGetAttribute" else 2):
        fake.set(f"devices=3,capability=9.0/8.0/7.5,fail={call}:{place}")
        with pytest.raises(assay.AssayError, match="CUDA_ERROR_UNKNOWN"):
            computed(problem)
        held = [fake.calls.count(f"cuCtx{name}") for name in ("PushCurrent_v2 +current", "PopCurrent_v2 -current")]
        assert held[0] == held[1], fake.calls
        made, freed = ([line.split(sign)[1] for line in fake.calls if f" {sign}module" in line] for sign in "+-")
        assert len(made) - len(freed) <= int(call == "cuLaunchKernelEx" or place > 1), fake.calls
    fake.set("devices=3,capability=9.0/8.0/7.5")
    judged(problem, computed(problem))


def test_without_a_driver_it_says_so(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("ASSAY_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(assay.AssayError, match="CUDA driver /nowhere/libcuda.so.1: cannot be loaded"):
        computed(one())
