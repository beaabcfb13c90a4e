"""TRL's default loss in PyTorch, its gradient by autograd. `python torch_autograd.py` judges it."""
import torch

import assay


def loss(problem: assay.Problem) -> dict[str, torch.Tensor]:
    arrays = problem.torch()
    x, mask = arrays.logits.clone().requires_grad_(), arrays.mask
    logp = torch.log_softmax(x.float(), -1).gather(-1, arrays.ids[..., None])[..., 0]
    a = arrays.advantages[:, None]
    ratio = torch.exp((logp - arrays.old_logp).where(mask, 0))  # what is masked may overflow
    token_loss = (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).where(mask, 0)
    mean = token_loss.sum() / mask.sum().clamp(min=1)
    mean.backward()
    return {"loss": mean.detach(), "dlogits": x.grad, "logp": logp.detach().where(mask, 0), "token_loss": token_loss.detach()}


if __name__ == "__main__":
    print(assay.check(loss, "trl"))
