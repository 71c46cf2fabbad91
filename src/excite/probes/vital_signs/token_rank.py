"""Rank of the tokens within a sequence, apart from the rank over sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from excite._core.calls import call, own_copy
from excite._core.checks import check_count
from excite._core.intercept.cast_linears import cast_linears
from excite._core.intercept.padded_rows import padded_weights
from excite.errors import InputError, ModelError
from excite.probes.activation_rank.covariance import Covariances
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, answered_rank, fall, number, since
from excite.probes.vital_signs.sample import block_outputs, few_sequences, running
from excite.probes.vital_signs.tokens import at_places, even_places, token_mask, wide
from excite.wiring.normalization import as_trained


def sequence_means(x: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean over the tokens of each sequence, (sequences, tokens, width) -> (sequences, width)."""
    if tokens is None or tokens.shape != x.shape[:-1]:
        return x.mean(-2, dtype=wide(x[:0]).dtype)
    x = wide(x)
    counted = (tokens != 0)[..., None].to(x.dtype)
    return (counted * x).sum(-2) / counted.sum(-2)


def without_padding(x: Tensor, tokens: Tensor | None = None, places: Tensor | None = None) -> Tensor:
    """The tokens of each sequence at some places, None for all; padding is replaced by the mean of the others.

    That adds nothing to the covariance but a factor, which the effective rank does not see.
    """
    rows = wide(at_places(x, places, 1))
    if tokens is None or tokens.shape != x.shape[:-1]:
        return rows
    tokens = at_places(tokens, places, 1)
    return torch.where((tokens != 0)[..., None], rows, sequence_means(rows, tokens)[:, None, :])


class TokenRank(Probe):
    """Effective rank of the residual stream, of the tokens within a sequence and over sequences.

    Records, per block:
        ``token_rank/within/BLOCK``: effective rank of the tokens of one sequence (at most 128 of them, at even distances) around
        their mean; mean over sequences.
        ``token_rank/between/BLOCK``: effective rank of the means of the sequences; at most the number of sequences − 1.

    The effective rank is the exponential of the entropy of the normalized eigenvalues of the covariance (`effective_rank`). A rank
    that pools the tokens of all sequences cannot tell a collapse of tokens onto one vector within every sequence, which deep
    attention tends to, from sequences that are all alike.

    Padding, as the ``attention_mask`` of the example says it, does not count.

    Args:
        schedule: When to measure. Default: every 250 steps.
        sequences: Number of sequences of the example.

    Raises:
        InputError: If `sequences` is not a whole number of at least 1.

    Example:
        >>> from excite.probes import Every, TokenRank
        >>> probe = TokenRank(Every(500), sequences=16)
    """

    name = "token_rank"
    reduction = "mean"
    requires = ("example",)
    panel = Panel(
        "token-rank",
        "Rank of tokens",
        "Effective rank of the residual stream after each block: of the tokens within a sequence, and of the means of sequences. "
        "Tokens that all become one vector show as a rank within that falls to 1.",
        (("within", "rank within a sequence"), ("between", "rank over sequences")),
        order=32,
        heatmap=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None, sequences: int = 8):
        super().__init__(Every(250) if schedule is None else schedule)
        self.sequences = check_count(sequences, "TokenRank: sequences")

    def attach(self, ctx: StepContext) -> None:
        """Checks that blocks return one vector per token."""
        if not self._rows(ctx):
            raise ModelError("expected blocks that return (sequences, tokens, width); found none")

    @torch.no_grad()
    def _rows(self, ctx: StepContext) -> dict[str, tuple[Tensor, Tensor]]:
        """Of every block (sequences, tokens, width) at some tokens and (sequences, width), by path."""
        if ctx.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        batch = few_sequences(ctx.example, self.sequences)
        tokens = token_mask(batch)

        places: dict[tuple[int, torch.device], Tensor | None] = {}

        def rows_of(x: Tensor) -> tuple[Tensor, Tensor] | None:
            if x.dim() != 3:
                return None
            if (key := (x.shape[1], x.device)) not in places:
                places[key] = even_places(x.shape[1], device=x.device)
            return without_padding(x, tokens, places[key]), sequence_means(x, tokens)

        with (
            running(self.sequences),
            as_trained(ctx.model, batch),
            block_outputs(ctx.model, rows_of) as rows_by_path,
            padded_weights(ctx.model),
            cast_linears(ctx.model),
        ):
            call(ctx.model, own_copy(batch))
        return {path: rows for path, rows in rows_by_path.items() if rows is not None}

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures both ranks on the sample."""
        stacks: dict[tuple[int, ...], list[Tensor]] = {}  # of one shape together
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for path, (within, means) in self._rows(ctx).items():
            for name, rows in ((f"within/{path}", within), (f"between/{path}", means[None])):
                if rows is within or len(means) > 1:
                    stacks.setdefault(tuple(rows.shape[1:]), []).append(rows)
                    by_shape.setdefault(tuple(rows.shape[1:]), []).extend([name] * len(rows))
        names = [name for several in by_shape.values() for name in several]
        covariances = Covariances([torch.cat(several) for several in stacks.values()])

        def compute() -> Values:
            ranks: dict[str, list[float]] = {}
            for name, spectrum in zip(names, covariances.spectra()):
                ranks.setdefault(name, []).append(float(spectrum.effective_rank))
            return {name: sum(several) / len(several) for name, several in ranks.items()}

        return Deferred(compute) if covariances.apart else compute()

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        falls = {path: fall(series) for path, series in history.layers("token_rank/within").items()}
        low = {path: down for path, down in falls.items() if down is not None and down.large and down.now < 2}
        if not low:
            return []
        path = min(low, key=lambda name: low[name].now)
        down = low[path]
        if answered_rank(history) is not None:  # then every token of a sequence encodes the answer
            return []
        return [Finding("warning", f"Tokens of a sequence became alike after {path}: their rank fell from {number(down.before)} to "
                                   f"{number(down.now)} {since(down)}.", "Look at the entropy of attention in this block.")]  # fmt: skip
