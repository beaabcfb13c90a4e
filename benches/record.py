"""Every table of docs/benches.md by one command, `make bench-all`: kernels here, in PyTorch and in JAX, and the judge, on an idle machine.

    python benches/record.py benches/records/MACHINE/DATE [--assay target/release/assay] [--judge-time target/release/examples/judge_time]
    python benches/record.py --compare OLD NEW          # what got slower by more than 10 %, by ratios alone
    python benches/record.py --tables FOLDER            # the tables as Markdown

Each table is a JSON file of the folder, and `assay report FOLDER/*.json -o PAGE` draws them. Times of two machines or of two days do not
compare. Ratios to what was timed in turns with them do: only these are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Slower than the last record by more than this is reported.
SLOWER = 1.1
SHAPE, HEAD_SHAPE = "1x512x151936", "1x512x64x151936"
#: TRL's default loss with a KL term.
SPEC = {"kl": {"beta": 0.04, "estimator": "k3"}}
#: The tables that the command `assay bench` writes: name, and its arguments.
COMMANDS = {
    **{f"native-{dtype}": ["--impl", "native", "--shape", SHAPE, "--dtype", dtype, "--against", "copy"] for dtype in ("f32", "bf16", "f16")},
    "native-xla": ["--impl", "native", "--shape", SHAPE, "--dtype", "bf16", "--against", "xla"],
    "native-lm-head": ["--impl", "native-lm-head", "--shape", HEAD_SHAPE, "--dtype", "f32", "--against", "gemm"],
}


def in_torch(x: Any) -> Any:
    """The loss as trainers write it in PyTorch, with the entropies that they log."""
    import torch

    logits = x.logits if hasattr(x, "logits") else x.hidden @ x.lm_head.T
    logps = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    return _of_logp(x, logps.gather(-1, x.ids[..., None])[..., 0], torch), {"entropy": entropy}


def in_jax(x: Any) -> Any:
    import jax

    logps = jax.nn.log_softmax(x.logits)
    return _of_logp(x, jax.numpy.take_along_axis(logps, x.ids[..., None], -1)[..., 0], jax.numpy)


def _of_logp(x: Any, logp: Any, xp: Any) -> Any:
    ratio, advantages, gap = xp.exp(logp - x.old_logp), x.advantages[:, None], x.ref_logp - logp
    policy = -xp.minimum(ratio * advantages, xp.clip(ratio, 0.8, 1.2) * advantages)
    token_loss = policy + 0.04 * (xp.exp(gap) - gap - 1)
    return xp.where(x.mask, token_loss, 0.0).sum() / x.mask.sum()


def programs() -> dict[str, Callable[[], Any]]:
    """The tables that `assay.bench` makes."""
    import assay

    def bench(fn: Callable[..., Any], framework: str, against: list[str], shape: str = SHAPE, **options: Any) -> Any:
        return assay.bench(fn, assay.spec(**SPEC), shape=shape, framework=framework, against=against, progress=False, **options)

    opponents = ["eager", "torch.compile", "trl", "assay"]
    return {
        "torch": lambda: bench(in_torch, "torch", opponents),
        "torch-in-place": lambda: bench(in_torch, "torch", ["assay"], inplace=True),
        "torch-hidden": lambda: bench(in_torch, "torch", [*opponents, "liger"], HEAD_SHAPE),
        "jax": lambda: bench(in_jax, "jax", ["xla", "assay"]),
        "jax-donated": lambda: bench(in_jax, "jax", ["xla", "assay"], inplace=True),
    }


def record(folder: Path, assay_command: str, judge_time: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in COMMANDS.items():
        print(f"assay bench {' '.join(arguments)}", flush=True)
        subprocess.run([assay_command, "bench", *arguments, "--json", str(folder / f"{name}.json"), "-q"], check=True)
    for name, bench in programs().items():
        found = bench()
        print(found, flush=True)
        found.to_json(folder / f"{name}.json")
    if judge_time is not None:
        ran = subprocess.run([judge_time, "1x512x151936", "1x256x4096"], check=True, capture_output=True, text=True)
        print(ran.stdout)
        (folder / "judge_time.txt").write_text(ran.stdout)


def timed(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """The programs of a table that were timed, each with the median of their bound, in seconds."""
    if table["bound"]:
        bound = table["bound"]["times"]["median"]
        yield from ((program, bound) for program in table["programs"] if program.get("times"))


def ratios(folder: Path) -> Iterator[tuple[str, float]]:
    """What was timed, each over its bound or opponent in the same turns."""
    for path in sorted(folder.glob("*.json")):
        table = json.loads(path.read_text())
        if "programs" in table:
            for program, bound in timed(table):
                yield f"{path.stem}: {program['name']}", program["times"]["median"] / bound
        else:
            for key, value in table.items():
                if key.startswith("ratio_to_"):
                    yield f"{path.stem}: {key}", value


def compare(old: Path, new: Path) -> list[str]:
    """A line for each ratio that grew by more than `SLOWER`."""
    before = dict(ratios(old))
    if not before:
        raise SystemExit(f"compare: got {old}, expected a folder of a record, with tables as JSON")
    after = dict(ratios(new))
    pairs = [(name, before[name], ratio) for name, ratio in after.items() if name in before]
    if not pairs:
        raise SystemExit(f"compare: got {old} and {new}, expected records with a table in common")
    slower = [f"{name}: {was:.2f} × before, {now:.2f} × now" for name, was, now in pairs if now > SLOWER * was]
    gone = [f"{name}: {was:.2f} × before, and not timed now" for name, was in before.items() if name not in after]
    told = f"{len(pairs)} ratios compared, {len(slower)} slower by more than {round((SLOWER - 1) * 100)} %, {len(gone)} no longer timed"
    return [told, *slower, *gone]


def tables(folder: Path) -> Iterator[str]:
    """Each table as Markdown: times, the part of the bound, and memory in units of the logits."""
    yield "| program | ms | × its bound | of the logits |\n|---|---|---|---|"
    for path in sorted(folder.glob("*.json")):
        table = json.loads(path.read_text())
        if "programs" in table:
            for program, bound in timed(table):
                median, memory = program["times"]["median"], program.get("memory")
                held = f"{memory['peak'] / table['logits_bytes']:.2f}" if memory else "–"
                yield f"| {path.stem}: {program['name']} | {median * 1e3:.1f} | {median / bound:.2f} | {held} |"
            if table["bound"]:
                yield f"| {path.stem}: {table['bound']['name']} | {table['bound']['times']['median'] * 1e3:.1f} | 1 | – |"
        else:
            told = ", ".join(f"{table[key]:.3f} ({key[len('ratio_to_') :]})" for key in table if key.startswith("ratio_to_"))
            yield f"| {path.stem}: {table['impl']} | {table['step_s_p50'] * 1e3:.1f} | {told} | – |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the record to be written")
    parser.add_argument("--assay", default="target/release/assay", help="the command, of a release build")
    parser.add_argument("--judge-time", help="the example `judge_time` of a release build")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--tables", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    if asked.compare:
        print("\n".join(compare(*asked.compare)))
    elif asked.tables:
        print("\n".join(tables(asked.tables)))
    elif asked.folder:
        record(asked.folder, asked.assay, asked.judge_time)
    else:
        parser.error("expected a folder, --compare or --tables")


if __name__ == "__main__":
    sys.exit(main())
