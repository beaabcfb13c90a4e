"""Wrong functions of PyTorch: right in one plain call, and wrong as callers and autograd use them."""

from __future__ import annotations

from typing import Any

import torch

from entries import wrong

CALLERS = "callers"
#: Gradients that are those of another cotangent are right up to factors.
FACTOR = r"are right up to a factor (of its own|.*: that of what it is called with)"


def chosen(x: Any, ids: Any) -> Any:
    return x.gather(-1, ids[..., None])[..., 0]


class Plain(torch.autograd.Function):  # type: ignore[misc]
    """The log-probability of a token by logits, or by hidden states and a head `[V,H]`, with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, ids = args
        ctx.save_for_backward(*args)
        x = logits(inputs)
        return chosen(x, ids) - x.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        *inputs, ids = ctx.saved_tensors
        return (*gradients(inputs, dlogits(inputs, ids) * g.float()[..., None]), None)


def logits(inputs: Any) -> Any:
    x = inputs[0].float()
    return x @ inputs[1].float().T if len(inputs) == 2 else x


def dlogits(inputs: Any, ids: Any) -> Any:
    d = -logits(inputs).softmax(-1)
    return d.scatter_add(-1, ids[..., None], torch.ones_like(d[..., :1]))


def gradients(inputs: Any, d: Any) -> list[Any]:
    of_first = d @ inputs[1].float() if len(inputs) == 2 else d
    of_head = [torch.einsum("btv,bth->vh", d, inputs[0].float()).to(inputs[1].dtype)] if len(inputs) == 2 else []
    return [of_first.to(inputs[0].dtype), *of_head]


@wrong(CALLERS, r"called with logits(\[:, :-1\]|\[\.\.\., :-3\]| as the transpose)", campaign="check_logp")
def dense_rows(x: Any, ids: Any) -> Any:
    """Row pointers are row · V, whatever the strides."""
    b, t, v = x.shape

    class Logp(Plain):
        @staticmethod
        def forward(ctx: Any, x: Any, ids: Any) -> Any:
            logp = Plain.forward(ctx, x.as_strided((b, t, v), (t * v, v, 1)), ids)
            ctx.save_for_backward(x, ids)
            return logp

    return Logp.apply(x, ids)


@wrong(CALLERS, r"called with (cotangents that are a transposed|one cotangent expanded)", campaign="check_logp")
def dense_cotangent(x: Any, ids: Any) -> Any:
    """The cotangent's storage is read as if it were dense."""

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            room = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
            n = min(g.numel(), room)
            return Plain.backward(ctx, torch.cat([g.as_strided((n,), (1,)), g.new_zeros(g.numel() - n)]).reshape(g.shape))

    return Logp.apply(x, ids)


@wrong(CALLERS, r"called with a second backward pass", also=FACTOR, campaign="check_logp")
def scaled_in_place(x: Any, ids: Any) -> Any:
    """dlogits that the forward pass kept are scaled in place: a second backward pass scales them again."""

    class Logp(Plain):
        @staticmethod
        def forward(ctx: Any, x: Any, ids: Any) -> Any:
            ctx.d = dlogits([x], ids)
            return Plain.forward(ctx, x, ids)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return ctx.d.mul_(g.float()[..., None]).to(ctx.saved_tensors[0].dtype), None

    return Logp.apply(x, ids)


@wrong(CALLERS, r"input-mutated", campaign="check_logp")
def written_over_the_logits(x: Any, ids: Any) -> Any:
    """dlogits are written over the caller's logits, behind autograd's back."""

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x = ctx.saved_tensors[0]
            x.data.copy_(Plain.backward(ctx, g)[0])
            return x.data, None

    return Logp.apply(x, ids)


@wrong(CALLERS, r"called with a frozen head", campaign="check_logp", lm_head=True)
def frozen_head_stops_all(hidden: Any, head: Any, ids: Any) -> Any:
    """Where the head needs no gradient, hidden states get none."""

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            both = Plain.backward(ctx, g)
            return both if ctx.needs_input_grad[1] else (torch.zeros_like(both[0]), None, None)

    return Logp.apply(hidden, head, ids)


@wrong(CALLERS, r"called with frozen hidden states", campaign="check_logp", lm_head=True)
def frozen_hidden_states_stop_all(hidden: Any, head: Any, ids: Any) -> Any:
    """Where hidden states need no gradient, the head gets none."""

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            both = Plain.backward(ctx, g)
            return both if ctx.needs_input_grad[0] else (None, torch.zeros_like(both[1]), None)

    return Logp.apply(hidden, head, ids)


@wrong(CALLERS, r"\.grad", campaign="check_logp")
def written_over_grad(x: Any, ids: Any) -> Any:
    """The backward pass writes to the leaf's `.grad` too, if there is one."""
    leaf = x

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            both = Plain.backward(ctx, g)
            if leaf.grad is not None:
                leaf.grad.data.copy_(both[0])
            return both

    return Logp.apply(x, ids)


@wrong(CALLERS, r"dlogp-of-first-in-row", campaign="check_logp")
def cotangent_of_the_first_token(x: Any, ids: Any) -> Any:
    """All tokens of a sequence have the cotangent of its first."""

    class Logp(Plain):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return Plain.backward(ctx, g[:, :1].expand(g.shape))

    return Logp.apply(x, ids)


def token_losses(x: Any, logp: Any) -> Any:
    a = x.advantages[:, None]
    ratio = (logp - x.old_logp).where(x.mask, 0).exp()
    return (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).where(x.mask, 0) / x.mask.sum().clamp(min=1)


def loss(x: Any) -> Any:
    """The plain loss, by autograd."""
    counting = x.logits.float().where(x.mask[..., None], 0)
    return token_losses(x, chosen(counting, x.ids.where(x.mask, 0)) - counting.logsumexp(-1)).sum()


class Fused(torch.autograd.Function):  # type: ignore[misc]
    """A fused loss: the forward pass makes dlogits, and the backward pass multiplies them."""

    @staticmethod
    def forward(ctx: Any, logits: Any, x: Any) -> Any:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = loss(type(x)(**{**vars(x), "logits": leaf}))
            # The gradient stays in f32 until the upstream gradient has multiplied it.
            (ctx.d,) = torch.autograd.grad(value, leaf)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return (ctx.d.float() * g).to(ctx.d.dtype), None


@wrong(CALLERS, r"called with an upstream gradient", also=FACTOR, campaign="check_loss")
def upstream_gradient_ignored(x: Any) -> Any:
    """The fused loss gives the gradient of the loss itself, whatever it is multiplied by afterwards."""

    class Loss(Fused):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return ctx.d, None

    return Loss.apply(x.logits, x)


@wrong(CALLERS, r"called with a second backward pass", also=FACTOR, campaign="check_loss")
def fused_scaled_in_place(x: Any) -> Any:
    """The fused loss multiplies its dlogits in place."""

    class Loss(Fused):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return ctx.d.mul_(g), None

    return Loss.apply(x.logits, x)


@wrong(CALLERS, r"0\.2(5|499\d+) times what they should be", campaign="check_loss", loss_type="dapo")
def loss_divided_by_steps_again(x: Any) -> Any:
    """The loss is divided by four accumulation steps once more."""
    return loss(x) / 4


@wrong(CALLERS, r"not converted to f32", also=r"logp-in-logits-dtype", campaign="check_logp")
def logp_not_upcast(x: Any, ids: Any) -> Any:
    """bf16 logits go into log_softmax as they are."""
    return chosen(x.log_softmax(-1), ids)


@wrong(CALLERS, r"garbage under the mask|masked-garbage", campaign="check_loss", masked_garbage=True)
def masked_logp_multiplied(x: Any) -> Any:
    """Masked tokens are multiplied by 0: NaN logits reach the gradient."""
    logp = chosen(x.logits.float(), x.ids.clamp(min=0)) - x.logits.float().logsumexp(-1)
    return token_losses(x, logp).sum()


@wrong("wide only", r"added one by one in f32", campaign="check_logp", cases=11, wide=11, dtypes=["f32"])
def cross_entropy_of_transposed_logits(x: Any, ids: Any) -> Any:
    """PyTorch's own cross_entropy over axis 1 adds the terms of a denominator one by one on a CPU, 151,936 of them."""
    return -torch.nn.functional.cross_entropy(x.float().transpose(1, 2), ids, reduction="none")


@wrong("softmax", r"minus_infinity not finite", campaign="check_logp")
def logsumexp_of_tiles(x: Any, ids: Any) -> Any:
    """PyTorch's logsumexp of a tile of nothing but −∞ has a gradient of NaN."""
    x = x.float()
    return chosen(x, ids) - torch.stack([tile.logsumexp(-1) for tile in x.split(8, -1)], -1).logsumexp(-1)


TRANSFORMS = {
    "softcap_before_scale": ("The capped logit is scaled.", lambda x: 30 * torch.tanh(x / 30) * 0.25, r"softcap-before-scale"),
    "scale_forgotten": ("The logit is not scaled before its cap.", lambda x: 30 * torch.tanh(x / 30), r"logit-scale-forgotten|scale"),
    "softcap_forgotten": ("No logit is capped.", lambda x: 0.25 * x, r"softcap"),
    "tanh_without_cap": ("tanh is not multiplied by the cap.", lambda x: torch.tanh(x * 0.25 / 30), r"tanh-without-cap"),
    "tanh_of_undivided_logit": ("The logit is not divided by the cap.", lambda x: 30 * torch.tanh(x * 0.25), r"tanh-of-undivided-logit"),
    "softcap_cuts": ("Logits are held to ±cap.", lambda x: (0.25 * x).clamp(-30, 30), r"softcap-cuts"),
}


def transformed(change: Any, is_wrong_by: str) -> Any:
    def logp(x: Any, ids: Any) -> Any:
        y = change(x.float())
        return chosen(y, ids) - y.logsumexp(-1)

    logp.__doc__ = is_wrong_by
    return logp


for name, (is_wrong_by, change, says) in TRANSFORMS.items():
    wrong("softmax", says, campaign="check_logp", name=name, logits={"scale": 0.25, "softcap": 30.0})(transformed(change, is_wrong_by))
