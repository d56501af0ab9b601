"""How large activations get around each matrix: what float16 and eight bits must hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibrate.ranks import Ranks
from calibrate.rows import column_absmax

SAMPLED_ROWS = 16  # every sixteenth row goes into the magnitude histogram
SAMPLE = 4096  # and of many rows that many
BINS = 1024  # over log2 of the magnitude
EXACT = 1 << 24  # values histc counts at once: its float32 counts stop there
LOWEST, HIGHEST = -24.0, 17.0  # log2; float16's smallest subnormal and just past its largest
OUTLIER = 10.0  # times the median channel's largest magnitude


@dataclass
class Ranges:
    """One matrix's input and output magnitudes, summed over forwards."""

    channel_absmax: Tensor  # [in]
    histogram: Tensor  # float64 [BINS], counts of log2 |input|
    _outputs: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of_width(columns: int, device: torch.device) -> Ranges:
        histogram = torch.zeros(BINS, dtype=torch.float64, device=device)
        return Ranges(torch.zeros(columns, device=device), histogram)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Takes in x [rows, in] and y [rows, out]; either may have no rows."""
        if y.numel():
            self._outputs.append(column_absmax(y).amax())
        if not x.numel():
            return
        self.channel_absmax = torch.maximum(self.channel_absmax, column_absmax(x))
        sample = (
            x[:: max(SAMPLED_ROWS, len(x) // SAMPLE)]
            .float()
            .abs()
            .clamp(min=2**LOWEST, max=2**HIGHEST)
            .log2()
        )
        for part in sample.flatten().split(EXACT):
            self.histogram += torch.histc(part, BINS, LOWEST, HIGHEST).double()

    def of_all(self, ranks: Ranks) -> Ranges:
        """Returns what all ranks saw, each of its own tokens."""
        found = Ranges(ranks.largest(self.channel_absmax), ranks.add(self.histogram))
        found._outputs = self._outputs
        found.share_outputs(ranks)
        return found

    def share_outputs(self, ranks: Ranks) -> None:
        """Takes in the outputs that other ranks saw."""
        largest = torch.stack([self.channel_absmax.new_zeros(()), *self._outputs]).max()
        self._outputs = [ranks.largest(largest)]

    def with_input_of(self, other: Ranges) -> Ranges:
        """Returns these outputs with another's input."""
        return replace(self, channel_absmax=other.channel_absmax, histogram=other.histogram)

    @property
    def output_absmax(self) -> float:
        return float(torch.stack(self._outputs).max()) if self._outputs else 0.0

    @property
    def input_absmax(self) -> float:
        return float(self.channel_absmax.max())

    @property
    def input_p999(self) -> float:
        """The 99.9th percentile of |input|, to the histogram's 3 %."""
        share = self.histogram.cumsum(0) / self.histogram.sum().clamp(min=1)
        place = int((share < 0.999).sum())
        upper = 2 ** (LOWEST + (HIGHEST - LOWEST) * (place + 1) / BINS)
        return min(upper, self.input_absmax)

    @property
    def outlier_channels(self) -> int:
        """Input channels whose largest magnitude is over ten times the median channel's."""
        return int((self.channel_absmax > OUTLIER * self.channel_absmax.median()).sum())
