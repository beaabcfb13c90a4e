"""A small language model trained with PyTorch's cross-entropy and with this project's: the same losses, and gradients to f32's rounding."""

import assay
import assay.torch
import torch
import torch.nn.functional as F

VOCABULARY, WIDTH, STEPS = 4096, 64, 20


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a made-up text, and the next ones; every ninth does not count."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    ids = (start + 7 * torch.arange(33)) % VOCABULARY
    targets = ids[:, 1:].clone()
    targets[:, ::9] = -100
    return ids[:, :-1], targets


def train(cross_entropy) -> tuple[list[float], torch.Tensor]:
    """Returns the loss of each step, and the head's first gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, first = [], torch.empty(0)
    for step in range(STEPS):
        ids, targets = batch(step)
        loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = model[1].weight.grad.clone()
        optimizer.step()
        losses.append(loss.item())
    return losses, first


theirs, their_gradient = train(F.cross_entropy)
ours, our_gradient = train(assay.torch.cross_entropy)
print("step   F.cross_entropy   assay.torch.cross_entropy")
for step in range(0, STEPS, 5):
    print(f"{step:4}   {theirs[step]:15.6f}   {ours[step]:25.6f}")
difference = (their_gradient - our_gradient).norm() / their_gradient.norm()
print(f"the head's first gradients differ by {difference:.1e} of their norm")
assert abs(theirs[-1] - ours[-1]) < 1e-3 and difference < 1e-5
