"""Log-probabilities of a vocabulary that several ranks share, checked on three processes: `python torch_ranks.py`."""

import torch
import torch.distributed as dist


class ShardedLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, shard):  # [B,T,V/N], [B,T] -> [B,T]
        x = logits.float()
        max_ = x.amax(-1)
        dist.all_reduce(max_, dist.ReduceOp.MAX)
        own = (ids >= shard.start) & (ids < shard.end)
        local = (ids - shard.start).clamp(0, x.shape[-1] - 1)
        chosen = x.gather(-1, local[..., None])[..., 0].where(own, 0)
        sums = torch.stack([(x - max_[..., None]).exp().sum(-1), chosen])
        dist.all_reduce(sums)  # the sum of exponentials, and the one rank's logit of the id
        lse = max_ + sums[0].log()
        ctx.save_for_backward(logits, lse, local, own)
        return sums[1] - lse

    @staticmethod
    def backward(ctx, dlogp):  # every rank has the whole cotangent: nothing is exchanged
        logits, lse, local, own = ctx.saved_tensors
        grad = -dlogp[..., None] * (logits.float() - lse[..., None]).exp()
        grad.scatter_add_(-1, local[..., None], (dlogp * own)[..., None])
        return grad.to(logits.dtype), None, None


def logp(logits, ids, shard):
    return ShardedLogp.apply(logits, ids, shard)


if __name__ == "__main__":
    import assay

    print(assay.check_logp(logp, ranks=3, cut="vocabulary", cases=60))
