"""The process that a kernel has to itself: `python -m assay._worker`, which speaks protocol assay-check/1."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from . import _native, _ranks
from ._errors import AssayError, InputMutated, OutputError

_LONGEST = 3000  # a part of an error in words; a line has at most 64 KiB


def command(
    fn: Any, outputs: list[str] | None, device: str | None, inplace: bool, scores: dict[str, Any] | None = None, option: str = "isolate"
) -> list[str]:
    """The command that starts the process of `fn`, with the options of `assay.check`. `scores` has those of `assay.check_logp`, for a
    function of logits and ids; `option` is what asks for the process.

    Raises:
        AssayError: Another process could not find `fn`.
    """
    name, module = getattr(fn, "__qualname__", ""), getattr(fn, "__module__", "")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    home = main if module == "__main__" else module
    if not name or "<" in name or home is None:
        given = f"{name or type(fn).__name__} of {module or 'no module'}"
        raise AssayError(f"{option}: got {given}, expected a function that a new process can import: one of a module's or a file's")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return [sys.executable, "-m", __name__, path, str(home), name, json.dumps([outputs, device, inplace, scores])]


def found(home: str, name: str) -> Callable[[_native.Problem], Any]:
    """The function `name` of the module, or of the file, `home`."""
    if home.endswith(".py"):
        import runpy

        # Not as `__main__`: what a script does when it is run is not done again.
        scope: Any = runpy.run_path(home, run_name="__assay_worker__")[name.split(".")[0]]
        names = name.split(".")[1:]
    else:
        scope, names = import_module(home), name.split(".")
    for part in names:
        scope = getattr(scope, part)
    return scope  # type: ignore[no-any-return]


def serve(
    fn: Callable[..., Any], outputs: list[str] | None, device: str | None, inplace: bool, scores: dict[str, Any] | None
) -> None:
    """Answers until stdin ends."""
    if scores is not None:
        from ._logp import made

        fn = made(fn, **scores)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the kernel prints is no answer

    def say(message: dict[str, object]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    say({"protocol": "assay-check/1", "dtypes": ["f64", "f32", "bf16", "f16"], "outputs": []})
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, object] = {"id": request["id"]}
        try:
            spec = _native.Spec._of_json(json.dumps(request["spec"]))
            problem = _native.load(request["problem"], spec, "logits", "old_logps")
            asked, share = fn, None
            if "shard" in request:
                shard = _ranks.Shard(**request["shard"])
                _ranks.join()
                asked, share = (lambda problem, shard=shard: fn(problem, shard=shard)), (shard.cut, shard.start, shard.end)
            _native.answer(asked, problem, outputs, device, inplace, request["candidate"], share)
        except NotImplementedError as reason:
            reply["unsupported"] = str(reason)
        except OutputError as reason:
            parts = {"field": reason.field, "given": reason.given, "expected": reason.expected}
            reply["output"] = {name: str(part)[:_LONGEST] for name, part in parts.items()}
        except InputMutated as reason:
            reply["mutated"] = str(reason.field)
        except Exception:
            reply["error"] = traceback.format_exc()[-_LONGEST:]
        say(reply)


if __name__ == "__main__":
    path, home, name, asked = sys.argv[1:]
    sys.path[:] = path.split(os.pathsep)
    if home.endswith(".py"):
        sys.path.insert(0, str(Path(home).parent))
    serve(found(home, name), *json.loads(asked))
