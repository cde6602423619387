"""A data loader that knows how far it has come."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from shardd._places import rank_and_world


class _Batches(Sampler):
    """The batches of one epoch for one rank, from `start` on: as DistributedSampler's, every rank
    has equally many, and the last indices are filled up from the first."""

    def __init__(self, loader: "ResumableLoader") -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[List[int]]:
        loader = self._loader
        order = loader._order()
        size = loader.batch_size
        for batch in range(loader.batches, len(loader)):
            yield order[batch * size:(batch + 1) * size]

    def __len__(self) -> int:
        return len(self._loader) - self._loader.batches


class ResumableLoader:
    """Batches of a map-style dataset, shuffled by (seed, epoch), from where the last committed
    step was.

        loader = opt.attach_state(shardd.ResumableLoader(dataset, batch_size=8, seed=1))
        while loader.epoch < epochs:
            for batch in loader: ...

    Each loop over it goes through what is left of the epoch; at its end `epoch` is one more. Ranks
    get disjoint batches. `drop_last` as in DataLoader; other arguments go to DataLoader.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, seed: int = 0, shuffle: bool = True,
                 drop_last: bool = False, rank: Optional[int] = None,
                 world_size: Optional[int] = None, num_workers: int = 0,
                 collate_fn: Optional[Callable] = None, **arguments: Any) -> None:
        place = rank_and_world()
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.rank = place[0] if rank is None else rank
        self.world_size = place[1] if world_size is None else world_size
        self.epoch = 0
        self.batches = 0  # of this epoch that were handed out
        # A generator of its own for the workers' seeds: else each loop would draw from torch's,
        # and a rank that begins in the middle of an epoch would draw otherwise than before.
        arguments.setdefault("generator", torch.Generator().manual_seed(seed))
        self._loader = DataLoader(dataset, batch_sampler=_Batches(self), num_workers=num_workers,
                                  collate_fn=collate_fn, **arguments)

    def _order(self) -> List[int]:
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        else:
            order = list(range(count))
        each = -(-count // self.world_size)
        filled = order + order[:each * self.world_size - count]
        return filled[self.rank::self.world_size]

    def __len__(self) -> int:
        each = -(-len(self.dataset) // self.world_size)  # type: ignore[arg-type]
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.batches += 1  # before it is computed with: a step that is committed has used it
            yield batch
        self.epoch += 1
        self.batches = 0

    def state_dict(self) -> Dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches, "seed": self.seed}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        self.epoch, self.batches, self.seed = state["epoch"], state["batches"], state["seed"]
