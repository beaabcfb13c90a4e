"""TRL's default loss in NumPy, as a process that needs nothing of this project: `assay check --exec "python worker.py"`."""
import json, sys, time
import ml_dtypes, numpy as np
from safetensors.numpy import load_file, save_file

def kernel(t):
    mask, a, x = t["mask"] == 1, t["advantages"][:, None], t["logits"].astype(np.float64)
    target = np.arange(x.shape[-1]) == t["ids"][..., None]
    z = x - x.max(-1, keepdims=True)
    e = np.exp(z)
    total = e.sum(-1)
    logp = np.where(target, z, 0).sum(-1) - np.log(total)
    ratio = np.exp(np.where(mask, logp - t["old_logps"], 0))  # what is masked may overflow
    token_loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    active = mask & np.where(a > 0, ratio <= 1.2, ratio >= 0.8)
    g = np.where(active, -ratio * a, 0)[..., None] / max(mask.sum(), 1)
    dlogits = (g * (target - e / total[..., None])).astype(t["logits"].dtype)
    loss = np.float32(np.where(mask, token_loss, 0).sum() / max(mask.sum(), 1))
    return {"loss": loss[None], "dlogits": dlogits, "logp": np.where(mask, logp, 0).astype(np.float32)}

print(json.dumps({"protocol": "assay-check/1", "dtypes": ["f32", "bf16", "f16"], "outputs": ["logp"]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    problem, seconds = load_file(request["problem"]), []
    for _ in range(1 + request.get("calls", 0)):  # `assay bench` asks for the times of so many calls, after a first one
        started = time.perf_counter()
        outputs = kernel(problem)
        seconds.append(time.perf_counter() - started)
    save_file(outputs, request["candidate"])
    print(json.dumps({"id": request["id"], "seconds": seconds[1:]}), flush=True)
