"""The loss on a GPU without one: kernels run by the interpreter behind a driver, around NumPy's arithmetic, before the judge."""

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

#: Of masked garbage, in NumPy's arithmetic.
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


#: What is decided over more than a row, or where there is no token.
_REFUSED = {
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
    """Each on a batch of its own, one of three padded, masked and filled with garbage; some packed, some in place."""
    refused, passed = {}, 0
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
    print(f"{passed} passed; refused: {refused}")
    assert passed >= 176 and refused == _REFUSED, (passed, refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"logits": {"softcap": 20.0, "scale": 0.7}, "temperature": "given"},
        {"logits": {"scale": -1.3}, "entropy_coef": 0.02},
        {"logits": {"bias": True}, "support": {"vocab": 250, "excluded_ids": [0, 3, 999], "keep_sampled": True}},
        {"temperature": 0.7, "temperature_divides": "logp", "entropy_coef": 0.01},
        {"temperature": "given", "ratio": {"level": "sequence"}},
    ],
    ids=["softcap", "flipped", "columns", "logp", "tempered"],
)
def test_what_a_spec_does_to_logits_is_done(fake: Fake, fields: dict[str, Any]) -> None:  # noqa: F811
    for dtype in ("f32", "f16"):
        problem = one(assay.spec(kl=_KL, **fields), dtype)
        judged(problem, computed(problem))


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


def test_kernels_are_enqueued_on_the_callers_stream_and_device(fake: Fake) -> None:  # noqa: F811
    problem = one()
    for device in (0, 1):
        computed(problem, arrays=Host(device))
    launches = [call.split(" grid ")[0] for call in fake.launches]
    names = ("grpo_statistics", "grpo_dlogits")
    assert launches == [f"cuLaunchKernelEx {name} device {d} stream {STREAM}" for d in (0, 1) for name in names]
    calls = {call.split()[0] for call in fake.calls}
    assert not calls.intersection({"cuEventSynchronize", "cuEventRecord", "cuMemAlloc_v2", "cuMemcpyHtoD_v2"}), calls
    computed(problem)
    assert sum(call.startswith("cuModuleLoadDataEx") for call in fake.calls) <= 4, "a kernel is assembled once"


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
