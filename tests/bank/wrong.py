"""Kernels that are wrong on purpose, each a small edit of the plain one. The kinds are the ways in which a fixed deck misses them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from entries import wrong
from plain import F32, Outputs, logits_of, plain

BF16 = ml_dtypes.bfloat16


def columns(e: Any) -> Any:
    return np.arange(e.shape[-1])


def without(e: Any, lost: Any) -> Any:
    """Exponentials of which some columns are never added."""
    return np.where(lost, F32(0), e)


# The first kind: vocabularies at a tile's edge.


def last_full_tile_lost(tile: int) -> Any:
    def kernel(problem: Any) -> Outputs:
        """Where the tile divides V, the grid has a tile too few."""

        def e(e: Any, c: Any) -> Any:
            v = e.shape[-1]
            return without(e, columns(e) >= v - tile) if v % tile == 0 and v > tile else e

        return plain(problem, e=e)

    return kernel


EDGE = "V at a tile edge"
#: Diagnoses of a sum that lacks some columns, or has them twice.
SUMS = r"the sums of exponentials (lack|have) vocabulary entr"
for tile in (4096, 8192, 16_384):
    wrong(EDGE, rf"V mod {tile} = 0", also=f"{SUMS}|last-full-tile-of-{tile}-lost", name=f"last_full_tile_of_{tile}_lost")(last_full_tile_lost(tile))


@wrong(EDGE, r"V mod 4096 = 1\b", also=rf"{SUMS}|the dlogit of vocabulary entry \d+ of|one-column-tail-of-4096-lost")
def tail_of_one_column_lost(problem: Any) -> Outputs:
    """A tail of one column past tiles of 4,096 is not added."""
    return plain(problem, e=lambda e, c: without(e, (columns(e) >= 4096) & (columns(e) % 4096 == 0) & (columns(e) == e.shape[-1] - 1)))


@wrong(EDGE, r"V mod 2048 = 1\b", also=r"the dlogit of vocabulary entry \d+ of")
def tail_of_one_column_has_no_gradient(problem: Any) -> Outputs:
    """dlogits of a tail of one column past tiles of 2,048 are 0."""

    def dlogits(d: Any, c: Any) -> Any:
        v = d.shape[-1]
        return np.where(columns(d) == v - 1, F32(0), d) if v > 2048 and v % 2048 == 1 else d

    return plain(problem, dlogits=dlogits)


@wrong(EDGE, r"V mod 1024 ≠ 0|last-tile-read-twice", also=SUMS)
def tail_of_1024_added_twice(problem: Any) -> Outputs:
    """The exponentials of an incomplete last tile of 1,024 are added twice."""

    def e(e: Any, c: Any) -> Any:
        whole = e.shape[-1] // 1024 * 1024
        c.again = e[..., whole:].sum(-1, keepdims=True) if whole else F32(0)
        return e

    return plain(problem, e=e, total=lambda total, c: total + c.again)


@wrong(EDGE, r"V mod 512 ≠ 0|entries \d+ to \d+ of|tail-gradient-zero")
def tail_of_512_has_no_gradient(problem: Any) -> Outputs:
    """dlogits of an incomplete last tile of 512 are 0."""

    def dlogits(d: Any, c: Any) -> Any:
        whole = d.shape[-1] // 512 * 512
        return np.where((columns(d) >= whole) & (whole > 0), F32(0), d)

    return plain(problem, dlogits=dlogits)


# The second kind: wide vocabularies only.
WIDE = "wide only"


@wrong(WIDE, r"bf16 and V > 65536|bf16 logits that are not converted")
def wide_bf16_not_upcast(problem: Any) -> Outputs:
    """Beyond 65,536 columns bf16 exponentials are rounded before they are added."""
    rounds = problem.dtype == "bf16" and problem.shape[-1] > 65_536
    return plain(problem, e=lambda e, c: e.astype(BF16).astype(F32) if rounds else e)


workspace: dict[int, Any] = {}


@wrong(WIDE, r"V > 16384|not-reproducible|stale")
def split_workspace_not_zeroed(problem: Any) -> Outputs:
    """Beyond 16,384 columns splits add to a workspace that is zeroed at its first use only."""

    def total(total: Any, c: Any) -> Any:
        if c.x.shape[-1] <= 16_384:
            return total
        workspace[total.size] = total.ravel() + workspace.get(total.size, F32(0))
        return workspace[total.size].reshape(total.shape)

    return plain(problem, total=total)


@wrong(WIDE, r"not-reproducible")
def splits_added_by_atomics(problem: Any) -> Outputs:
    """Beyond 8,192 columns splits of 1,024 are added in the order in which they end."""

    def total(total: Any, c: Any) -> Any:
        v = c.x.shape[-1]
        if v <= 8192:
            return total
        parts = [c.e[..., first : first + 1024].sum(-1, keepdims=True) for first in range(0, v, 1024)]
        total = F32(0)
        for part in np.random.default_rng().permutation(len(parts)):
            total = total + parts[part]
        return total

    return plain(problem, total=total)


@wrong(WIDE, r"V > (131072|65536)|V mod (131072|65536)")
def offsets_in_17_bits(problem: Any) -> Outputs:
    """Columns from 131,072 on are read from the beginning of the row."""
    return plain(problem, x=lambda x, c: x.take(columns(x) % 131_072, -1))


@wrong(WIDE, r"V > 65536|bf16 and V > 65536|dlogits")
def wide_gradient_flushed(problem: Any) -> Outputs:
    """Beyond 65,536 columns probabilities below 1e-6 have no gradient."""
    return plain(problem, p=lambda p, c: np.where((p < 1e-6) & (p.shape[-1] > 65_536), F32(0), p))


# The third kind: tails of tokens.
TAIL = "tails of tokens"


def in_last_block(array: Any, block: int) -> Any:
    """Whether a token is in an incomplete block after complete ones."""
    count = array.shape[1]
    return (np.arange(count) >= count // block * block) & (count > block)


@wrong(TAIL, r"T > 32 and T mod 32 ≠ 0|tokens from t = \d+ on", also="token-tail-of-32-lost")
def last_block_of_32_tokens_has_no_gradient(problem: Any) -> Outputs:
    """dlogits of an incomplete last block of 32 tokens are 0."""
    return plain(problem, upstream=lambda g, c: np.where(in_last_block(g, 32), F32(0), g))


@wrong(TAIL, r"T > 128 and T mod 128 ≠ 0|tokens from t = \d+ on", also="token-tail-of-128-lost|of each token are right up to a factor")
def last_block_of_128_tokens_scaled_twice(problem: Any) -> Outputs:
    """dlogits of an incomplete last block of 128 tokens are divided by the count twice."""
    return plain(problem, upstream=lambda g, c: np.where(in_last_block(g, 128), g * c.weight.max(), g))


@wrong(TAIL, r"T mod 32 = 0|tokens from t = \d+ on")
def last_token_of_full_blocks_lost(problem: Any) -> Outputs:
    """Where 32 divides T the last token has no loss and no gradient."""

    def weight(w: Any, c: Any) -> Any:
        count = w.shape[1]
        return np.where((np.arange(count) == count - 1) & (count % 32 == 0), F32(0), w)

    return plain(problem, weight=weight)


@wrong(TAIL, r"T > 8 and T mod 8 ≠ 0")
def last_block_of_8_tokens_not_in_loss(problem: Any) -> Outputs:
    """The loss leaves out an incomplete last block of 8 tokens; the gradient has it."""
    return plain(problem, loss=lambda loss, c: np.where(in_last_block(c.mask, 8), F32(0), c.token_loss * c.weight).sum())


# The fourth kind: many rows.
ROWS = "many rows"


@wrong(ROWS, r"B > 32", also="advantage-of-row-modulo-32|of each sequence are right up to a factor")
def advantage_of_row_mod_32(problem: Any) -> Outputs:
    """Each thread of a warp reads the advantage of its own lane."""
    return plain(problem, advantages=lambda a, c: a[np.arange(a.shape[0]) % 32])


@wrong(ROWS, r"B·T > 132 and V > 1024", also=rf"{SUMS}|persistent-grid-drops-columns")
def persistent_program_drops_columns(problem: Any) -> Outputs:
    """From its second row on a persistent program of 132 adds the first 1,024 columns alone."""

    def e(e: Any, c: Any) -> Any:
        row = np.arange(e.shape[0] * e.shape[1]).reshape(*e.shape[:2], 1)
        return without(e, (row >= 132) & (columns(e) >= 1024))

    return plain(problem, e=e)


@wrong(ROWS, r"B·T > 65535|tokens from t = 4080 on, of 4097")
def rows_beyond_the_grid_have_no_gradient(problem: Any) -> Outputs:
    """A grid's second axis ends at 65,535: later rows have no gradient."""
    return plain(problem, upstream=lambda g, c: np.where(np.arange(g.size).reshape(g.shape) >= 65_535, F32(0), g))


@wrong(ROWS, r"B·T > 256")
def loss_of_256_tokens(problem: Any) -> Outputs:
    """The block that adds up token losses has 256 threads and no loop."""
    return plain(problem, loss=lambda loss, c: (c.token_loss * c.weight).ravel()[:256].sum())


# The fifth kind: LM heads.
HEADS = "heads"


@wrong(HEADS, r"H > (512|256)", lm_head=True)
def head_gradient_of_512_units(problem: Any) -> Outputs:
    """Units beyond 512 are dropped from dlm_head."""
    return plain(problem, dlm_head=lambda d, c: np.where(np.arange(d.shape[1]) < 512, d, F32(0)))


@wrong(HEADS, r"V > 8192", lm_head=True)
def head_rows_in_13_bits(problem: Any) -> Outputs:
    """With more than 32 units dhidden reads the head's rows beyond 8,192 from its beginning."""

    def dhidden(d: Any, c: Any) -> Any:
        vocab, width = c.head.shape
        return c.dlogits @ c.head[np.arange(vocab) % 8192] if width > 32 and vocab > 8192 else d

    return plain(problem, dhidden=dhidden)


@wrong(HEADS, r"H mod 16 ≠ 0|depth-tail-dropped", lm_head=True)
def tail_of_16_units_dropped(problem: Any) -> Outputs:
    """The product for the logits leaves out an incomplete last block of 16 units."""

    def x(x: Any, c: Any) -> Any:
        whole = c.head.shape[1] // 16 * 16
        return c.hidden[..., :whole] @ c.head[:, :whole].T

    return plain(problem, x=x)


@wrong(HEADS, r"layout|\[H,V\]", lm_head=True, layout="hv")
def head_of_other_layout_misread(problem: Any) -> Outputs:
    """A head `[H,V]` is read as `[V,H]` in memory when dhidden is made."""

    def dhidden(d: Any, c: Any) -> Any:
        c.head = c.a.lm_head.reshape(c.head.shape).astype(F32)
        return c.dlogits @ c.head

    return plain(problem, dhidden=dhidden)


@wrong(HEADS, r"logits-not-rounded", lm_head=True, rounds_logits=True)
def logits_not_rounded(problem: Any) -> Outputs:
    """Logits stay f32 where they are to have the head's dtype."""
    return plain(problem)


@wrong(HEADS, r"logits-rounded", lm_head=True)
def logits_rounded(problem: Any) -> Outputs:
    """Logits are rounded to bf16 where they are to stay f32."""
    return plain(problem, x=lambda x, c: x.astype(BF16).astype(F32) if c.dtype == "bf16" else x)


@wrong(HEADS, r"dlm-head-summed-in-head-dtype|dlm_head", lm_head=True)
def head_gradient_added_in_bf16(problem: Any) -> Outputs:
    """Sequences add to dlm_head in the head's dtype."""

    def dlm_head(d: Any, c: Any) -> Any:
        if c.dtype != "bf16":
            return d
        total = np.zeros(d.shape, BF16)
        for dlogits, hidden in zip(c.dlogits, c.hidden):
            total = (total.astype(F32) + dlogits.T @ hidden).astype(BF16)
        return total

    return plain(problem, dlm_head=dlm_head)


# The sixth kind: one column far above the others.
FAR = "far columns"


def tiles(x: Any, tile: int) -> list[Any]:
    return [x[..., first : first + tile] for first in range(0, x.shape[-1], tile)]


@wrong(FAR, r"far_column|not finite")
def chunks_merged_by_log1p(problem: Any) -> Outputs:
    """Chunks are merged by lse + log1p(exp(chunk − lse)), which overflows from 88.7 nats on."""

    def total(total: Any, c: Any) -> Any:
        tops = [tile.max(-1, keepdims=True) for tile in tiles(c.x - c.top, 1024)]
        sums = [np.exp(tile - top).sum(-1, keepdims=True) for tile, top in zip(tiles(c.x - c.top, 1024), tops)]
        parts = [top + np.log(part) for top, part in zip(tops, sums)]
        lse = parts[0]
        for part in parts[1:]:
            lse = lse + np.log1p(np.exp(part - lse))
        return np.exp(lse)

    return plain(problem, total=total)


@wrong(FAR, r"max-of-first-tile|far_column")
def maximum_of_the_first_tile(problem: Any) -> Outputs:
    """The maximum is that of the first 128 columns."""
    return plain(problem, top=lambda top, c: c.x[..., :128].max(-1, keepdims=True))


@wrong(FAR, r"logp not finite|logp-of-clamped-probability|∞")
def log_of_softmax(problem: Any) -> Outputs:
    """logp is the logarithm of the softmax, which underflows."""
    return plain(problem, logp=lambda logp, c: np.log(np.take_along_axis(c.e / c.total, c.ids[..., None], -1)[..., 0]))


@wrong(FAR, r"max-starts-at-zero|max")
def maximum_of_at_least_zero(problem: Any) -> Outputs:
    """The running maximum begins at 0."""
    return plain(problem, top=lambda top, c: np.maximum(top, F32(0)))


# The seventh kind: what is under the mask.
MASKS = "masks"


@wrong(MASKS, r"masked-garbage|garbage under the mask", also="mask-multiplied", masked_garbage=True)
def masked_logits_multiplied(problem: Any) -> Outputs:
    """Masked tokens are multiplied by 0: NaN under the mask stays."""
    logits = problem.numpy().logits.astype(F32)
    return plain(problem, x=lambda x, c: logits, loss=lambda loss, c: loss + (c.logp * 0 * c.mask).sum())


@wrong(MASKS, r"masked-garbage|garbage under the mask", masked_garbage=True)
def masked_ids_read(problem: Any) -> Outputs:
    """The id −100 of a masked token has a one in the gradient."""

    def dlogits(d: Any, c: Any) -> Any:
        ids = c.a.ids[..., None] % d.shape[-1]
        return d + np.where((c.a.ids[..., None] < 0) & (columns(d) == ids), F32(1e-3), F32(0))

    return plain(problem, dlogits=dlogits)


@wrong(MASKS, r"no token counts")
def mean_over_nothing(problem: Any) -> Outputs:
    """A batch without a counting token is 0/0."""
    return plain(problem, weight=lambda w, c: c.mask / F32(c.mask.sum()))


@wrong(MASKS, r"mask-shifted")
def mask_of_the_next_token(problem: Any) -> Outputs:
    """The mask is that of the next token."""
    return plain(problem, mask=lambda mask, c: np.roll(mask, -1, 1))


@wrong(MASKS, r"normaliser-counts-padding", also=r"padded width|a factor that each batch has of its own")
def mean_over_padding(problem: Any) -> Outputs:
    """The mean divides by B·T."""
    return plain(problem, weight=lambda w, c: c.mask / F32(c.mask.size))


@wrong(MASKS, r"dlogits at masked", masked_garbage=True)
def masked_gradient_not_written(problem: Any) -> Outputs:
    """dlogits of masked tokens are left as they were allocated."""
    return plain(problem, dlogits=lambda d, c: np.where(c.mask[..., None], d, F32(1)))


# The eighth kind: ratios at the clip's bounds.
BOUNDS = "bounds"
TWICE = r"dlogits are (2|2\.0\d+|1\.99\d+) times"


def at_a_bound(c: Any) -> Any:
    return (c.ratio == c.bounds[0]) | (c.ratio == c.bounds[1])


@wrong(BOUNDS, r"ratios at the bounds")
def nan_at_a_bound(problem: Any) -> Outputs:
    """The slope of the clip is (r − clip(r)) / (r − clip(r)), which is 0/0 at a bound from outside."""
    return plain(problem, slope=lambda g, c: np.where(at_a_bound(c) & c.mask, F32(np.nan), g))


@wrong(BOUNDS, r"ratios at the bounds", also=TWICE)
def both_branches_at_a_bound(problem: Any) -> Outputs:
    """At a bound the slopes of both branches are added, of the ratio twice."""
    return plain(problem, slope=lambda g, c: np.where(at_a_bound(c), 2 * g, g))


@wrong(BOUNDS, r"ratios at the bounds")
def loss_skipped_at_a_bound(problem: Any) -> Outputs:
    """A token is compared by < and > alone: at a bound it has no loss."""
    return plain(problem, policy_loss=lambda loss, c: np.where(at_a_bound(c), F32(0), loss))


HALF = "at a bound the loss has two slopes, and any number between them is a derivative: PyTorch and JAX differ there too"


@wrong(BOUNDS, r"ratios at the bounds", harmless=HALF)
def strict_at_a_bound(problem: Any) -> Outputs:
    """At a bound the token is clipped."""
    return plain(problem, follows=lambda f, c: np.where(c.advantages > 0, c.ratio < c.bounds[1], c.ratio > c.bounds[0]))


# The ninth kind: what one small problem of the old deck showed.
THIN = "thin"


@wrong(THIN, r"far ratios|held to ±20")
def log_ratio_clamped(problem: Any) -> Outputs:
    """Log-ratios are held to ±20."""
    return plain(problem, log_ratio=lambda r, c: np.clip(r, F32(-20), F32(20)))


@wrong(THIN, r"V > 65536|id-truncated")
def ids_in_16_bits(problem: Any) -> Outputs:
    """Ids are kept as uint16."""
    return plain(problem, ids=lambda ids, c: ids.astype(np.uint16).astype(np.int64))


@wrong(THIN, r"id-truncated-to-i16|V > 32768")
def ids_in_15_bits(problem: Any) -> Outputs:
    """Ids beyond 32,767 wrap."""
    return plain(problem, ids=lambda ids, c: ids % 32_768)


@wrong(THIN, r"advantages 0", also="when only other sequences change")
def advantages_divided_by_their_spread(problem: Any) -> Outputs:
    """Advantages are divided by their largest once more, and multiplied again: 0/0 in a group of equal rewards."""

    def advantages(a: Any, c: Any) -> Any:
        largest = np.abs(a).max()
        return a / largest * largest

    return plain(problem, advantages=advantages)


@wrong(THIN, r"logp-of-clamped-probability")
def probability_clamped(problem: Any) -> Outputs:
    """logp is ln max(p, 1e-8)."""
    smallest = F32(np.log(1e-8))
    return plain(problem, logp=lambda logp, c: np.maximum(logp, smallest))


# The eleventh kind: memory that is kept between calls.
MEMORY = "memory"
kept: dict[Any, Any] = {}


def kept_by_address(array: Any, value: Any) -> Any:
    """Returns what was kept for an array of this address and shape, or keeps `value`."""
    return kept.setdefault((array.__array_interface__["data"][0], array.shape), value)


@wrong(MEMORY, r"stale-memory")
def count_kept_by_address(problem: Any) -> Outputs:
    """The number of counting tokens is kept by the mask's address."""
    return plain(problem, weight=lambda w, c: c.mask / F32(kept_by_address(c.a.mask, max(c.mask.sum(), 1))))


@wrong(MEMORY, r"stale-memory")
def advantages_kept_by_address(problem: Any) -> Outputs:
    """Advantages that were converted are kept by their address."""
    return plain(problem, advantages=lambda a, c: kept_by_address(c.a.advantages, a.copy()))


@wrong(MEMORY, r"stale-memory")
def denominators_kept_by_address(problem: Any) -> Outputs:
    """The softmax's denominators are kept by the logits' address."""
    return plain(problem, total=lambda total, c: kept_by_address(c.a.logits, total))


@wrong(MEMORY, r"stale-memory|not-reproducible", also=TWICE)
def buffer_of_dlogits_added_to(problem: Any) -> Outputs:
    """dlogits are added to a buffer of their shape that is never cleared."""

    def dlogits(d: Any, c: Any) -> Any:
        kept[d.shape] = kept.get(d.shape, F32(0)) + d
        return kept[d.shape]

    return plain(problem, dlogits=dlogits)


# Bugs of published kernels: the loss, its mean and its gradient.
LOSS = "loss"


@wrong(LOSS, r"0\.2(5|499\d+) times what they should be, the loss 0\.25 times: 1/4, as of accumulation", loss_type="dapo")
def divided_by_steps_again(problem: Any) -> Outputs:
    """Loss and gradient are divided by four accumulation steps once more."""
    return plain(problem, weight=lambda w, c: w / 4)


@wrong(LOSS, TWICE)
def upstream_twice_in_some_batches(problem: Any) -> Outputs:
    """dlogits are doubled where the number of counting tokens is a multiple of 7."""
    return plain(problem, upstream=lambda g, c: 2 * g if c.mask.sum() % 7 == 0 else g)


@wrong(LOSS, r"clip-ignored", also=r"no clip")
def no_clip(problem: Any) -> Outputs:
    """No ratio is clipped."""
    return plain(problem, bounds=lambda b, c: (F32(0), F32(np.inf)))


@wrong(LOSS, r"epsilons-swapped|epsilon", epsilon_high=0.28)
def bounds_swapped(problem: Any) -> Outputs:
    """The bounds are 1 − ε_high and 1 + ε_low."""
    return plain(problem, bounds=lambda b, c: (2 - b[1], 2 - b[0]))


@wrong(LOSS, r"clip-gradient-kept")
def clipped_token_keeps_its_gradient(problem: Any) -> Outputs:
    """A clipped token keeps the gradient of its ratio."""
    return plain(problem, follows=lambda f, c: np.ones_like(f))


@wrong(LOSS, r"clip-without-min|min")
def clipped_without_minimum(problem: Any) -> Outputs:
    """The loss takes the clipped ratio whatever the other says."""
    return plain(
        problem,
        policy_loss=lambda loss, c: -np.clip(c.ratio, *c.bounds) * c.advantages,
        follows=lambda f, c: (c.ratio >= c.bounds[0]) & (c.ratio <= c.bounds[1]),
    )


@wrong(LOSS, r"ratio-detached")
def ratio_detached(problem: Any) -> Outputs:
    """The ratio has no gradient."""
    return plain(problem, upstream=lambda g, c: 0 * g)


@wrong(LOSS, r"ratio.*invert|old_logp − ", also=r"of each (token|sequence) are right up to a factor")
def ratio_inverted(problem: Any) -> Outputs:
    """The ratio is exp(old − new), and its gradient has the other sign."""
    return plain(problem, log_ratio=lambda r, c: -r, upstream=lambda g, c: -g)


def before(array: Any) -> Any:
    """Each token's number is that of the token before; the first keeps its own."""
    return np.concatenate([array[:, :1], array[:, :-1]], 1)


@wrong(LOSS, r"old-logp-shifted", also=r"when only other tokens of its sequence change")
def old_logp_of_the_token_before(problem: Any) -> Outputs:
    """The old log-probability is that of the token before."""
    return plain(problem, log_ratio=lambda r, c: np.where(c.mask, c.logp - before(c.a.old_logp), F32(0)))


@wrong(LOSS, r"advantage-of-neighbour", also=r"when only other sequences change")
def advantage_of_the_next_sequence(problem: Any) -> Outputs:
    """The advantage is that of the next sequence."""
    return plain(problem, advantages=lambda a, c: np.roll(a, -1, 0))


@wrong(LOSS, r"sequence-mean-over-tokens|loss_type.*grpo|sequence_mean", loss_type="dapo")
def mean_over_sequences(problem: Any) -> Outputs:
    """The mean over sequences of their means, for the mean over tokens."""

    def weight(w: Any, c: Any) -> Any:
        return c.mask / np.maximum(c.mask.sum(-1, keepdims=True), 1).astype(F32) / F32(len(w))

    return plain(problem, weight=weight)


@wrong(LOSS, r"gradient-not-normalised", also=r"a factor that each batch has of its own")
def gradient_of_a_sum(problem: Any) -> Outputs:
    """The loss is a mean, its gradient that of a sum."""
    return plain(problem, upstream=lambda g, c: g * F32(max(c.mask.sum(), 1)))


@wrong(LOSS, r"kl-k3-gradient-of-k1", also=r"of each (token|sequence) are right up to a factor", beta=0.04, use_bias_correction_kl=False)
def kl_gradient_of_k1(problem: Any) -> Outputs:
    """The derivative of the KL penalty lacks its exponential."""
    return plain(problem, kl_slope=lambda g, c: np.where(c.mask, c.beta, F32(0)) * c.weight)


@wrong(LOSS, r"kl.*subtract", beta=0.04, use_bias_correction_kl=False)
def kl_subtracted(problem: Any) -> Outputs:
    """The KL penalty is subtracted."""
    return plain(problem, with_kl=lambda loss, c: c.policy_loss - c.beta * c.kl, kl_slope=lambda g, c: -g)


@wrong(LOSS, r"k1", beta=0.04, use_bias_correction_kl=False)
def kl_is_k1(problem: Any) -> Outputs:
    """The KL penalty is log p − log q."""
    return plain(problem, kl=lambda kl, c: -c.kl_difference, kl_slope=lambda g, c: np.where(c.mask, c.beta, F32(0)) * c.weight)


@wrong(LOSS, r"loss-without-kl", beta=0.04, use_bias_correction_kl=False)
def kl_not_in_loss(problem: Any) -> Outputs:
    """The loss leaves the penalty out, its gradient has it."""
    return plain(problem, with_kl=lambda loss, c: c.policy_loss)


@wrong(LOSS, r"sequence-ratio-of-sum", also=r"sequence_product", importance_sampling_level="sequence")
def sequence_ratio_of_the_sum(problem: Any) -> Outputs:
    """The sequence's ratio is exp of the sum of log-ratios."""
    return plain(problem, mean_log_ratio=lambda r, c: r * c.length, sequence_slope=lambda g, c: g * c.length)


@wrong(LOSS, r"sequence-share-forgotten", importance_sampling_level="sequence")
def sequence_gradient_without_its_length(problem: Any) -> Outputs:
    """The gradient of the mean log-ratio lacks 1/n."""
    return plain(problem, sequence_slope=lambda g, c: g * c.length)


# Bugs of published kernels: the softmax, and the arithmetic.
SOFTMAX = "softmax"


@wrong(SOFTMAX, r"temperature-forgotten\b(?!-)", also=r"temperature: 1|the default of mllm-jax", temperature=0.7)
def temperature_forgotten(problem: Any) -> Outputs:
    """Logits are not divided by the temperature."""
    return plain(problem, x=lambda x, c: logits_of(c), dlogits=lambda d, c: d * F32(c.spec["temperature"]))


@wrong(SOFTMAX, r"temperature-forgotten-in-gradient|dlogits are 0\.(70|699)\d* times", temperature=0.7)
def temperature_not_in_gradient(problem: Any) -> Outputs:
    """dlogits lack 1/T."""
    return plain(problem, dlogits=lambda d, c: d * F32(problem.spec.to_dict()["temperature"]))


@wrong(SOFTMAX, r"only the target has a gradient|non-target-dlogits-dropped")
def only_the_target(problem: Any) -> Outputs:
    """Only the sampled column has a gradient."""
    return plain(problem, dlogits=lambda d, c: np.where(columns(d) == c.ids[..., None], d, F32(0)))


@wrong(SOFTMAX, r"one-hot-forgotten")
def one_hot_forgotten(problem: Any) -> Outputs:
    """The sampled column has −p like all others."""
    return plain(problem, dlogits=lambda d, c: np.where(columns(d) == c.ids[..., None], -c.upstream[..., None] * c.p, d))


@wrong(SOFTMAX, r"id-off-by-one")
def id_off_by_one(problem: Any) -> Outputs:
    """The sampled id is the next one."""
    return plain(problem, ids=lambda ids, c: (ids + 1) % c.a.logits.shape[-1])


@wrong(SOFTMAX, r"rows-transposed|read as \[T,B,V\]", also=r"when only other (tokens of its sequence|sequences) change|when only what masked tokens hold changes")
def rows_transposed(problem: Any) -> Outputs:
    """Logits are read as `[T,B,V]`."""
    logits = problem.numpy().logits.astype(F32)
    return plain(problem, x=lambda x, c: logits.reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1))


@wrong(SOFTMAX, rf"{SUMS}|shard")
def sum_of_first_shard(problem: Any) -> Outputs:
    """The denominators of vocabulary shards are not added up: that of the first half is taken."""
    return plain(problem, total=lambda total, c: c.e[..., : max(c.e.shape[-1] // 2, 1)].sum(-1, keepdims=True))


@wrong(SOFTMAX, r"first-column-skipped|lack vocabulary entry 0 of", also=r"the dlogit of vocabulary entry 0 of")
def first_column_lost(problem: Any) -> Outputs:
    """Column 0 is taken for padding."""
    return plain(problem, e=lambda e, c: without(e, columns(e) == 0))


@wrong(SOFTMAX, r"sum-in-bf16|the sums of exponentials are numbers of bf16")
def sum_in_bf16(problem: Any) -> Outputs:
    """The denominator is accumulated in bf16."""

    def total(total: Any, c: Any) -> Any:
        total = F32(0)
        for tile in tiles(c.e, 256):
            total = (total + tile.sum(-1, keepdims=True)).astype(BF16).astype(F32)
        return total

    return plain(problem, total=total)


@wrong(SOFTMAX, r"sum of \d+ terms|one by one")
def sum_one_by_one(problem: Any) -> Outputs:
    """The denominator is added up in f32, one column after the other."""
    return plain(problem, total=lambda total, c: np.add.accumulate(c.e, -1)[..., -1:])


@wrong(SOFTMAX, r"probability-rounded|two roundings|bf16")
def gradient_rounded_twice(problem: Any) -> Outputs:
    """dlogits of bf16 logits are made of rounded probabilities."""
    return plain(problem, p=lambda p, c: p.astype(BF16).astype(F32) if c.dtype == "bf16" else p)


@wrong(SOFTMAX, r"truncation")
def gradient_truncated(problem: Any) -> Outputs:
    """dlogits are cut to bf16, not rounded."""

    def written(w: Any, c: Any) -> Any:
        return (c.dlogits.astype(F32).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32).astype(w.dtype)

    return plain(problem, written=lambda w, c: written(w, c) if c.dtype == "bf16" else w)


@wrong(SOFTMAX, r"stochastic")
def gradient_rounded_stochastically(problem: Any) -> Outputs:
    """dlogits are rounded to bf16 up or down by a fixed random number."""

    def written(w: Any, c: Any) -> Any:
        noise = np.random.default_rng(0).integers(0, 1 << 16, w.shape, np.uint32)
        bits = (c.dlogits.astype(F32).view(np.uint32) + noise) & np.uint32(0xFFFF0000)
        return bits.view(F32).astype(w.dtype)

    return plain(problem, written=lambda w, c: written(w, c) if c.dtype == "bf16" else w)


@wrong(SOFTMAX, r"TF32|tf32", lm_head=True)
def head_product_in_tf32(problem: Any) -> Outputs:
    """Hidden states and head are rounded to TF32 before their product."""

    def tf32(array: Any) -> Any:
        bits = np.ascontiguousarray(array).view(np.uint32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(F32)

    return plain(problem, x=lambda x, c: tf32(c.hidden) @ tf32(c.head).T)


@wrong(SOFTMAX, r"logp-in-logits-dtype|every value of logp is one of bf16")
def logp_in_bf16(problem: Any) -> Outputs:
    """logp of bf16 logits is rounded to bf16."""
    return plain(problem, logp=lambda logp, c: logp.astype(BF16).astype(F32) if c.dtype == "bf16" else logp)


@wrong(SOFTMAX, r"old-logp-in-bf16|old_logp", also=r"of each (token|sequence) are right up to a factor")
def old_logp_in_bf16(problem: Any) -> Outputs:
    """The old log-probability is stored in bf16."""
    return plain(problem, log_ratio=lambda r, c: np.where(c.mask, c.logp - c.a.old_logp.astype(BF16).astype(F32), F32(0)))
