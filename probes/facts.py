"""What all probes found, by probe: the input of the topology and, beside it, of the rules."""

from __future__ import annotations

import msgspec

from gputopo.facts import ABSENT, Fact
from gputopo.probes.cpu import CpuFacts
from gputopo.probes.kernel_log import KernelLog
from gputopo.probes.net import NetFacts
from gputopo.probes.numa import NumaFacts
from gputopo.probes.nvidia_smi import SmiMatrix
from gputopo.probes.nvml import NvmlFacts
from gputopo.probes.pci import PciFacts
from gputopo.probes.rdma import RdmaFacts
from gputopo.probes.system import SystemFacts


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts by the name of their probe; missing as a whole where the probe got nothing."""

    pci: Fact[PciFacts] = ABSENT
    numa: Fact[NumaFacts] = ABSENT
    cpu: Fact[CpuFacts] = ABSENT
    rdma: Fact[RdmaFacts] = ABSENT
    net: Fact[NetFacts] = ABSENT
    system: Fact[SystemFacts] = ABSENT
    kernel_log: Fact[KernelLog] = ABSENT
    nvml: Fact[NvmlFacts] = ABSENT
    nvidia_smi: Fact[SmiMatrix] = ABSENT
