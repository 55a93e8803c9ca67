"""Interpolated modified Kneser-Ney with dictionaries, sum by sum as the paper writes it.

Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3.
`N(gram)` is c(gram) for the longest n-grams and N1+(. gram), the number of different tokens before
it, for shorter ones; `D` are the discounts and `gamma` is what they leave to the shorter context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

Gram = tuple[int, ...]


class KneserNey:
    """A model of `tokens`. Discounts are `usual` for orders whose counts n1 to n4 allow no
    estimate.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        order: int,
        vocabulary: int,
        usual: tuple[float, float, float] = (0.5, 1.0, 1.5),
    ) -> None:
        self.order, self.vocabulary, self.usual = order, vocabulary, usual
        self.estimated = []
        self.after: list[dict[Gram, dict[int, int]]] = []
        self.discounts: list[dict[int, float]] = []
        for n in range(1, order + 1):
            counts = self._counts(list(tokens), n)
            after: dict[Gram, dict[int, int]] = defaultdict(dict)
            for gram, count in counts.items():
                after[gram[:-1]][gram[-1]] = count
            self.after.append(after)
            self.discounts.append(self._discounts(list(counts.values())))

    def _counts(self, tokens: list[int], n: int) -> dict[Gram, int]:
        if n == self.order:
            counts: dict[Gram, int] = defaultdict(int)
            for i in range(len(tokens) - n + 1):
                counts[tuple(tokens[i : i + n])] += 1
            return counts
        before: dict[Gram, set[int]] = defaultdict(set)
        for i in range(1, len(tokens) - n + 1):
            before[tuple(tokens[i : i + n])].add(tokens[i - 1])
        return {gram: len(found) for gram, found in before.items()}

    def _discounts(self, counts: list[int]) -> dict[int, float]:
        n = {k: counts.count(k) for k in (1, 2, 3, 4)}
        if all(n.values()):
            y = n[1] / (n[1] + 2 * n[2])
            found = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
            if all(0 <= d <= k for k, d in enumerate(found, start=1)):
                self.estimated.append(True)
                return dict(enumerate(found, start=1))
        self.estimated.append(False)
        return dict(enumerate(self.usual, start=1))

    def probability(self, token: int, context: Sequence[int]) -> float:
        """p(token | context), of which the last order - 1 tokens count."""
        kept = tuple(context)[max(0, len(context) - self.order + 1) :]
        return self._probability(token, kept)

    def _probability(self, token: int, context: Gram) -> float:
        shorter = (
            self._probability(token, context[1:]) if len(context) > 0 else 1.0 / self.vocabulary
        )
        after = self.after[len(context)].get(context)
        if not after:
            return shorter
        discounts = self.discounts[len(context)]
        total = sum(after.values())
        n1 = sum(count == 1 for count in after.values())
        n2 = sum(count == 2 for count in after.values())
        n3 = sum(count >= 3 for count in after.values())
        gamma = (discounts[1] * n1 + discounts[2] * n2 + discounts[3] * n3) / total
        count = after.get(token, 0)
        discount = discounts[min(count, 3)] if count else 0.0
        return max(count - discount, 0.0) / total + gamma * shorter
