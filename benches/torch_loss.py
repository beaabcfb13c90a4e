"""The loss of `assay.torch` beside what PyTorch's users run: forward and backward on the CPU, time and peak memory.

    python benches/torch_loss.py [--rows 512] [--vocab 151936] [--repeats 7] [--threads 2]

Every program has the same logits (or hidden states and head), PPO-clip with a KL term, and leaves dlogits, which are dropped before
the next call. Times are minima over rounds in which all programs take turns: on a machine that does other things too, only these
compare. They are taken twice, each time in a process of its own: with memory as it comes, and with memory *kept*, for which the C
library is told to give nothing back to the system (`mallopt`) and PyTorch to ask for huge pages (`THP_MEM_ALLOC_ENABLE`), so that no
program pays for new pages. Beside the time is the least time of all threads' processors, which other work on the machine changes little;
who waits for another by turning counts there too. Memory is the peak of a process of its own above what it held before the call, logits not counted, in units
of the logits.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time


def programs(rows, vocab, hidden, compile_too):
    import torch

    import assay
    import assay.torch

    torch.manual_seed(0)
    ids, mask = torch.randint(vocab, (1, rows)), torch.ones(1, rows, dtype=torch.bool)
    advantages = torch.randn(1)
    old_logp, ref_logp = -12 + torch.randn(1, rows) / 8, -12 + torch.randn(1, rows) / 8
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"})

    def loss_of(logp):
        ratio = (logp - old_logp).exp()
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
        return (policy + 0.04 * kl).mean()

    def gradient(loss, logits):
        return torch.autograd.grad(loss, logits)

    def ours(logits, inplace):
        result = assay.torch.grpo_loss(logits, ids, advantages, mask, old_logp, ref_logp, spec=spec, inplace=inplace)
        return gradient(result.loss, logits)

    def ours_at_first(logits):
        assay.torch.empty_cache()
        return ours(logits, False)

    def eager(logits):
        log_softmax = logits.log_softmax(-1)
        logp = log_softmax.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        return gradient(loss_of(logp), logits), entropy

    def by_cross_entropy(logits):
        logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(1, rows)
        return loss_of(logp)

    compiled = torch.compile(by_cross_entropy) if compile_too else None
    on_logits = {
        "assay": lambda logits: ours(logits, False),
        "assay, each time the first": ours_at_first,
        "assay, in place": lambda logits: ours(logits, True),
        "cross_entropy under torch.compile": lambda logits: gradient(compiled(logits), logits),
        "plain eager, with entropy": eager,
    }

    def trl(hidden_states, weight):
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        logp, *_ = ChunkedLogProbFunction.apply(
            hidden_states[0], weight, None, ids[0], 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
        )
        loss_of(logp.unsqueeze(0)).backward()

    def our_head(hidden_states, weight):
        given = {"hidden": hidden_states, "lm_head": weight, "spec": spec}
        assay.torch.grpo_loss(None, ids, advantages, mask, old_logp, ref_logp, **given).loss.backward()

    def our_linear(hidden_states, weight):
        logits = hidden_states @ weight.T
        given = {"spec": spec, "inplace": True}
        assay.torch.grpo_loss(logits, ids, advantages, mask, old_logp, ref_logp, **given).loss.backward()

    with_head = {
        "assay, hidden and head": our_head,
        "assay, in place, after a Linear": our_linear,
        "TRL 1.16, chunked": trl,
    }
    make = {
        # A view, as a model's logits are no leaf.
        False: lambda: (torch.randn(1, rows, vocab).requires_grad_().view(1, rows, vocab),),
        True: lambda: (torch.randn(1, rows, hidden).requires_grad_(), (torch.randn(vocab, hidden) / 8).requires_grad_()),
    }
    return [(name, program, make[False], "logits") for name, program in on_logits.items()] + [
        (name, program, make[True], f"H = {hidden}") for name, program in with_head.items()
    ]


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(args):
    """The peak of one program in this process, above what was there before, in bytes."""
    import torch

    torch.set_num_threads(args.threads)
    few = dict((name, (program, make)) for name, program, make, _ in programs(8, 1024, 16, True))
    program, make = few[args.memory]
    program(*make())  # What is loaded at the first call is no part of it.
    name, program, make, _ = next(x for x in programs(args.rows, args.vocab, args.hidden, True) if x[0] == args.memory)
    tensors = make()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The peak begins here.
    status = {line.split(":")[0]: line.split(":")[1].split() for line in open("/proc/self/status") if line.startswith("Vm")}
    before = int(status["VmRSS"][0]) * 1024
    program(*tensors)
    status = {line.split(":")[0]: line.split(":")[1].split() for line in open("/proc/self/status") if line.startswith("Vm")}
    print(int(status["VmHWM"][0]) * 1024 - before)


def keep_memory():
    """Has the C library keep what was freed, whatever its size."""
    library = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4
    assert library.mallopt(mmap_max, 0) == 1 and library.mallopt(trim_threshold, -1) == 1


def times(args):
    """The least time of each program in this process, and the least of its processors, in seconds."""
    import torch

    torch.set_num_threads(args.threads)
    all_of_them = programs(args.rows, args.vocab, args.hidden, True)
    if args.on_logits:
        all_of_them = [one for one in all_of_them if one[3] == "logits"]
    best = {name: [float("inf")] * 2 for name, *_ in all_of_them}
    for turn in range(args.repeats + 1):
        for name, program, make, _ in all_of_them:
            tensors = make()
            started = time.perf_counter(), time.process_time()
            program(*tensors)
            took = time.perf_counter() - started[0], time.process_time() - started[1]
            if turn > 0:  # The first compiles.
                best[name] = [min(pair) for pair in zip(best[name], took)]
            del tensors
    print(json.dumps({name: [kind, *best[name]] for name, _, _, kind in all_of_them}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--on-logits", action="store_true", help="only the programs that are given logits")
    parser.add_argument("--times", choices=["as it comes", "kept"], help="time the programs in this process, with memory so")
    parser.add_argument("--memory", help="measure the memory of one program in this process")
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    if args.memory:
        return measure(args)
    if args.times:
        if args.times == "kept":
            keep_memory()
        return times(args)
    from importlib.metadata import version

    def apart(*more, **environment):
        command = [sys.executable, __file__, *sys.argv[1:], *more]
        ran = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True)
        return ran.stdout.split("\n")[-2]

    as_it_comes = json.loads(apart("--times", "as it comes"))
    kept = json.loads(apart("--times", "kept", THP_MEM_ALLOC_ENABLE="1"))
    logits = args.rows * args.vocab * 4
    print(f"{args.rows}x{args.vocab} f32, {args.threads} threads, minima of {args.repeats}; PyTorch {version('torch')}")
    print(f"{'':45}{'as it comes':>24}{'memory kept':>24}")
    print(f"{'':45}{'ms':>12}{'processors':>12}{'ms':>12}{'processors':>12}{'memory, of the logits':>24}")
    for name, (kind, *seconds) in as_it_comes.items():
        extra = int(apart("--memory", name))
        columns = "".join(f"{x * 1e3:12.1f}" for x in [*seconds, *kept[name][1:]])
        print(f"{kind:8} {name:36}{columns}{extra / logits:24.3f}")


if __name__ == "__main__":
    main()
