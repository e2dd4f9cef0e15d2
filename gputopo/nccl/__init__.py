"""What NCCL will do on a machine: its graph, its paths, its choice of NICs, P2P and GPUDirect RDMA.

:func:`predict` is the question that rules and reports ask; the rest is NCCL's view in steps: the
tree (:mod:`.xml`, :mod:`.build`), the graph (:mod:`.model`), its paths (:mod:`.paths`), the choices
that follow (:mod:`.plan`).
"""

from __future__ import annotations

from gputopo.nccl.predict import NcclChoice, Prediction, predict, prediction

__all__ = ["NcclChoice", "Prediction", "predict", "prediction"]
