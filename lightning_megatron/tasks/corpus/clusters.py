"""Near-duplicates: locality-sensitive hashing of MinHash signatures, and clusters of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lightning_megatron.tasks.corpus.signatures import (
    NUM_HASHES,
    Signatures,
    band_keys,
    least_equal,
    rows_of_bands,
)

Numbers = npt.NDArray[np.int64]
# Number of documents whose signatures are read from disk at a time.
_BLOCK = 1 << 14


class UnionFind:
    """Disjoint sets of the numbers below ``size``, each represented by its smallest member."""

    def __init__(self, size: int) -> None:
        self.parents: Numbers = np.arange(size, dtype=np.int64)

    def find(self, member: int) -> int:
        """Return the smallest member of the set of a member."""
        parents = self.parents
        while parents[member] != member:
            parents[member] = parents[parents[member]]
            member = int(parents[member])
        return member

    def join(self, member: int, partner: int) -> None:
        """Unite the sets of two members."""
        first, second = sorted((self.find(member), self.find(partner)))
        self.parents[second] = first

    def roots(self) -> Numbers:
        """Return the smallest member of the set of every number."""
        while True:
            above = self.parents[self.parents]
            if np.array_equal(above, self.parents):
                return above
            self.parents = above


def find_clusters(
    signatures: Signatures,
    active: npt.NDArray[np.bool_],
    threshold: float,
    progress: Callable[[], object] = lambda: None,
) -> Numbers:
    """Return for each document the first document of its cluster.

    Clusters are the connected components of all pairs of active documents whose estimated
    similarity is at least the threshold. No such pair is missed.

    Shapes: signatures (N, 128), active (N,) -> (N,).

    Args:
        signatures: Signatures of the documents, such as a memory-mapped file.
        active: Which documents are compared; each of the others is its own cluster.
        progress: Function that is called after each band.
    """
    sets = UnionFind(len(signatures))
    members = np.flatnonzero(active)
    # Merge documents with equal signatures before the bands: a page may occur a million times.
    for group in _mixed_groups(_keys(signatures, members, 0, NUM_HASHES), sets.roots()[members]):
        rows = members[group]
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK]
            equal = (signatures[block] == signatures[rows[0]]).all(axis=1)
            sets.parents[block[equal]] = rows[0]
    members = members[sets.parents[members] == members]
    rows_per_band = rows_of_bands(threshold)
    for start in range(0, NUM_HASHES - rows_per_band + 1, rows_per_band):
        keys = _keys(signatures, members, start, rows_per_band)
        for group in _mixed_groups(keys, sets.roots()[members]):
            _join_similar(members[group], signatures, sets, least_equal(threshold))
        progress()
    return sets.roots()


def find_matches(signatures: Signatures, tests: Signatures, threshold: float) -> Numbers:
    """Return for each document the first test document that is similar to it, or -1.

    The result equals that of a comparison of all documents with all test documents.

    Shapes: signatures (N, 128), tests (T, 128) -> (N,).
    """
    need = least_equal(threshold)
    rows = rows_of_bands(threshold)
    matches = np.full(len(signatures), len(tests), dtype=np.int64)
    for first in range(0, len(signatures), _BLOCK):
        block = np.asarray(signatures[first : first + _BLOCK])
        for start in range(0, NUM_HASHES - rows + 1, rows):
            test_keys = band_keys(tests, start, rows)
            order = np.argsort(test_keys, kind="stable")
            keys = band_keys(block, start, rows)
            low = np.searchsorted(test_keys, keys, side="left", sorter=order)
            high = np.searchsorted(test_keys, keys, side="right", sorter=order)
            for number in np.flatnonzero(low < high):
                candidates = order[low[number] : high[number]]
                equal = (tests[candidates] == block[number]).sum(axis=1) >= need
                if equal.any():
                    best = int(candidates[equal].min())
                    matches[first + number] = min(matches[first + number], best)
    matches[matches == len(tests)] = -1
    return matches


def _keys(
    signatures: Signatures, members: Numbers, start: int, rows: int
) -> npt.NDArray[np.uint64]:
    keys = np.empty(len(members), dtype=np.uint64)
    for first in range(0, len(members), _BLOCK):
        block = signatures[members[first : first + _BLOCK]]
        keys[first : first + _BLOCK] = band_keys(block, start, rows)
    return keys


def _mixed_groups(keys: npt.NDArray[np.uint64], roots: Numbers) -> Iterator[Numbers]:
    """Yield the ascending indices of each group of equal keys that spans several sets."""
    if not len(keys):
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ends = np.append(starts[1:], len(keys))
    ordered_roots = roots[order]
    lowest = np.minimum.reduceat(ordered_roots, starts)
    highest = np.maximum.reduceat(ordered_roots, starts)
    for group in np.flatnonzero(lowest != highest):
        yield order[starts[group] : ends[group]]


def _join_similar(members: Numbers, signatures: Signatures, sets: UnionFind, need: int) -> None:
    """Unite all similar pairs of a group, comparing only documents of different sets."""
    rows = np.asarray(signatures[members])
    roots = np.array([sets.find(int(member)) for member in members])
    for number in range(len(members) - 1):
        candidates = number + 1 + np.flatnonzero(roots[number + 1 :] != roots[number])
        if not len(candidates):
            continue
        similar = candidates[(rows[candidates] == rows[number]).sum(axis=1) >= need]
        for root in np.unique(roots[similar]):
            sets.join(int(roots[number]), int(root))
            new = min(int(roots[number]), int(root))
            roots[(roots == root) | (roots == roots[number])] = new
