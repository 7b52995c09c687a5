"""Deals a dataset out to ranks by global batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How global batches are made from a dataset and which part of each is this rank's.

    Attributes:
        num_items: Items of the dataset.
        batch_size: Samples of a global batch.
        part: This rank's samples of each.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of that order; equal on every rank.
        drop_last: Whether a last batch that is not full is left out.
    """

    num_items: int
    batch_size: int
    part: slice
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = True


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields, for every global batch, the indices of this rank's samples.

    For ``DataLoader(dataset, batch_sampler=...)``. Together the ranks see each global batch as one
    process would see it with the same order. A rank that reads no samples gets the first of each
    batch, which its step leaves unread: a loader cannot make a batch of none.
    """

    def __init__(self, deal: Deal) -> None:
        self.deal = deal
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; without effect unless it shuffles."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The dataset's indices in the order of this epoch, the same on every rank."""
        deal = self.deal
        if not deal.shuffle:
            return list(range(deal.num_items))
        generator = torch.Generator().manual_seed(deal.seed + self.epoch)
        order: list[int] = torch.randperm(deal.num_items, generator=generator).tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order, size, part = self.order(), self.deal.batch_size, self.deal.part
        taken = slice(1) if part.start == part.stop else part
        for batch in range(len(self)):
            yield order[batch * size : (batch + 1) * size][taken]

    def __len__(self) -> int:
        full, rest = divmod(self.deal.num_items, self.deal.batch_size)
        return full + (1 if rest and not self.deal.drop_last else 0)
