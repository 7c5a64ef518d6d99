"""Tools, and how they are called: with checked arguments, under a deadline, and with every
failure shown to the model."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from msgspec import Struct

from instep.errors import ConfigError
from instep.generation.overtime import in_time
from instep.generation.text import clean, told
from instep.generation.tools.schema import Arguments
from instep.generation.types import Outcome, RequestId, ToolCall, ToolRecord
from instep.generation.waiting import bounded, held, is_for_us

logger = logging.getLogger(__name__)


class ToolDefinition(Struct, frozen=True):
    """The description of a tool that a model sees. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def openai(self) -> dict[str, Any]:
        """Returns the definition in the form of OpenAI's interface, which chat templates take
        too."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


class ToolOutput(Struct, frozen=True, kw_only=True):
    """A tool's answer. The model sees `text`, and `error` if there is one.

    reward: an environment's reward for this call. done: the sample ends here. role: the role of the
    message that shows the text.
    info: kept in the record.
    """

    text: str = ""
    error: str | None = None
    reward: float | None = None
    done: bool = False
    role: str = "tool"
    info: dict[str, Any] = {}


class Tool(Protocol):
    """A tool: a plain object with these methods, or the handle of a Ray actor that has them.

    `execute` takes the arguments by name. It may raise: the model is told. It must not block the
    event loop. When its time is over it is cancelled, and not waited for.
    """

    def describe(self) -> ToolDefinition: ...

    async def execute(self, **arguments: Any) -> ToolOutput | str: ...


@runtime_checkable
class Environment(Protocol):
    """A tool with a state for each sample: `session` is entered before its first turn and left
    after its last, whatever happens."""

    def describe(self) -> ToolDefinition: ...

    def session(self, id: RequestId, config: dict[str, Any]) -> AbstractAsyncContextManager[Tool]: ...


class _Connected(NamedTuple):
    definition: ToolDefinition
    arguments: Arguments
    tool: Any


class ToolSet:
    """Tools by name. Each is asked once for its definition.

    tools = await ToolSet.connect([PythonTool(), search_actor_handle])
    async with tools.opened(request_id, names=("python",), config={}, within=60.0) as mine:
        record = await mine.call(ToolCall("python", {"code": "print(1)"}), within=10.0)
    """

    def __init__(self, connected: Mapping[str, _Connected] | None = None) -> None:
        self._tools = dict(connected or {})

    @classmethod
    async def connect(cls, tools: Sequence[Any], *, within: float = 60.0) -> ToolSet:
        """Makes a set of these tools. Raises `ConfigError` for a tool that breaks the contract
        or does not answer `within` seconds, and for two tools of one name."""
        connected: dict[str, _Connected] = {}
        for tool in tools:
            definition = await _describe(tool, within)
            if definition.name in connected:
                raise ConfigError(f"two tools are called {definition.name!r}")
            connected[definition.name] = _Connected(definition, Arguments(definition.parameters), tool)
        return cls(connected)

    @property
    def definitions(self) -> list[ToolDefinition]:
        return [connected.definition for connected in self._tools.values()]

    def __len__(self) -> int:
        return len(self._tools)

    def select(self, names: Sequence[str] | None) -> ToolSet:
        """Returns the tools of these names; None means all. Raises `ConfigError` for a name that
        no tool has."""
        if names is None:
            return self
        if missing := sorted(set(names) - set(self._tools)):
            raise ConfigError(f"there is no tool {', '.join(missing)}; there are {', '.join(self._tools) or 'none'}")
        return ToolSet({name: self._tools[name] for name in names})

    @asynccontextmanager
    async def opened(
        self, id: RequestId, *, names: Sequence[str] | None, config: Mapping[str, dict[str, Any]], within: float
    ) -> AsyncIterator[ToolSet]:
        """Opens the tools of one sample, with a session of each environment. Opening all may
        take `within` seconds, and closing all too."""
        opened = dict(self.select(names)._tools)
        sessions = AsyncExitStack()
        try:
            async with asyncio.timeout(within):
                for name, (definition, arguments, tool) in opened.items():
                    if _remote(tool, "execute") is None and isinstance(tool, Environment):
                        session = await sessions.enter_async_context(held(tool.session(id, config.get(name, {})), within))
                        opened[name] = _Connected(definition, arguments, session)
            yield ToolSet(opened)
        finally:
            try:
                async with asyncio.timeout(within):
                    await sessions.aclose()
            except BaseException as error:  # what the sample said is worth more than its environment
                if is_for_us(error):
                    raise
                logger.exception("an environment of sample %s did not close", id)

    async def call(self, call: ToolCall, *, within: float, turn: int = 0) -> ToolRecord:
        """Calls a tool. Never raises what the tool raises, and never takes longer than `within`
        seconds."""
        started = time.perf_counter()
        outcome, output, arguments = await self._answer(call, within)
        return ToolRecord(
            tool=call.name, turn=turn, outcome=outcome, arguments=arguments, output=output.text, error=output.error,
            seconds=time.perf_counter() - started, role=output.role, reward=output.reward, done=output.done, info=output.info,
        )  # fmt: skip

    async def _answer(self, call: ToolCall, within: float) -> tuple[Outcome, ToolOutput, dict[str, Any]]:
        if call.error is not None:
            return "malformed", ToolOutput(error=call.error), call.arguments
        connected = self._tools.get(call.name)
        if connected is None:
            error = f"there is no tool {call.name}; there are {', '.join(self._tools) or 'none'}"
            return "unknown", ToolOutput(error=error), call.arguments
        try:
            arguments = await in_time(lambda: connected.arguments.read(call.arguments), within)
        except TimeoutError:
            return "malformed", ToolOutput(error=f"the arguments could not be read in {within:g} seconds"), call.arguments
        except ValueError as problem:
            return "malformed", ToolOutput(error=str(problem)), call.arguments
        try:
            answer = await bounded(_execute(connected.tool, arguments), within)
        except TimeoutError:
            return "timeout", ToolOutput(error=f"{call.name} did not answer in {within:g} seconds"), arguments
        except Exception as raised:
            cause = getattr(raised, "cause", None)  # Ray wraps what an actor raised, with its traceback
            return "error", ToolOutput(error=told(cause if isinstance(cause, Exception) else raised)), arguments
        output = _output(call.name, answer)
        return ("ok" if output.error is None else "error"), output, arguments


def _output(name: str, answer: Any) -> ToolOutput:
    """Returns a tool's answer with fields of the types that `ToolOutput` declares. A wrong type
    is reported in the error."""
    if not isinstance(answer, ToolOutput):
        try:
            return ToolOutput(text=clean(str(answer)))
        except Exception as error:
            return ToolOutput(error=f"what {name} answered has no text: {told(error)}")
    fields: dict[str, Any] = {}
    wrong = []
    for field, kind in (("text", str), ("error", str | None), ("role", str), ("info", dict), ("done", bool)):
        if isinstance(value := getattr(answer, field), kind):
            fields[field] = clean(value) if isinstance(value, str) else value
        else:
            wrong.append(f"{field} is of type {type(value).__name__}")
    if answer.reward is not None:
        fields["reward"] = _number(answer.reward)
        if not math.isfinite(fields["reward"]):
            wrong.append(f"reward is {_shown(answer.reward)}, no finite number")
    if wrong:
        said = [f"{name} answered what no tool may: {', '.join(wrong)}", fields.get("error")]
        fields["error"] = "; ".join(filter(None, said))
    return ToolOutput(**fields)


def _shown(value: Any) -> str:
    try:
        return clean(repr(value))[:100]
    except Exception:
        return f"of type {type(value).__name__}"


def _number(value: Any) -> float:
    """Returns the value as a float; NaN if it is no number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:
        return math.nan


def _remote(tool: Any, method: str) -> Any:
    """Returns the `remote` function of a method of a Ray actor's handle; None for a plain
    object."""
    return getattr(getattr(tool, method, None), "remote", None)


async def _describe(tool: Any, within: float) -> ToolDefinition:
    name = type(tool).__name__
    if remote := _remote(tool, "describe"):
        try:
            definition = await bounded(_await(remote()), within)
        except TimeoutError as error:
            raise ConfigError(f"the tool {tool!r} did not describe itself in {within:g} seconds") from error
    else:
        if not isinstance(tool, Environment) and not inspect.iscoroutinefunction(getattr(tool, "execute", None)):
            raise ConfigError(f"{name} is no tool: `execute` must be an async method; blocking work belongs into `asyncio.to_thread`")
        definition = tool.describe()
    if not isinstance(definition, ToolDefinition):
        raise ConfigError(f"{name}.describe must return a ToolDefinition, not {type(definition).__name__}")
    return definition


async def _execute(tool: Any, arguments: dict[str, Any]) -> Any:
    remote = _remote(tool, "execute")
    if remote is None:
        return await cast("Tool", tool).execute(**arguments)
    reference = remote(**arguments)
    try:
        return await _await(reference)
    except asyncio.CancelledError:
        if ray := sys.modules.get("ray"):  # whoever has a handle has Ray; without this a hanging call keeps its place in the actor
            ray.cancel(reference)
        raise


async def _await(reference: Any) -> Any:
    return await reference
