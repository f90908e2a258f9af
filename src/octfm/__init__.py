"""octfm: self-supervised pretraining on 3-D retinal OCT, from files to a frozen encoder and its evaluation.

catalog = octfm.scan("clinic/oct/")
store   = octfm.prepare(catalog, "prepared/", octfm.Preprocessing())
run     = octfm.pretrain(octfm.load_config("vit_s"), store, out="runs/vit_s")
encoder = octfm.load_encoder("runs/vit_s")
vector  = encoder.embed(octfm.read_volume("scan.dcm"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

from octfm.version import __version__

if TYPE_CHECKING:
    from octfm import formats as formats
    from octfm.catalog.catalog import Catalog
    from octfm.catalog.scan import scan
    from octfm.encoder.encoder import Encoder, load_encoder
    from octfm.encoder.export import export
    from octfm.encoder.hub import OctEncoder
    from octfm.encoder.prototype import load_prototype_encoder
    from octfm.encoder.tuned import TunedModel, load_tuned
    from octfm.errors import OctfmError
    from octfm.evaluation.probe import probe
    from octfm.evaluation.results import Result, read_result
    from octfm.formats import read_volume
    from octfm.layers.segment import ScanSegmentation, segment
    from octfm.phantom import write_phantom
    from octfm.pretraining.pretrain import pretrain
    from octfm.pretraining.settings import PretrainConfig, load_config
    from octfm.report.html import write_report
    from octfm.store.prepare import prepare
    from octfm.store.store import Store
    from octfm.tasks.segment import load_segmenter
    from octfm.volume.preprocessing import Preprocessing
    from octfm.volume.volume import Volume

_HOME = {
    "Catalog": "octfm.catalog.catalog",
    "scan": "octfm.catalog.scan",
    "write_phantom": "octfm.phantom",
    "prepare": "octfm.store.prepare",
    "Preprocessing": "octfm.volume.preprocessing",
    "read_volume": "octfm.formats",
    "segment": "octfm.layers.segment",
    "ScanSegmentation": "octfm.layers.segment",
    "Store": "octfm.store.store",
    "Volume": "octfm.volume.volume",
    "OctfmError": "octfm.errors",
    "Encoder": "octfm.encoder.encoder",
    "load_encoder": "octfm.encoder.encoder",
    "load_prototype_encoder": "octfm.encoder.prototype",
    "load_tuned": "octfm.encoder.tuned",
    "load_segmenter": "octfm.tasks.segment",
    "TunedModel": "octfm.encoder.tuned",
    "export": "octfm.encoder.export",
    "OctEncoder": "octfm.encoder.hub",
    "probe": "octfm.evaluation.probe",
    "read_result": "octfm.evaluation.results",
    "Result": "octfm.evaluation.results",
    "write_report": "octfm.report.html",
    "pretrain": "octfm.pretraining.pretrain",
    "PretrainConfig": "octfm.pretraining.settings",
    "load_config": "octfm.pretraining.settings",
}
"""The module of each public name, imported on first use, so that `import octfm` is fast."""

# Written out, because type checkers evaluate nothing, and take no other name for public.
__all__ = [
    "Catalog",
    "Encoder",
    "OctEncoder",
    "OctfmError",
    "Preprocessing",
    "PretrainConfig",
    "Result",
    "ScanSegmentation",
    "Store",
    "TunedModel",
    "Volume",
    "__version__",
    "export",
    "load_config",
    "load_encoder",
    "load_prototype_encoder",
    "load_segmenter",
    "load_tuned",
    "prepare",
    "pretrain",
    "probe",
    "read_result",
    "read_volume",
    "scan",
    "segment",
    "write_phantom",
    "write_report",
]


if not TYPE_CHECKING:  # type checkers would take any name

    def __getattr__(name: str):
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        if name == "formats":  # octfm.formats.read_surfaces and its like, after `import octfm` alone
            return import_module("octfm.formats")
        raise AttributeError(f"module 'octfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
