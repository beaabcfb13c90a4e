"""TRL's default loss as a Triton kernel. Without a GPU: `TRITON_INTERPRET=1 python triton_kernel.py`."""
import assay, torch, triton, triton.language as tl

@triton.jit
def rows(x, ids, a, old, weight, token_loss, dlogits, V, BLOCK: tl.constexpr):
    row, v = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    z = tl.load(x + row * V + v, v < V, -float("inf")).to(tl.float32)
    z, target = z - tl.max(z), v == tl.load(ids + row)
    total, adv, w = tl.sum(tl.exp(z)), tl.load(a + row), tl.load(weight + row)
    ratio = tl.exp(tl.where(w > 0, tl.sum(tl.where(target, z, 0.0)) - tl.log(total) - tl.load(old + row), 0.0))
    tl.store(token_loss + row, -w * tl.minimum(ratio * adv, tl.minimum(tl.maximum(ratio, 0.8), 1.2) * adv))
    g = tl.where(tl.where(adv > 0, ratio <= 1.2, ratio >= 0.8), -ratio * adv * w, 0.0)
    tl.store(dlogits + row * V + v, g * (tl.where(target, 1.0, 0.0) - tl.exp(z) / total), v < V)


def loss(problem: assay.Problem) -> dict[str, torch.Tensor]:
    t, (B, T, V) = problem.torch("cuda" if torch.cuda.is_available() else "cpu"), problem.shape
    token_loss, dlogits = torch.empty_like(t.old_logp), torch.empty_like(t.logits, dtype=torch.float32)
    a, weight = t.advantages[:, None].expand(B, T).contiguous(), t.mask / t.mask.sum().clamp(min=1)
    rows[(B * T,)](t.logits, t.ids, a, t.old_logp, weight, token_loss, dlogits, V, BLOCK=triton.next_power_of_2(V))
    return {"loss": token_loss.sum(), "dlogits": dlogits.to(t.logits.dtype)}


if __name__ == "__main__":
    print(assay.check(loss, "trl"))
