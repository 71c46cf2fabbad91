"""The vital signs that `excite.watch` measures by default for models with attention."""

from __future__ import annotations

from excite._core.calls import Pick
from excite._core.checks import check_count
from excite.probes.base import Every, Probe
from excite.probes.gradient_norm import GradientNorm
from excite.probes.update_ratio import UpdateRatio
from excite.probes.vital_signs.adam_moments import AdamMoments
from excite.probes.vital_signs.attention_logits import AttentionLogits
from excite.probes.vital_signs.attention_spectrum import AttentionSpectrum
from excite.probes.vital_signs.critical_sharpness import CriticalSharpness
from excite.probes.vital_signs.dead_units import DeadUnits
from excite.probes.vital_signs.log_normalizer import LogNormalizer
from excite.probes.vital_signs.residual_stream import ResidualStream
from excite.probes.vital_signs.token_rank import TokenRank

_APART = 5  # times as many steps between measurements that run the model on more tokens or several times


def vital_signs(every: int = 50, output: Pick = None) -> list[Probe]:
    """Probes of the vital signs of a transformer.

    `excite.watch` adds them to its defaults for models with attention: those with a module whose class is named after it.

    Args:
        every: Steps between two measurements; ranks of tokens and critical sharpness are measured every 5 · `every` steps, each
            at steps of its own.
        output: Which part of the model's return value holds the logits; by default ``logits`` if there is one.

    Returns:
        New probes.

    Raises:
        InputError: If `every` is not a whole number of at least 1.

    Example:
        >>> from excite.probes import Loss, vital_signs
        >>> [probe.name for probe in vital_signs(every=100)]
        ['dead', 'attention', 'qk', 'residual', ...]
    """
    every = check_count(every, "vital_signs: every")
    return [
        DeadUnits(Every(every)),  # first: its pass is the one that the next ones share
        AttentionLogits(Every(every)),
        AttentionSpectrum(Every(every), output),
        ResidualStream(Every(every)),
        LogNormalizer(Every(every), output),
        GradientNorm(Every(every)),
        UpdateRatio(Every(every)),
        AdamMoments(Every(every)),
        # Apart from the others and from each other: on a GPU the training hides what the host needs for one of them.
        TokenRank(Every(_APART * every, offset=every // 2)),
        CriticalSharpness(Every(_APART * every, offset=every + every // 2)),
    ]
