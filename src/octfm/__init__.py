"""octfm: the 3D OCT foundation model, built to be trusted.

catalog = octfm.scan("clinic/oct/")
store   = octfm.prepare(catalog, "prepared/", octfm.Preprocessing())
run     = octfm.pretrain(octfm.load_config("vit_s"), store, out="runs/vit_s")
encoder = octfm.load_encoder("runs/vit_s")
vector  = encoder.embed(octfm.read_volume("scan.dcm"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octfm.data.catalog import Catalog, scan
    from octfm.data.phantom import write_phantom
    from octfm.data.prepare import prepare
    from octfm.data.preprocessing import Preprocessing
    from octfm.data.readers import read_volume
    from octfm.data.store import Store
    from octfm.data.volume import Volume
    from octfm.errors import OctfmError
    from octfm.evaluation.encoder import Encoder, load_encoder
    from octfm.evaluation.export import export
    from octfm.evaluation.hub import OctEncoder
    from octfm.evaluation.probe import probe
    from octfm.evaluation.prototype import load_prototype_encoder
    from octfm.evaluation.tuned import TunedModel, load_tuned
    from octfm.report.html import write_report
    from octfm.training.pretrain import pretrain
    from octfm.training.settings import PretrainConfig, load_config

_HOME = {
    "Catalog": "octfm.data.catalog",
    "scan": "octfm.data.catalog",
    "write_phantom": "octfm.data.phantom",
    "prepare": "octfm.data.prepare",
    "Preprocessing": "octfm.data.preprocessing",
    "read_volume": "octfm.data.readers",
    "Store": "octfm.data.store",
    "Volume": "octfm.data.volume",
    "OctfmError": "octfm.errors",
    "Encoder": "octfm.evaluation.encoder",
    "load_encoder": "octfm.evaluation.encoder",
    "load_prototype_encoder": "octfm.evaluation.prototype",
    "load_tuned": "octfm.evaluation.tuned",
    "TunedModel": "octfm.evaluation.tuned",
    "export": "octfm.evaluation.export",
    "OctEncoder": "octfm.evaluation.hub",
    "probe": "octfm.evaluation.probe",
    "write_report": "octfm.report.html",
    "pretrain": "octfm.training.pretrain",
    "PretrainConfig": "octfm.training.settings",
    "load_config": "octfm.training.settings",
}
"""Where each public name lives; imported on first use, so that `import octfm` costs nothing."""

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'octfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
