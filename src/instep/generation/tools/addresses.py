"""Decides which addresses a tool may reach: none within the host's own networks, unless allowed."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from instep.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TRANSLATED = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96")))
"""IPv6 networks whose addresses stand for the IPv4 address in their last 32 bits."""
METADATA = ipaddress.IPv4Network("192.0.0.0/24")
"""The network of one cloud's metadata, which some versions of Python call global."""


class InsideError(OSError):
    """A connection was refused because its address is within the host's networks."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "its address is within this host's networks, and `allow` does not list it")


class Reachable:
    """Creates sockets for addresses that may be reached. aiohttp calls this for each connection,
    after name resolution.

    allow: addresses and networks that may be reached although they are within the host's, such as
    `10.0.0.0/8`.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        try:
            self.allow: list[Network] = [ipaddress.ip_network(one, strict=False) for one in allow]
        except ValueError as error:
            raise ConfigError(f"allow takes addresses and networks such as 10.0.0.0/8: {error}") from error

    def __call__(self, found: tuple[Any, ...]) -> socket.socket:
        """Creates a socket for aiohttp. Raises `InsideError` for an address that may not be
        reached."""
        family, kind, protocol, _, address = found
        if not self.permits(address[0]):
            raise InsideError
        return socket.socket(family, kind, protocol)

    def permits(self, host: str) -> bool:
        """Whether an address may be reached."""
        meant = meanings(ipaddress.ip_address(host.partition("%")[0]))
        if any(address in network for address in meant for network in self.allow if address.version == network.version):
            return True
        return all(map(outside, meant))


def outside(address: Address) -> bool:
    """Whether an address is public on the Internet."""
    inside = address.is_multicast or address.is_reserved or address.is_unspecified or address in METADATA
    # Some versions of Python call every 6to4 address private. What it leads to is looked at by
    # itself.
    leads_on = isinstance(address, ipaddress.IPv6Address) and address.sixtofour is not None
    return (address.is_global or leads_on) and not inside


def meanings(address: Address) -> list[Address]:
    """Returns the addresses to check for one: the IPv4 address that it stands for, or itself and
    those that it leads through."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if any(address in network for network in TRANSLATED) and int(address) > 1:  # "::1" is a name of its own
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address, *(one for one in (address.sixtofour, *(address.teredo or ())) if one is not None)]


def literal(host: str) -> bool:
    """Whether a host is an address rather than a name."""
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True
