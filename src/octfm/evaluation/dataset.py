"""The volumes of a store as a PyTorch dataset, with labels joined and each participant in one split, as evaluated."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from octfm.catalog.labels import read_labels
from octfm.catalog.participants.ids import under_one_id
from octfm.display import box, brief, counted, number
from octfm.encoder.embeddings import of_store
from octfm.errors import ConfigError, EvaluationError, shown
from octfm.evaluation.cases import Skip, find_target, label_columns, make_cases
from octfm.store.selection import select
from octfm.store.store import Store
from octfm.volume.volume import ADMISSIBLE, MODALITIES, Modality

Item = dict[str, Any]


class VolumeDataset(Dataset):
    """Volumes of a store by index, for a DataLoader with any number of workers, forked or spawned.

    An item is a dict, which the DataLoader stacks to a batch:

    voxels  uint8 [1, D, H, W]: prepared voxels, as `encoder.network.forward_features` takes them; padding is 0
    band    float32 [2, D, W]: upper and lower surface of the tissue band, in rows
    valid   int16 [2, D, W]: first image row and one past the last
    index   int: the row of the store, `store.rows[index]` with participant, eye and scanner
    label   int64, index of the class in `classes`; float32 for a number; absent without labels

    Classes are numbered over the whole store, so that the datasets of two splits agree. Volumes without a label are
    left out. Nothing is augmented; `transform`, a function of the item, may do so.
    """

    def __init__(
        self,
        store: Store,
        rows: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        target: str = "",
        classes: tuple[str, ...] | None = None,
        split: str | None = None,
        transform: Callable[[Item], Any] | None = None,
    ):
        """`rows` int64 [N] of the store, and their labels [N], if there are any; `dataset_of` finds both."""
        self.store, self.rows, self.labels = store, rows, labels
        self.target, self.classes, self.split, self.transform = target, classes, split, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Raises IndexError outside the dataset, StoreError for a damaged volume."""
        row = int(self.rows[operator.index(index)])
        arrays = self.store.read([row])
        item: Item = {
            "voxels": torch.from_numpy(arrays.voxels),
            "band": torch.from_numpy(arrays.band[0]),
            "valid": torch.from_numpy(arrays.valid[0]),
            "index": row,
        }
        if self.labels is not None:
            item["label"] = torch.as_tensor(self.labels[index])
        return item if self.transform is None else self.transform(item)

    @property
    def participants(self) -> list[str]:
        """The participant of each item, for scores and intervals by participant."""
        return [self.store.rows[row].participant for row in self.rows]

    def __repr__(self) -> str:
        facts = self._described()
        return brief("VolumeDataset", facts["volumes"], f"split {facts['split']}", facts["label"])

    def _repr_html_(self) -> str:
        return box("Dataset of a store", self._described())

    def _described(self) -> dict[str, str]:
        people = number(len(set(under_one_id(self.participants))), "participant")
        label = ""
        if self.labels is not None and self.classes is None:
            label = f"{self.target} from {self.labels.min():g} to {self.labels.max():g}"
        elif self.labels is not None:
            assert self.classes is not None
            label = f"{self.target}: {counted(Counter(self.classes[k] for k in self.labels.tolist()))}"
        return {"volumes": f"{number(len(self), 'volume')} of {people}", "split": self.split or "all", "label": label}


def dataset_of(
    store: Store,
    labels: Any,
    *,
    target: str | None,
    split: str | None,
    modalities: Sequence[Modality],
    transform: Callable[[Item], Any] | None,
) -> VolumeDataset:
    """What `Store.as_torch` returns; its docstring has the arguments and errors."""
    if transform is not None and not callable(transform):
        raise ConfigError(f"transform: expected a function of an item, got {shown(transform)}")
    if isinstance(modalities, str) or not modalities or not {*modalities} <= {*MODALITIES}:
        raise ConfigError(f'modalities: expected ("structure",), ("octa",) or both, got {shown(modalities)}')
    # Also raises for a participant in two splits, whichever split is wanted.
    rows = select(store, split, layouts=ADMISSIBLE, modalities=modalities)
    if labels is None and target is None:
        return VolumeDataset(store, rows, split=split, transform=transform)
    data, table = of_store(store), read_labels(labels) if labels is not None else None
    if target is not None and not (isinstance(target, str) and target):
        raise EvaluationError(
            f"target: expected the name of a label column, got {shown(target)}; "
            f"columns: {', '.join(sorted(label_columns(data, table))) or 'there is none'}"
        )
    own = table.columns if table is not None else ()
    if target is None and len(own) != 1:
        raise EvaluationError(f"target: name one of the label columns: {', '.join(own) or 'there is none'}")
    name = target or next(iter(own))
    try:
        cases = make_cases(find_target(name, data, table), data, table)
    except Skip as reason:
        raise reason.refusal(name) from None
    kept = np.isin(cases.rows, rows)
    if not kept.any():
        raise EvaluationError(
            f"{store.path}: no volume of split {split} has a label in {cases.target.column}; label some of its "
            "participants, or take another split"
        )
    values = cases.label[kept].astype(np.float32 if cases.classes is None else np.int64)
    return VolumeDataset(
        store,
        cases.rows[kept].astype(np.int64),
        values,
        target=cases.target.name,
        classes=cases.classes,
        split=split,
        transform=transform,
    )
