"""An interpolated trigram model with absolute discounting: what the checkpoint has to beat."""

from __future__ import annotations

import numpy as np

DISCOUNT = 0.75


class Grams:
    """Counts of n-grams and of their contexts, looked up by packed integers."""

    def __init__(self, contexts: np.ndarray, tokens: np.ndarray, vocab: int) -> None:
        self.vocab = vocab
        self.grams, self.counts = np.unique(contexts * vocab + tokens, return_counts=True)
        owner = self.grams // vocab
        first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        self.contexts = owner[first]
        self.totals = np.add.reduceat(self.counts, first)
        self.kinds = np.diff(np.r_[first, len(owner)])

    @staticmethod
    def find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places [n] in a sorted table and whether they are hits [n]."""
        at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
        return at, table[at] == wanted

    def probability(
        self, contexts: np.ndarray, tokens: np.ndarray, lower: np.ndarray
    ) -> np.ndarray:
        """Discounted, the rest given to the lower order: [n]."""
        at, hit = self.find(self.grams, contexts * self.vocab + tokens)
        count = np.where(hit, self.counts[at], 0)
        at, known = self.find(self.contexts, contexts)
        total = np.where(known, self.totals[at], 1)
        kept = np.maximum(count - DISCOUNT, 0) / total
        return np.where(known, kept + DISCOUNT * self.kinds[at] / total * lower, lower)


def cross_entropy(train: np.ndarray, test: np.ndarray, vocab: int) -> float:
    """Nats a token of test [n], contexts crossing no boundary but the start."""
    t, x = train.astype(np.int64), test.astype(np.int64)
    single = np.bincount(t, minlength=vocab) + 1.0
    chance = single[x[2:]] / single.sum()
    two = Grams(t[:-1], t[1:], vocab)
    chance = two.probability(x[1:-1], x[2:], chance)
    del two
    three = Grams(t[:-2] * vocab + t[1:-1], t[2:], vocab)
    chance = three.probability(x[:-2] * vocab + x[1:-1], x[2:], chance)
    return float(-np.log(chance).mean())
