"""`assay.torch` on a GPU without one: PyTorch's tensors on the CPU stand for those of a device behind a driver without any."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import assay
from assay import _gpu, _native

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")
import assay.torch  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # noqa: E402
from on_fake_gpu import STREAM, Fake, fake  # noqa: E402, F401
from test_torch_op import given, on_head, on_logits, one  # noqa: E402

_ATEN = torch.library.Library("aten", "IMPL")


@torch.library.impl(_ATEN, "addmm.dtype_out", "CPU")  # type: ignore[untyped-decorator]
def of_f32_sums(added: Any, a: Any, b: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
    """PyTorch's product of 16-bit matrices in f32, which it has on GPUs alone."""
    assert out_dtype == out.dtype == torch.float32
    return torch.addmm(added, a.float(), b.float(), beta=beta, alpha=alpha, out=out)


@pytest.fixture(autouse=True)
def on_gpu(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:  # noqa: F811
    monkeypatch.setattr(assay.torch, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(assay.torch._Tensors, "place", property(lambda self: (0, STREAM)))
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", False)
    return fake


@pytest.mark.parametrize("inplace", [False, True])
def test_a_campaign_passes(inplace: bool) -> None:
    trl = assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.01)
    spec = assay.spec(**trl.to_dict() | {"temperature": "given"})
    for problem in assay.problems(spec, 12, 7, dtypes=("f32", "bf16", "f16"), shapes=["2x3x65", "3x4x96"]):
        for laid_out in (problem, problem.pack()):
            verdicts = laid_out.check(on_logits(laid_out, inplace=inplace), grade="exact")
            assert verdicts, verdicts


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_campaign_of_heads_passes(
    level: str, tmp_path: pathlib.Path, on_gpu: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of five tokens, the last of fewer."""
    trl = assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level=level, entropy_coef=0.01)
    logits = {"scale": 0.8, "softcap": 20.0, "bias": True} if level == "token" else {}
    spec = assay.spec(**trl.to_dict() | {"temperature": "given", "logits": logits})
    for problem in assay.problems(spec, 9, 7, dtypes=("f32", "bf16", "f16"), shapes=["2x3x65", "3x4x96"], lm_head=True):
        for laid_out in (problem, problem.pack()):
            verdicts = laid_out.check(on_head(laid_out), grade="exact")
            assert verdicts, verdicts
    # A head [H,V], logits that are rounded, and anything where the mask hides it.
    file, loss = tmp_path / "problem.safetensors", tmp_path / "loss.yaml"
    loss.write_text(spec.yaml)
    asked = f"--shape 2x6x32x65 --dtype bf16 --layout hv --masked-garbage --spec {loss} -o {file}"
    assert _native.run(["assay", "generate", "-q", *asked.split()]) == 0
    on_gpu.set("devices=3,capability=9.0/8.0/7.5")
    monkeypatch.setattr(_gpu, "_CHUNK_BYTES", 5 * 65 * 2)
    problem = assay.load(file)
    verdicts = problem.check(on_head(problem, rounds_logits=True, chunk=0), grade="exact")
    assert verdicts, verdicts
    launched = [call.split()[1] for call in on_gpu.launches]
    assert launched == ["grpo_count", *3 * ["grpo_statistics"], "grpo_losses", "grpo_sums", *3 * ["grpo_dlogits"]]


def test_a_gradient_of_a_head_alone_has_the_bits_of_both(on_gpu: Fake) -> None:
    problem = next(iter(assay.problems("trl", 1, 7, dtypes=("bf16",), shapes=["3x4x96"], lm_head=True)))
    both = on_head(problem)
    for frozen, other in (("hidden", "dlm_head"), ("lm_head", "dhidden")):
        arrays = {name: getattr(problem.torch(), name).clone().requires_grad_(name != frozen) for name in ("hidden", "lm_head")}
        laid = arrays["lm_head"].T.contiguous() if problem.layout == "hv" else arrays["lm_head"]
        given_arrays = {**given(problem), "hidden": arrays["hidden"], "lm_head": laid, "chunk": 5}
        assay.torch.grpo_loss(None, **given_arrays, spec=problem.spec).loss.backward()
        assert arrays[frozen].grad is None
        assert torch.equal(arrays["hidden" if frozen == "lm_head" else "lm_head"].grad, both[other])


@pytest.mark.parametrize("inplace", [False, True])
def test_flat_tokens_are_one_row(inplace: bool) -> None:
    problem = one().pack()
    arguments, logits = given(problem), problem.torch().logits
    in_rows = ("ids", "mask", "old_logp", "ref_logp")
    flat = {name: array[0] if name in in_rows and array is not None else array for name, array in arguments.items()}

    def gradient(logits: Any, arguments: Any) -> Any:
        logits = logits.clone().requires_grad_()
        result = assay.torch.grpo_loss(logits * 1.0 if inplace else logits, **arguments, spec=problem.spec, inplace=inplace)
        (result.loss + (0 if inplace else result.logp.sum())).backward()
        return result, logits.grad

    (row, of_row), (tokens, of_tokens) = gradient(logits, arguments), gradient(logits[0], flat)
    assert torch.equal(row.loss, tokens.loss) and torch.equal(row.entropy[0], tokens.entropy)
    assert torch.equal(of_row[0], of_tokens)


def test_what_is_settled_and_what_is_sent_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = assay.spec(
        rollout={"source": "logp", "level": "token", "outside": "truncate", "max": 2.0},
        kl={"beta": 0.04, "estimator": "k3"},
    )
    problem = one("f32", spec)
    weights = torch.linspace(-1, 2, 15).reshape(3, 5)

    def gradient() -> Any:
        logits = problem.torch().logits.clone().requires_grad_()
        result = assay.torch.grpo_loss(logits, **given(problem), spec=spec)
        (3 * result.loss + (result.logp * weights).sum() + (result.entropy * weights).sum()).backward()
        assert logits.grad is not None
        return result, logits.grad

    on_device, of_device = gradient()
    monkeypatch.setattr(assay.torch, "_on_gpu", lambda tensor: False)
    on_host, of_host = gradient()
    torch.testing.assert_close(on_device.loss, on_host.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.stack([*on_device.metrics.values()]), torch.stack([*on_host.metrics.values()]), rtol=1e-6, atol=0)
    torch.testing.assert_close(of_device, of_host, rtol=3e-6, atol=1e-9)


def test_a_normalizer_divides_the_loss() -> None:
    problem = one()
    logits, arguments = problem.torch().logits, given(problem)

    def loss(normalizer: Any) -> float:
        return float(assay.torch.grpo_loss(logits, **arguments, spec="trl", beta=0.04, normalizer=normalizer).loss)

    assert loss(2.0) == loss(torch.tensor(2.0)) == pytest.approx(3 * loss(6.0), rel=1e-6)
    with pytest.raises(assay.ProblemError, match="`normalizer`: got one, expected none, or a spec whose `reduction`"):
        assay.torch.grpo_loss(logits, **arguments, spec="trl", loss_type="grpo", normalizer=5)


@pytest.mark.parametrize("reduction", ["token_mean", {"normalizer": 1.0}])
def test_a_normalizer_leaves_a_kl_penalty_that_has_a_reduction(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kl = {"beta": 0.04, "estimator": "k3", "averaging": {"reduction": reduction}}
    problem = one("f32", assay.spec(reduction={"normalizer": 3.0}, kl=kl))

    def gradient() -> Any:
        logits = problem.torch().logits.clone().requires_grad_()
        result = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec, normalizer=7.0)
        result.loss.backward()
        assert logits.grad is not None
        return result.loss.item(), logits.grad

    on_device, of_device = gradient()
    monkeypatch.setattr(assay.torch, "_on_gpu", lambda tensor: False)
    on_host, of_host = gradient()
    assert on_device == pytest.approx(on_host, rel=1e-6)
    assert (of_device - of_host).norm() < 1e-6 * of_host.norm()


@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_it_is_traced(lm_head: bool) -> None:
    problem = one()
    arguments = given(problem)
    logits = problem.torch().logits.clone().requires_grad_()

    def step(logits: Any, ids: Any, advantages: Any, **rest: Any) -> Any:
        of = {"logits": None, "hidden": logits * 1.5, "lm_head": torch.eye(257)} if lm_head else {"logits": logits * 1.5}
        return assay.torch.grpo_loss(ids=ids, advantages=advantages, **of, **rest, spec=problem.spec).loss / 7

    eager = step(logits, **arguments)
    eager.backward()
    expected, logits.grad = logits.grad, None
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(logits, **arguments)
    loss.backward()
    # Traced, the forward pass makes no dlogits: rows are summed in another order.
    torch.testing.assert_close(loss, eager, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad, expected, rtol=3e-6, atol=1e-10)


@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_logp_and_entropy_are_exact(lm_head: bool, on_gpu: Fake) -> None:
    report = assay.check_logp(
        lambda *of: assay.torch.logp_and_entropy(
            None if lm_head else of[0],
            of[-1],
            **{"hidden": of[0], "lm_head": of[1], "chunk": 4} if lm_head else {},
            temperature=0.7,
            softcap=20.0,
        ),
        entropy=True,
        lm_head=lm_head,
        temperature=0.7,
        logits={"softcap": 20.0},
        cases=4 if lm_head else 8,
        wide=0,
        shapes="few",
        power=False,
        repro_dir=None,
        grade="exact",
    )
    assert report, report
    arrays = one("bf16").torch()
    on_gpu.set("devices=3,capability=9.0/8.0/7.5")
    with torch.no_grad():
        if lm_head:
            head = torch.eye(257, dtype=torch.bfloat16)
            assay.torch.logp_and_entropy(None, arrays.ids, arrays.mask, hidden=arrays.logits, lm_head=head)
        else:
            assay.torch.logp_and_entropy(arrays.logits, arrays.ids, arrays.mask)
    assert [call.split()[1] for call in on_gpu.launches] == ["grpo_count", "grpo_statistics", "grpo_losses", "grpo_sums"]


def test_a_head_that_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**given(one()), "spec": "trl", "loss_type": "grpo", "beta": 0.04}

    def refused(**changed: Any) -> str:
        fits = {"hidden": torch.zeros(3, 5, 8), "lm_head": torch.zeros(257, 8)}
        with pytest.raises(assay.ProblemError) as error:
            assay.torch.grpo_loss(None, **arguments, **{**fits, **changed})
        return str(error.value)

    head = torch.zeros(257, 8)
    wrong: list[dict[str, Any]] = [
        {"lm_head": torch.zeros(257, 4)},
        {"lm_head": head.bfloat16()},
        {"lm_head": head.int()},
        {"lm_head": head[0]},
        {"hidden": torch.zeros(3, 5, 0), "lm_head": torch.zeros(257, 0)},
        {"lm_head": head[:0]},
        {"lm_head": head.to("meta")},
        {"chunk": -1},
        {"inplace": True},
        {"hidden": torch.zeros(3, 5, 8).to("meta")},
    ]
    on_device = [refused(**changed) for changed in wrong]
    turned = refused(lm_head=torch.zeros(8, 257).T)
    assert turned == "`lm_head`: got a strided array, expected dense row-major (take `lm_head.contiguous()`)"
    monkeypatch.setattr(assay.torch, "_on_gpu", lambda tensor: False)
    assert on_device == [refused(**changed) for changed in wrong]
    assert refused(lm_head=torch.zeros(8, 257).T).startswith("`lm_head`: got a strided array, expected dense row-major")


def test_a_fake_tensor_of_a_gpu_has_results_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with torch._subclasses.FakeTensorMode():
        logits = torch.empty(2, 3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ids, advantages = torch.zeros(2, 3, device="cuda", dtype=torch.int64), torch.zeros(2, device="cuda")
        result = assay.torch.grpo_loss(logits, ids, advantages, spec="trl", loss_type="grpo")
        assert result.loss.device == result.logp.device == result.metrics["ratio_mean"].device == logits.device
        for field, arrays in {"ids": (ids.cpu(), advantages), "advantages": (ids, advantages.to("cuda:1"))}.items():
            with pytest.raises(assay.ProblemError, match=f"`{field}`: got a tensor on c.*, expected one on cuda:0"):
                assay.torch.grpo_loss(logits, *arrays, spec="trl", loss_type="grpo")
        of_head = assay.torch.grpo_loss(None, ids, advantages, hidden=logits, lm_head=logits[0], spec="trl", loss_type="grpo")
        assert of_head.loss.device == of_head.logp.device == logits.device
        with pytest.raises(assay.ProblemError, match="`ids`: got a tensor on cpu, expected one on cuda:0, as `hidden` is"):
            assay.torch.grpo_loss(None, ids.cpu(), advantages, hidden=logits, lm_head=logits[0], spec="trl", loss_type="grpo")
        with pytest.raises(assay.ProblemError, match="`hidden`: got a tensor on cuda:0, expected one on the CPU: `gather_logp`"):
            assay.torch.gather_logp(None, ids.cpu()[..., None], hidden=logits, lm_head=logits[0])


#: Of these nothing is launched: they make a tensor of memory, or a view.
_NOTHING_LAUNCHED = ("empty", "view", "detach", "alias", "as_strided", "slice", "select", "unsqueeze", "expand", "t.", "transpose", "reshape", "unbind")


class Launches(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Counts the operations that PyTorch would launch on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith((*_NOTHING_LAUNCHED, "assay.")):
            self.names.append(name)
        return func(*args, **kwargs or {})


_LOSSES: dict[str, tuple[dict[str, Any], int]] = {
    "trl": ({"spec": "trl", "beta": 0.04}, 25),
    "tempered": ({"spec": "verl", "temperature": "given"}, 25),
    "sequence": ({"spec": "trl", "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04}, 120),
    "rejecting": ({"rejection": [{"estimator": "k1", "level": "token", "max": 2.0}], "kl": {"beta": 0.04, "estimator": "k3"}}, 120),
}


@pytest.mark.parametrize("loss", [*_LOSSES])
def test_a_step_launches_little_beside_its_kernels(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: what counts as an operation of the device, after a first step of that loss."""
    launches = Launches()

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            # Within an operation that is registered with PyTorch no mode is on.
            if _get_current_dispatch_mode() is not None:
                return function(*arguments, **named)
            with launches:
                return function(*arguments, **named)

        return call

    for name in ("loss", "gradient"):
        monkeypatch.setattr(_gpu, name, counted(getattr(_gpu, name)))
    options, most = dict(_LOSSES[loss][0]), _LOSSES[loss][1]
    spec = assay.spec(options.pop("spec"), **options) if "spec" in options else assay.spec(**options)
    problem = one("bf16", spec)
    arguments, leaf = given(problem), problem.torch().logits.clone().requires_grad_()

    def step() -> list[str]:
        logits = leaf * 1.0
        launches.names.clear()
        with launches:
            result = assay.torch.grpo_loss(logits, **arguments, spec=spec)
            (gradient,) = torch.autograd.grad(result.loss, logits)
        assert torch.isfinite(gradient).all()
        return list(launches.names)

    step()
    names = step()
    print(f"{loss}: {len(names)} operations: {', '.join(names)}")
    assert 0 < len(names) <= most, names


def test_a_gradient_follows_the_loss_from_step_to_step(on_gpu: Fake) -> None:
    """Also with a graph that is kept, whose second gradient is of other cotangents; in place the loss has a gradient alone."""
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"}, scale=0.6)
    problem = one("f32", spec)
    leaf = problem.torch().logits.clone().requires_grad_()

    def steps(inplace: bool) -> Any:
        logits = leaf * 1.0
        return logits, assay.torch.grpo_loss(logits, **given(problem), spec=spec, inplace=inplace)

    for factor in (1.0, 1 / 7, 1 / 7, 3.0):
        logits, result = steps(False)
        (first,) = torch.autograd.grad(factor * result.loss, logits, retain_graph=True)
        on_gpu.set("devices=3,capability=9.0/8.0/7.5")
        kept = first.clone()
        first.zero_()
        (again,) = torch.autograd.grad(factor * result.loss, logits, retain_graph=True)
        torch.testing.assert_close(again, kept, rtol=3e-6, atol=1e-10)
        (both,) = torch.autograd.grad(factor * result.loss + result.logp.sum(), logits)
        assert not torch.allclose(both, kept, rtol=1e-2)
        logits, result = steps(True)
        (in_place,) = torch.autograd.grad(factor * result.loss, logits)
        torch.testing.assert_close(in_place, kept, rtol=3e-6, atol=1e-10)
        assert in_place.data_ptr() == logits.data_ptr()
    logits, result = steps(True)
    with pytest.raises(assay.ProblemError, match="`inplace`: got True for a gradient through `logp`, expected one through `loss` alone"):
        (result.loss + result.logp.sum()).backward()


@pytest.mark.parametrize("vocab", [65, 64])
def test_a_part_of_each_sequence_is_taken_as_it_lies(vocab: int) -> None:
    """`logits[:, :-1]`, whose rows begin at any element where they are no whole blocks."""
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"})
    problem = next(iter(assay.problems(spec, 1, seed=3, dtypes=("bf16",), shapes=[f"3x5x{vocab}"])))
    longer = torch.full((3, 6, vocab), 7.0, dtype=torch.bfloat16)
    longer[:, :-1] = problem.torch().logits
    leaf = longer.requires_grad_()
    result = assay.torch.grpo_loss(leaf[:, :-1], **given(problem), spec=spec)
    result.loss.backward()
    assert leaf.grad is not None and not leaf.grad[:, -1].any()
    names = ("loss", "logp", "entropy", "token_loss")
    verdicts = problem.check({**{name: getattr(result, name).detach() for name in names}, "dlogits": leaf.grad[:, :-1].contiguous()})
    assert verdicts, verdicts


def test_a_graphs_capture_before_a_first_step_is_refused(on_gpu: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = one("f32", assay.spec(kl={"beta": 0.043, "estimator": "k3"}))
    arguments, leaf = given(problem), problem.torch().logits.clone().requires_grad_()

    def step() -> None:
        assay.torch.grpo_loss(leaf * 1.0, **arguments, spec=problem.spec).loss.backward()

    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", True)
    on_gpu.set("devices=3,capability=9.0/8.0/7.5")
    with pytest.raises(assay.ProblemError, match="first time in the capture of a CUDA graph, expected one of which a step was made"):
        step()
    assert not on_gpu.launches
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", False)
    step()
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", True)
    step()


def test_numbers_of_many_shapes_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that a graph was captured with."""
    constants = assay.torch._Constants()
    monkeypatch.setattr(constants, "_MOST", 2)
    monkeypatch.setattr(assay.torch, "_CONSTANTS", constants)
    arrays = assay.torch._Tensors(torch.device("cpu"))
    first = arrays.constant((1.0, float("nan")), "f32")
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", True)
    assert arrays.constant((1.0, float("nan")), "f32") is first
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", False)
    second = arrays.constant((2.0,), "f32")
    for number in (3.0, 4.0):
        arrays.constant((number,), "f32")
    assert arrays.constant((1.0, float("nan")), "f32") is first and len(constants._kept) == 2
    assert arrays.constant((2.0,), "f32") is not second


@pytest.mark.parametrize("vocab", [64, 65, 67])
def test_an_expanded_tensor_has_a_gradient_of_each_sequence(vocab: int) -> None:
    """Also where rows begin within blocks of 16 bytes, which dlogits then do as the logits."""
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"})
    problem = next(iter(assay.problems(spec, 1, seed=3, dtypes=("bf16",), shapes=[f"3x5x{vocab}"])))
    leaf = problem.torch().logits[:1].clone().requires_grad_()
    gradients = []
    for logits in (leaf.expand(3, -1, -1), leaf.repeat(3, 1, 1)):
        result = assay.torch.grpo_loss(logits, **given(problem), spec=spec)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        gradients.append(gradient)
    assert torch.equal(*gradients) and gradients[0].any()


def test_a_checkpoint_has_the_gradient_of_its_second_run() -> None:
    """Two losses under cotangents that are never those of the last step: the first backward pass changes what is likely for the second."""
    problem = one("f32", assay.spec(kl={"beta": 0.041, "estimator": "k3"}))
    leaves = [(problem.torch().logits * by).requires_grad_() for by in (1.0, 0.5)]

    def loss(logits: Any) -> Any:
        return assay.torch.grpo_loss(logits * 1.0, **given(problem), spec=problem.spec).loss

    for factor in (0.25, 0.5, 3.0):
        with_checkpoint = [checkpoint(loss, leaf, use_reentrant=False) for leaf in leaves]
        found = torch.autograd.grad(factor * (with_checkpoint[0] + with_checkpoint[1]), leaves)
        for leaf, gradient in zip(leaves, found, strict=True):
            (alone,) = torch.autograd.grad(factor * loss(leaf), leaf)
            torch.testing.assert_close(gradient, alone, rtol=3e-6, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_place_nothing_is_lost_when_the_loss_grows(dtype: Any) -> None:
    """Ten million times from a step to the next, as a scale does that a scaler found too small."""
    problem = one("f32", assay.spec(kl={"beta": 0.042, "estimator": "k3"}))
    leaf = problem.torch().logits.to(dtype).requires_grad_()

    def gradient(factor: float, inplace: bool) -> Any:
        result = assay.torch.grpo_loss(leaf * 1.0, **given(problem), spec=problem.spec, inplace=inplace)
        return torch.autograd.grad(factor * result.loss, leaf)[0]

    expected = gradient(1.0, False)
    gradient(1e-7, True)
    torch.testing.assert_close(gradient(1.0, True), expected, rtol=2**-6, atol=2**-23)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_gradient_of_a_gradient_is_an_error(inplace: bool, level: str) -> None:
    spec = assay.spec("trl", loss_type="grpo", importance_sampling_level=level, beta=0.04)
    problem = one("f32", spec)
    leaf = problem.torch().logits.clone().requires_grad_()
    logits = leaf * 1.0
    loss = assay.torch.grpo_loss(logits, **given(problem), spec=spec, inplace=inplace).loss
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of its gradient|no autograd formula was registered"):
        torch.autograd.grad(loss.detach() + gradient.pow(2).sum(), leaf)


def test_a_normalizer_that_is_none_is_refused(on_gpu: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's numbers alone are f64 here."""
    monkeypatch.setattr(assay.torch, "_on_gpu", lambda tensor: tensor.dtype != torch.float64)
    problem = one()
    logits, arguments = problem.torch().logits, given(problem)

    def loss(normalizer: Any) -> Any:
        return assay.torch.grpo_loss(logits, **arguments, spec="trl", beta=0.04, normalizer=normalizer).loss

    assert torch.isfinite(loss(3))
    on_gpu.set("devices=3,capability=9.0/8.0/7.5")
    for number in (0, -3.0, float("nan"), float("inf")):
        expected = "the number of tokens that count, above 0" if not number > 0 else "a finite number > 0"
        with pytest.raises(assay.ProblemError, match=rf"`normalizer`: got {number:g}, expected {expected}"):
            loss(number)
    with pytest.raises(assay.ProblemError, match="`normalizer`: got a tensor on meta, expected one on cpu"):
        loss(torch.tensor(3.0, device="meta"))
    monkeypatch.setattr(assay.torch._Tensors, "is_capturing", True)
    with pytest.raises(assay.ProblemError, match="`normalizer`: got a number of the host's in the capture of a CUDA graph"):
        loss(3)
    assert not on_gpu.launches
    assert torch.isfinite(loss(torch.tensor(3.0)))


def test_flat_advantages_of_tokens_are_one_row() -> None:
    problem = one("f32", assay.spec(kl={"beta": 0.04, "estimator": "k3"}, advantages="token")).pack()
    arguments = given(problem)
    row = assay.torch.grpo_loss(problem.torch().logits, **arguments, spec=problem.spec)
    in_rows = ("ids", "mask", "old_logp", "ref_logp", "advantages")
    flat = {name: array[0] if name in in_rows and array is not None else array for name, array in arguments.items()}
    tokens = assay.torch.grpo_loss(problem.torch().logits[0], **flat, spec=problem.spec)
    assert torch.equal(row.loss, tokens.loss) and torch.equal(row.token_loss[0], tokens.token_loss)


def test_what_f32_and_i32_would_round_is_no_number() -> None:
    """Ends beyond 2³¹ that end in those of sequences, and a mask that is nearly 0."""
    problem = one("f32", assay.spec("trl", loss_type="grpo", beta=0.04)).pack()
    logits, arguments = problem.torch().logits, given(problem)

    def loss(**changed: Any) -> Any:
        return assay.torch.grpo_loss(logits, **{**arguments, **changed}, spec=problem.spec).loss

    ends = arguments["cu_seqlens"].to(torch.int64)
    assert torch.isfinite(loss(cu_seqlens=ends))
    mask = arguments["mask"].to(torch.float64)
    assert torch.isfinite(loss(mask=mask))
    assert torch.isnan(loss(cu_seqlens=ends + torch.tensor([0] + [2**32] * (len(ends) - 1))))
    mask[0, 0] = 1e-60
    assert torch.isnan(loss(mask=mask))


def test_a_fake_of_dlogits_lies_as_they_do() -> None:
    """`logits[:, 1:]`, which begins within a block."""
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"})
    problem = next(iter(assay.problems(spec, 1, seed=3, dtypes=("bf16",), shapes=["3x5x65"])))
    longer = torch.zeros((3, 6, 65), dtype=torch.bfloat16)
    longer[:, 1:] = problem.torch().logits
    arguments = given(problem)
    inputs = (*(arguments.get(name) for name in assay.torch._ARRAYS), None, problem.spec.to_json())
    *_, kept = assay.torch._loss(longer[:, 1:], *inputs)
    cotangent = torch.ones((3, 5))
    torch.library.opcheck(
        assay.torch._gradient, (None, cotangent, None, kept, longer[:, 1:], *inputs), test_utils=("test_faketensor",)
    )
