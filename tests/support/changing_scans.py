"""What may happen to the files of a clinic's scans, as rules of a state machine; tests add rules for what octfm does."""

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from PIL import Image

SLOTS = ("2025/1", "2025/2", "2026/1", "2026/2")
"""Places of scans; each has at most one, with or without a sidecar."""
SPACING_MM = (0.2, 0.004, 0.05)
SCANS = [np.random.default_rng(seed).integers(0, 255, (3, 200, 120)).astype(np.uint8) for seed in range(3)]


class ChangingScans(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.dates = itertools.count(10**18, 10**9)
        for slot in SLOTS:
            (self.folder / slot).parent.mkdir(exist_ok=True)

    def teardown(self):
        shutil.rmtree(self.folder)

    def files(self, slot):
        """An archive of NumPy or a folder of images, and a sidecar, as far as they are there."""
        place = self.folder / slot
        return [file for file in (place.with_suffix(".npz"), place, place.with_suffix(".json")) if file.exists()]

    def sources(self):
        return [str(file) for slot in SLOTS for file in self.files(slot) if file.suffix != ".json"]

    def changed(self, file):
        """Give it a new date, since two writes may have one."""
        os.utime(file, ns=(now := next(self.dates), now))

    @initialize(scans=st.permutations(range(3)))
    def begin(self, scans):
        for slot, scan in zip(SLOTS, scans, strict=False):
            self.save(slot, scan, images=False)

    @rule(slot=st.sampled_from(SLOTS), scan=st.integers(0, 2), images=st.booleans())
    def save(self, slot, scan, images):
        self.delete(slot)
        place = self.folder / slot
        if images:
            place.mkdir()
            for number, bscan in enumerate(SCANS[scan]):
                Image.fromarray(bscan).save(place / f"{number}.png")
                self.changed(place / f"{number}.png")
        else:
            np.savez(place.with_suffix(".npz"), volume=SCANS[scan], spacing_mm=SPACING_MM)
            self.changed(place.with_suffix(".npz"))

    @rule(slot=st.sampled_from(SLOTS), eye=st.sampled_from(["R", "L", "left or right", ""]))
    def state_in_a_sidecar(self, slot, eye):
        place = (self.folder / slot).with_suffix(".json")
        place.write_text(json.dumps({"spacing_mm": SPACING_MM, "laterality": eye}))
        self.changed(place)

    @rule(slot=st.sampled_from(SLOTS), damaged=st.booleans())
    def damage_or_touch(self, slot, damaged):
        for each in self.files(slot):
            for file in each.iterdir() if each.is_dir() else [each]:
                file.write_bytes(file.read_bytes()[: 70 if damaged else None])
                self.changed(file)

    @rule(slot=st.sampled_from(SLOTS))
    def delete(self, slot):
        for each in self.files(slot):
            shutil.rmtree(each) if each.is_dir() else each.unlink()

    @rule(slot=st.sampled_from(SLOTS), to=st.sampled_from(SLOTS), keep=st.booleans())
    def rename_or_copy(self, slot, to, keep):
        if slot != to and (files := self.files(slot)):
            self.delete(to)
            for each in files:
                copy = shutil.copytree if each.is_dir() else shutil.copy2
                copy(each, (self.folder / to).with_suffix(each.suffix))
            if not keep:
                self.delete(slot)

    @rule()
    def exchange_folders(self):
        for name, to in (("2025", "other"), ("2026", "2025"), ("other", "2026")):
            (self.folder / name).rename(self.folder / to)
