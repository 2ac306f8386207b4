"""The network interface that process groups bind to."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def interface_of(address: str) -> str | None:
    """The name of this host's interface with that IPv4 address; None if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def bind_process_groups(address: str) -> None:
    """Make gloo, NCCL and HCCL of this process use the interface with `address`.

    They would otherwise guess from the host name, which on many machines resolves to a loopback address.
    """
    interface = interface_of(address)
    if interface is not None:
        for library in ("GLOO", "NCCL", "HCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
