"""The bench of programs: what is right is timed, what is wrong or absent is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kernels
import pytest

import assay
from assay import _bench

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import assay.jax as assay_jax  # noqa: E402

pytest_plugins = ["pytester"]
OPTIONS: dict[str, Any] = {"shape": "1x8x1024", "framework": "jax", "seconds": 0.0, "memory": False, "progress": False}


def loss(x: Any) -> Any:
    logp = jnp.take_along_axis(jax.nn.log_softmax(x.logits.astype("float32")), x.ids[..., None], -1)[..., 0]
    ratio, advantages = jnp.exp(logp - x.old_logp), x.advantages[:, None]
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).sum() / x.mask.sum()


def half(x: Any) -> Any:
    return loss(x) / 2


def logp(logits: Any, ids: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)[..., 0]


def test_programs_take_turns_and_a_wrong_one_has_no_time() -> None:
    found = assay.bench(loss, "trl", against=[half, "jax", "xla"], **OPTIONS)
    assert found and list(found.median) == ["loss", "jax", "xla"]
    data = json.loads(found.to_json())
    wrong = next(program for program in data["programs"] if program["name"] == "half")
    assert (
        wrong["outcome"] == "wrong" and wrong["why_untimed"].startswith("loss, f32; expected -1.0") and "times" not in wrong
    )
    assert all(program["times"]["calls"] == 5 for program in data["programs"] if "times" in program)
    assert data["bound"]["name"] == "a copy of the logits" and data["bound"]["gb_per_s"] > 0
    text = repr(found)
    assert "wrong  half: " in text and "a copy of the logits" in text
    assert not any(line.startswith("half") for line in text.splitlines())


def test_a_wrong_kernel_fails_and_nothing_is_timed() -> None:
    found = assay.bench(half, "trl", against=["jax"], **OPTIONS)
    assert not found and found.median == {}
    assert "a copy" not in repr(found)
    with pytest.raises(assay.KernelFailure, match="loss"):
        found.raise_for_failure()


def test_log_probabilities_and_heads_are_timed_too() -> None:
    found = assay.bench(logp, "logp", entropy=False, against=["jax"], **OPTIONS)
    assert list(found.median) == ["logp", "jax"]
    # A scale of logits that the opponent would leave out.
    scaled = assay.bench(
        lambda *given: logp(2 * given[0], given[1]), "logp", entropy=False, logits={"scale": 2.0}, against=["xla"], **OPTIONS
    )
    assert scaled and "ignored  xla" in repr(scaled)

    def of_head(x: Any) -> Any:
        logits = jnp.einsum("bth,vh->btv", x.hidden, x.lm_head, precision="highest")
        x.logits = logits
        return loss(x)

    found = assay.bench(of_head, "trl", **{**OPTIONS, "shape": "1x8x16x1024"})
    assert found and json.loads(found.to_json())["bound"]["name"] == "the three products of the head"


def test_a_function_of_a_problem_is_timed_by_what_it_returns() -> None:
    found = assay.bench(kernels.honest, "trl", **{**OPTIONS, "framework": None})
    assert found and list(found.median) == ["honest"]
    found = assay.bench(kernels.too_large, "trl", **{**OPTIONS, "framework": None})
    assert not found


def test_an_answer_that_is_right_at_first_only_has_no_time() -> None:
    calls: list[int] = []

    def tires(problem: assay.Problem) -> dict[str, Any]:
        calls.append(1)
        outputs = kernels.honest(problem)
        return outputs if len(calls) < 6 else {name: 0 * array for name, array in outputs.items()}

    found = assay.bench(kernels.honest, "trl", against=[tires], **{**OPTIONS, "framework": None})
    assert list(found.median) == ["honest"] and "wrong  tires: " in repr(found)


def test_an_error_in_a_later_call_costs_others_nothing() -> None:
    calls: list[int] = []

    def stumbles(problem: assay.Problem) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("later")
        return kernels.honest(problem)

    found = assay.bench(kernels.honest, "trl", against=[stumbles], **{**OPTIONS, "framework": None})
    assert list(found.median) == ["honest"] and "failed  stumbles: RuntimeError: later" in repr(found)


def test_what_is_wrong_at_another_size_is_wrong() -> None:
    def of_small(x: Any) -> Any:
        return loss(x) * (2 if x.logits.shape[-1] > 1024 else 1)

    found = assay.bench(of_small, "trl", vocabularies=[2048], **OPTIONS)
    assert not found and "wrong  of_small: at 1x8x2048: loss" in repr(found)


def test_what_a_program_keeps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay import _memory

    if isinstance(_memory.meter_of(None, None), str):
        pytest.skip("ignored: this system sets no high-water mark back")
    kept: list[Any] = []

    def keeps(problem: assay.Problem) -> dict[str, Any]:
        if not kept:
            kept.append(bytearray(b"1") * (8 * 131072 * 4))
        return kernels.honest(problem)

    asked = {**OPTIONS, "framework": None, "shape": "1x8x131072", "against": [keeps], "memory": True}
    found = assay.bench(kernels.honest, "trl", **asked)
    memory = {each["name"]: each["memory"]["kept"] for each in json.loads(found.to_json())["programs"]}
    assert memory["honest"] == 0 and memory["keeps"] == pytest.approx(8 * 131072 * 4, rel=0.1)


def test_names_of_strangers_drive_neither_terminal_nor_markdown(tmp_path: Path) -> None:
    def named(x: Any) -> Any:
        return loss(x)

    named.__name__ = "a\x1b[2J\n|<b>\ud800"
    found = assay.bench(named, "trl", **OPTIONS)
    found.to_markdown(tmp_path / "bench.md")
    for text in (repr(found), (tmp_path / "bench.md").read_text()):
        assert "\x1b" not in text
    assert "<b>" not in (tmp_path / "bench.md").read_text()


def test_sizes_have_a_slope_and_a_picture(tmp_path: Path) -> None:
    found = assay.bench(loss, "trl", tokens=[16, 32], vocabularies=[2048], **OPTIONS)
    growths = json.loads(found.to_json())["growths"]
    assert [(growth["size"], growth["sizes"]) for growth in growths] == [("tokens", 3), ("vocabulary", 2)]
    assert "loss: time grows as tokens^" in repr(found)
    found.to_html(tmp_path / "bench.html")
    assert "median time by tokens" in (tmp_path / "bench.html").read_text()
    found.to_markdown(tmp_path / "bench.md")
    assert "| loss |" in (tmp_path / "bench.md").read_text()


def test_exponents_are_those_of_powers() -> None:
    points = [{"program": "a", "tokens": n, "vocabulary": 8, "median": 3e-6 * n**1.5} for n in (1, 2, 4, 8)]
    (growth,) = _bench._growths(points, [1, 8, 8])
    assert growth["exponent"] == pytest.approx(1.5) and growth["sizes"] == 4


def test_an_opponent_that_is_not_there_is_ignored_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    found = assay.bench(loss, "trl", against=["trl"], **OPTIONS)
    assert found and "ignored  trl: " in repr(found)
    assert "is not installed here" in repr(found)


def test_an_opponent_that_has_no_such_loss_is_ignored_by_name() -> None:
    def twice(x: Any) -> Any:
        return 2 * loss(x)

    found = assay.bench(twice, assay.spec(scale=2.0), against=["jax", "liger", "trl"], **OPTIONS)
    assert found, found
    assert "ignored  jax: the plain loss of opponents has no `scale: 2.0`" in repr(found)
    capped: dict[str, Any] = {"logits": {"softcap": 20.0}}

    def of_capped(x: Any) -> Any:
        x.logits = 20.0 * jnp.tanh(x.logits / 20.0)
        return loss(x)

    outcome = outcomes(assay.bench(of_capped, assay.spec(**capped), against=["jax", "xla", "liger", "trl"], **OPTIONS))
    assert outcome["of_capped"] == outcome["jax"] == "timed"
    assert all(outcome[name].startswith("ignored") for name in ("xla", "liger", "trl")), outcome


def test_what_is_too_slow_raises_or_needs_too_much_memory_is_said() -> None:
    found = assay.bench(loss, "trl", **{**OPTIONS, "call_seconds": 0.0})
    assert not found and "and 0 s are allowed" in repr(found)

    def raises(x: Any) -> Any:
        raise RuntimeError("no such path\n  in two lines")

    found = assay.bench(loss, "trl", against=[raises], **OPTIONS)
    assert found and "failed  raises: RuntimeError: no such path in two lines" in repr(found)

    def leaves(x: Any) -> Any:
        raise SystemExit(3)

    found = assay.bench(loss, "trl", against=[leaves], **OPTIONS)
    assert found and "failed  leaves: SystemExit: 3" in repr(found)

    def endless(x: Any) -> Any:
        raise MemoryError("cannot allocate memory for 8 TB")

    found = assay.bench(loss, "trl", against=[endless], **OPTIONS)
    assert "ignored  endless: MemoryError: " in repr(found)
    with pytest.raises(assay.ProblemError, match=r"`shape`: got 4096x4096x151936 in f32, whose calls take .* GB at least"):
        assay.bench(loss, "trl", **{**OPTIONS, "shape": "4096x4096x151936"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": "8x1024"}, "`shape`: got '8x1024', expected extents such as"),
        ({"shape": "0x8x1024"}, "`shape`: got '0x8x1024', expected extents such as"),
        ({"dtype": "f8"}, "`dtype`: got 'f8'"),
        ({"tokens": [0]}, r"tokens: got \[0\], expected a list of sizes"),
        ({"tokens": 8}, "tokens: got 8, expected a list of sizes"),
        ({"vocabularies": [10**12]}, "vocabularies: got"),
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"seed": -1}, "`seed`: got -1"),
        ({"grade": "fair"}, "grade: got 'fair'"),
        ({"against": ["eager", "eager"]}, "against: got 'eager' twice"),
        ({"against": ["fast"]}, "against: got 'fast', expected a function, or one of eager, "),
        ({"framework": "mxnet"}, "framework: got 'mxnet', expected 'torch', 'jax' or None"),
        ({"betta": 0.1}, "betta"),
    ],
)
def test_what_cannot_be_asked_is_an_error_that_says_so(options: dict[str, Any], said: str) -> None:
    with pytest.raises(assay.AssayError, match=said):
        assay.bench(loss, "trl", **{**OPTIONS, **options})


FILE = """
import jax, jax.numpy as jnp

def loss(x):
    logp = jnp.take_along_axis(jax.nn.log_softmax(x.logits), x.ids[..., None], -1)[..., 0]
    return -(logp * x.advantages[:, None]).sum() / x.mask.sum()

def half(x):
    return loss(x) / 2

OPTIONS = dict(framework="jax", shape="1x8x512", seconds=0.0, memory=False)

def test_right(assay_bench):
    import assay
    assert assay_bench(loss, assay.spec(objective="policy_gradient"), **OPTIONS).median["loss"] > 0

def test_wrong(assay_bench):
    import assay
    assay_bench(half, assay.spec(objective="policy_gradient"), **OPTIONS)
"""


def test_the_fixture_fails_what_is_wrong_and_prints_its_tables(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_speed=FILE)
    result = pytester.runpytest_subprocess("-p", "assay._pytest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*assay_bench in test_speed.py::test_right*", "a copy of the logits*"])
    result.stdout.fnmatch_lines(["*KernelFailure*"])


def outcomes(found: assay.ProgramBench) -> dict[str, str]:
    """What became of each program: "timed", or "wrong" or "ignored" with the reason."""
    programs = json.loads(found.to_json())["programs"]
    return {each["name"]: "timed" if each.get("times") else f"{each['outcome']}: {each['why_untimed']}" for each in programs}


@pytest.mark.parametrize(
    "options", [{}, {"kl": {"beta": 0.04, "estimator": "k3"}}, {"reduction": {"sequence_mean": {"rows": "all"}}}]
)
def test_every_opponent_of_jax_is_right(options: dict[str, Any]) -> None:
    def returns_what_assay_does(x: Any) -> Any:
        given = {name: getattr(x, name) for name in ("ids", "mask", "advantages", "old_logp", "ref_logp") if name in vars(x)}
        if hasattr(x, "logits"):
            return assay_jax.grpo_loss(x.logits, **given, spec=spec).loss
        return assay_jax.grpo_loss_of_hidden(x.hidden, x.lm_head.T, **given, spec=spec).loss

    spec = assay.spec(**options)
    for shape in ("1x4x512", "1x4x8x512"):
        asked = {**OPTIONS, "shape": shape, "against": ["jax", "xla", "assay"]}
        found = outcomes(assay.bench(returns_what_assay_does, spec, **asked))
        assert set(found.values()) == {"timed"}, found


def test_a_program_that_writes_to_its_inputs_is_wrong_and_harms_no_other() -> None:
    torch = pytest.importorskip("torch")

    def plain(x: Any) -> Any:
        logp = x.logits.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
        ratio, advantages = (logp - x.old_logp).exp(), x.advantages[:, None]
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / x.mask.sum()

    def doubles(x: Any) -> Any:
        loss = plain(x)
        x.old_logp.data.mul_(2)
        return loss

    calls: list[int] = []

    def doubles_at_last(x: Any) -> Any:
        calls.append(1)
        # Three calls are judged, five are timed, and the last one is judged again: its answer is right.
        return doubles(x) if len(calls) == 9 else plain(x)

    asked = {**OPTIONS, "framework": "torch"}
    found = outcomes(assay.bench(plain, "trl", against=[doubles, doubles_at_last], **asked))
    assert found["plain"] == "timed" and found["doubles"].startswith("wrong: loss"), found
    assert found["doubles_at_last"].startswith("wrong: InputMutated: `old_logp`"), found
    found = outcomes(assay.bench(doubles, "trl", against=[plain], **asked))
    assert found["doubles"].startswith("wrong") and found["plain"].startswith("ignored: nothing is timed beside"), found


def test_every_opponent_of_torch_is_right() -> None:
    torch = pytest.importorskip("torch")

    def in_torch(x: Any) -> Any:
        logits = x.logits if hasattr(x, "logits") else x.hidden @ x.lm_head.T
        logp = logits.float().log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
        ratio, advantages = (logp - x.old_logp).exp(), x.advantages[:, None]
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / x.mask.sum()

    options = {
        **OPTIONS,
        "framework": "torch",
        "memory": False,
        "against": ["eager", "torch.compile", "trl", "liger", "jax", "assay"],
    }
    for shape in ("1x4x512", "1x4x8x512"):
        found = outcomes(assay.bench(in_torch, "trl", **{**options, "shape": shape}))
        assert found["in_torch"] == found["eager"] == found["torch.compile"] == found["jax"] == found["assay"] == "timed", (
            found
        )
        assert not any(outcome.startswith("wrong") for outcome in found.values()), found
