from __future__ import annotations

import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import assay


def test_a_projects_options_are_read_as_it_reads_them() -> None:
    spec = assay.spec("trl", beta=0.04, epsilon_high=0.28)
    fields = spec.to_dict()
    assert fields["kl"]["beta"] == 0.04
    assert fields["objective"]["ppo_clip"]["epsilon_high"] == 0.28
    assert "0.04·kl" in spec.describe()
    assert assay.spec("verl", policy_loss={"loss_mode": "gspo"}) != assay.spec("verl")
    assert assay.spec("trl", function="GMPOTrainer") != assay.spec("trl")
    assert assay.spec("trl", batch={"old_logps": False}) != assay.spec("trl")


def test_a_spec_is_equal_to_what_is_written_of_it(tmp_path: Path) -> None:
    spec = assay.spec("liger", loss_type="grpo")
    for name in ("spec.yaml", "spec.yml"):
        path = tmp_path / name
        path.write_text(spec.yaml)
        assert assay.spec(path) == spec
        assert assay.spec(str(path)) == spec
    path = tmp_path / "spec.json"
    path.write_text(spec.to_json())
    assert assay.spec(path) == spec
    assert assay.spec(**spec.to_dict()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert assay.spec(spec) == spec


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: assay.spec("trl", bta=0.1), "is `beta` meant?"),
        (lambda: assay.spec("trll"), "is `trl` meant?"),
        (lambda: assay.spec(temprature=2.0), "is `temperature` meant?"),
        (lambda: assay.spec(temperature=-1.0), "temperature"),
        (lambda: assay.spec("trl", beta=float("nan")), "expected numbers"),
        (lambda: assay.spec("trl", beta="much"), "expected a number"),
        (lambda: assay.spec("nowhere.yaml"), "nowhere.yaml: cannot read"),
        (lambda: assay.spec(assay.spec("trl"), beta=0.1), "expected options only with a project's name"),
        (lambda: assay.spec(function="GRPOTrainer"), "expected a project's name"),
        (lambda: assay.spec("trl", batch={"old_logp": True}), "unknown field `old_logp`"),
    ],
)
def test_what_is_wrong_is_named(given: object, said: str) -> None:
    with pytest.raises(assay.SpecError) as error:
        given()  # type: ignore[operator]
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"loss_type": "dapo"}, ("ppo_clip", "token", "none", False)),
        ({"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}, ("ppo_clip", "token", "one", True)),
        ({"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True}, ("ppo_clip", "token", "ratio", True)),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, ("ppo_clip", "sequence", "none", True)),
        ({"loss_type": "cispo"}, ("cispo", "token", "none", False)),
        ({"loss_type": "sapo"}, ("sapo", "token", "none", True)),
    ],
)
def test_the_panels_kernels_read_trls_losses(options: dict[str, Any], form: tuple[Any, ...]) -> None:
    protocol = Path(__file__).parents[2] / "tests" / "panel" / "protocol.py"
    read = runpy.run_path(str(protocol))["read_spec"]
    assert read(assay.spec("trl", **options).to_dict())[0] == form


def test_what_is_given_for_a_spec_or_an_option_is_named() -> None:
    with pytest.raises(assay.SpecError, match=r"`spec`: got a dict, .* assay.spec\(\*\*{'beta': …}\)"):
        assay.spec({"beta": 0.04})  # type: ignore[arg-type]
    with pytest.raises(assay.SpecError, match="`spec`: got int, expected a project's name"):
        assay.check(lambda problem: {}, 3)  # type: ignore[arg-type]
    for campaign in (assay.check, assay.check_logp, assay.check_loss):
        if campaign is not assay.check:
            pytest.importorskip("torch", reason="PyTorch is not installed")
        with pytest.raises(assay.SpecError, match="`case`: got an option that neither .* is `cases` meant"):
            campaign(lambda problem: {}, case=3)
    with pytest.raises(assay.SpecError, match="`bta`"):
        assay.check(lambda problem: {}, bta=0.1)


@pytest.mark.parametrize("project", [("trl", {"use_vllm": True}), ("openrlhf", {"is_correction_level": "token"})])
def test_missing_log_probabilities_of_the_sampler_name_the_batch(project: tuple[str, dict[str, Any]]) -> None:
    name, options = project
    with pytest.raises(assay.SpecError, match='batch={"sampling_logps": True} says that the batch has those of the sampler'):
        assay.spec(name, **options)
    with pytest.raises(assay.SpecError) as error:
        assay.spec("mllm-jax", batch={"old_logps": False})
    assert "sampling_logps" not in str(error.value)


def test_a_framework_or_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(assay.AssayError, match="framework: got jax, which is not installed here"):
        problem.jax()
    with pytest.raises(assay.AssayError, match="framework: got jax, which is not installed here"):
        assay.check_logp(lambda logits, ids: logits, framework="jax")
    monkeypatch.undo()
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        with pytest.raises(assay.AssayError, match="device: got 'cuda', expected 'cpu': PyTorch .* has no GPU here"):
            problem.torch("cuda")
        with pytest.raises(assay.AssayError, match="device: got 'cuda'"):
            assay.check_loss(lambda arrays: arrays, device="cuda")
    with pytest.raises(assay.AssayError, match="device: got 'cdua', expected one of PyTorch's"):
        problem.torch("cdua")
