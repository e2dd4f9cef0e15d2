"""Small readers that several probes share: numbers, words and CPU lists out of sysfs text."""

from __future__ import annotations

from gputopo.cpulist import parse, parse_mask, render
from gputopo.facts import Fact, Missing
from gputopo.host.base import Host
from gputopo.pciaddr import is_address


def integer(text: Fact[str]) -> Fact[int]:
    """A decimal number. A file with nothing in it has none; archives so keep what gave an error."""
    if isinstance(text, Missing):
        return text
    if not text.strip():
        return Missing("absent", "an empty file")
    try:
        return int(text.strip()[:20])
    except ValueError:
        return Missing("unparsed", f"not a number: {text[:40]!r}")


def hexadecimal(text: Fact[str]) -> Fact[int]:
    """A hexadecimal number, with or without 0x."""
    if isinstance(text, Missing):
        return text
    try:
        return int(text.strip()[:20], 16)
    except ValueError:
        return Missing("unparsed", f"not a hexadecimal number: {text[:40]!r}")


def base_name(link: Fact[str]) -> Fact[str]:
    """The last component of a link's target."""
    return link if isinstance(link, Missing) else link.rpartition("/")[2]


def cpus(host: Host, listed: str, mask: str) -> Fact[str]:
    """A CPU list from its list file, or from the mask file of kernels that lack it."""
    text = host.read_text(listed)
    try:
        if isinstance(text, str):
            return render(parse(text))
        masked = host.read_text(mask)
        return text if isinstance(masked, Missing) else render(parse_mask(masked))
    except ValueError as error:
        return Missing("unparsed", str(error))


def pci_parent(host: Host, entry: str) -> Fact[str]:
    """The PCI function that a /sys/class entry belongs to: the last address on its path.

    ``entry`` is the class entry without trailing slash.
    """
    missing = Missing("absent", "no PCI function")
    for link in (entry, f"{entry}/device"):
        target = host.read_link(link)
        if isinstance(target, Missing):
            missing = target
            continue
        for component in reversed(target.split("/")):
            if is_address(component):
                return component
    if is_virtual(host, entry):
        return Missing("absent", "a software device, no PCI function")
    return missing


def is_virtual(host: Host, entry: str) -> bool:
    """Whether a /sys/class entry is a software device: the kernel keeps those below virtual/."""
    target = host.read_link(entry)
    return isinstance(target, str) and "/virtual/" in target
