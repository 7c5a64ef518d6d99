"""Checks of `instep serve` before vLLM is imported, which takes half a minute."""

from __future__ import annotations

import os
import socket
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.cli import hub
from instep.engine.remote.http_token import is_loopback
from instep.errors import ConfigError

PORT = "8000"  # vLLM's default


def check(model: str, flags: Sequence[str], token: str | None) -> None:
    """Raises `ConfigError` for a model that does not exist, an address where the server cannot
    listen, and one where anybody could push to it.

    flags: vLLM's. What they leave to a file (`--config`) is looked at when vLLM has read it.
    """
    given = _given(flags)
    check_servers(given)
    if "hf_token" not in given and not os.environ.get("VLLM_USE_MODELSCOPE"):
        check_model(model)
    if "headless" in given or "uds" in given:
        return
    file = "config" in given
    if token is None and "host" in given:
        check_host(given["host"])
    if not file or {"host", "port"} <= given.keys():
        check_port(given.get("host", "" if token else "127.0.0.1"), given.get("port", PORT))


def check_servers(given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for several API servers or another front end. given: vLLM's flags by
    name, as text or as vLLM has parsed them."""
    count = str(given.get("api_server_count") or 1)
    if count.isdigit() and int(count) > 1:
        text = "instep serve has one API server: others would not know which version is served"
        raise ConfigError(text, next_step="--api-server-count 1")
    for flag in ("grpc", "data_parallel_multi_port_external_lb"):
        if given.get(flag):
            raise ConfigError(f"instep serve cannot push to a server with --{flag.replace('_', '-')}")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        text = "instep serve needs vLLM's front end in Python"
        raise ConfigError(text, next_step="unset VLLM_USE_RUST_FRONTEND")


def check_model(model: str) -> None:
    """Raises `ConfigError` for a model that does not exist. model: as vLLM takes it, a
    directory, a file or a Hub id. Object stores are not asked."""
    if "://" in model or Path(model).exists():
        return
    repository = model.partition(":")[0]  # after the colon comes a quantisation of GGUF
    if not hub.in_cache(repository):
        hub.found(repository, hub.CONFIGS)


def check_host(host: str) -> None:
    """Raises `ConfigError` if a server without a token would listen beyond the loopback."""
    if not is_loopback(host):
        raise ConfigError(
            f"--host {host} without a token: anybody who reaches it could replace the weights",
            next_step="set INSTEP_TOKEN, or leave --host away",
        )


def check_port(host: str, port: str) -> None:
    """Raises `ConfigError` if the port cannot be bound, tried as vLLM binds it later. host:
    empty for all interfaces. port: one that is no number is left to vLLM."""
    if not port.isdigit():
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            text = f"cannot listen at {host or 'all interfaces'} port {port}: {error}"
            raise ConfigError(text, next_step="choose another --port, or end what listens there") from None


def _given(flags: Sequence[str]) -> dict[str, Any]:
    """Returns the given flags of vLLM that matter here. vLLM takes `_` for `-` in their names."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for name in ("--host", "--port", "--uds", "--config", "--hf-token", "--api-server-count"):
        parser.add_argument(name, nargs="?")
    for name in ("--headless", "--grpc", "--data-parallel-multi-port-external-lb"):
        parser.add_argument(name, action="store_true")
    found = vars(parser.parse_known_args([_dashed(flag) for flag in flags])[0])
    return {name: value for name, value in found.items() if value is not None}


def _dashed(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value if flag.startswith("--") else flag
