"""Attention matching by the book: all rows of the least squares written out, in float64."""

from __future__ import annotations

import numpy as np


def naive_factors(
    gave: np.ndarray,
    values: np.ndarray,
    stays: list[int],
    answers: np.ndarray,
    pull: float,
) -> np.ndarray:
    """The factors of one head's slots that stay.

    Args:
        gave: the share of its attention that each query gave each slot [group, queries, slots].
        values: the slots' values, projected as for the output of each query head
            [group, slots, dim].
        stays: which slots stay.
        answers: the layer's answers to the queries, projected in the same way
            [group, queries, dim].
        pull: how strongly factors are drawn towards 1.
    """
    size = np.sqrt((values**2).sum(axis=2).mean())
    rows, wanted = [], []
    for group, query in np.ndindex(answers.shape[:2]):
        shares = gave[group, query]
        rows.append(shares[stays])
        wanted.append(shares.sum())
        moves = shares[:, None] * (values[group] - answers[group, query]) / size
        rows.extend(moves[stays].T)
        wanted.extend(moves.sum(axis=0))
    lengths = (np.array(rows) ** 2).sum(axis=0).mean()
    for one in np.eye(len(stays)):
        rows.append(np.sqrt(pull * lengths) * one)
        wanted.append(np.sqrt(pull * lengths))
    return np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
