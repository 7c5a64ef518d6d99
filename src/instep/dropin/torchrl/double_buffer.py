"""`VLLMDoubleBufferSyncScheme`: the trainer writes versions into a directory, engines load the
newest when they are ready for it."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from instep.dropin.torchrl.context import FromContext
from instep.dropin.torchrl.directory import Buffer, buffer, newest, write
from instep.dropin.torchrl.scheme import LocalPush, Scheme, Strategy
from instep.dropin.torchrl.weights import open_weights
from instep.errors import ConfigError, SourceError

AGAIN = 0.05  # seconds between two looks for a new version
logger = logging.getLogger("instep")


def checked(num_threads: int) -> int:
    if num_threads < 1:
        raise ConfigError(f"num_threads must be 1 or more, not {num_threads}")
    return num_threads


class VLLMDoubleBufferSyncScheme(Scheme):
    """Weights by way of a directory that holds two buffers.

    remote_addr: the directory as the trainer sees it. local_addr: as the engines see it, where that
    is another path.
    num_threads: 1 or more. Copies and digests use the threads that torch has, however many these
    are.
    settings: those of `instep.WeightSync`, for the engines' side.

    Raises `ConfigError` for what cannot be meant.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
        **settings: Any,
    ) -> None:
        super().__init__(strategy, settings)
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = checked(num_threads)

    def create_transport(self, **unknown: Any) -> VLLMDoubleBufferTransport:
        """The directory. The original takes any keyword and drops it; here it is refused."""
        if unknown:
            raise ConfigError(f"create_transport takes no arguments, not {', '.join(unknown)}")
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any = None) -> VLLMDoubleBufferWeightReceiver:
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


class VLLMDoubleBufferTransport:
    """The directory: two buffers, one of which is the newest."""

    def __init__(self, remote_addr: str, local_addr: str | None = None, num_threads: int = 1) -> None:
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = checked(num_threads)
        self._name, self._written = secrets.token_hex(4), 0

    def send_weights(self, model_id: str, weights: Any) -> str:
        """Writes a new version and returns its name. Raises what `write` raises. model_id: for the
        log."""
        self._written += 1
        version = f"{self._name}-{self._written}"
        write(Path(self.remote_addr), open_weights(weights), version)
        logger.info("%s of %s is written to %s", version, model_id, self.remote_addr)
        return version

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None) -> Any:
        """The newest version's tensors by their names, read and compared with their digests: a
        TensorDict, or a dict where tensordict is not installed.

        timeout: seconds to wait for a first version; not at all by default. The other arguments,
        which the original takes and drops, are refused.

        Raises `SourceError` where there is none, and for a buffer that is not whole.
        """
        if any(given is not None for given in (weights, model, strategy)):
            raise ConfigError("what is in the directory is returned: weights, model and strategy cannot change it")
        if (found := self.newest(timeout)) is None:
            raise SourceError(f"nothing was written to {self.local_addr} yet")
        with closing(found):
            tensors = dict(found.tensors())
            tensors.update({meta.name: tensors[meta.alias_of] for meta in found.metadata() if meta.alias_of is not None})
        try:
            from tensordict import TensorDict
        except ImportError:
            return tensors
        return TensorDict(tensors, [])

    def newest(self, timeout: float | None = None, than: str | None = None) -> Buffer | None:
        """The newest version if it is another one `than` this; None where there is none within
        `timeout` seconds, by default at once.

        Raises `SourceError` for a buffer that is not whole.
        """
        deadline = time.monotonic() + (timeout or 0.0)
        directory = Path(self.local_addr)
        while True:
            if (slot := newest(directory)) is not None:
                found = Buffer(buffer(directory, slot))
                if found.version != than:
                    return found
                found.close()
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(AGAIN, max(0.0, deadline - time.monotonic())))

    def check_connection(self) -> bool:
        return Path(self.local_addr).is_dir()


class VLLMDoubleBufferWeightSender:
    """The trainer's side."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._transport = scheme.create_transport()
        self.model: Any = None

    def register_model(self, model: Any) -> None:
        """The model whose weights `update_weights()` writes. It is kept alive."""
        self.model = model

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Refused: the directory is the way."""
        raise ConfigError(f"weights go by {self._transport.remote_addr}: worker {worker_idx} needs no {type(pipe_or_context).__name__}")

    def update_weights(self, weights: Any = None) -> str:
        """Writes these weights, those of the registered model by default. Returns the version's
        name."""
        weights = self.model if weights is None else weights
        if weights is None:
            raise ConfigError("there are no weights to write", next_step="register a model, or give the weights")
        return self._transport.send_weights("vllm_model", weights)

    def shutdown(self) -> None:
        """The directory stays."""


class VLLMDoubleBufferWeightReceiver(FromContext):
    """The engine's side, in the engine's process.

    version: what was loaded last.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any = None) -> None:
        super().__init__(vllm_engine)
        self._transport, self._settings = scheme.create_transport(), scheme.settings
        self._local: LocalPush | None = None
        self.version: str | None = None

    def register_model(self, model_ref: Any) -> None:
        super().register_model(model_ref)
        self._local, self.version = None, None

    def register_worker_transport(self, pipe: Any) -> None:
        """Refused: the directory is the way."""
        raise ConfigError(f"weights come by {self._transport.local_addr}: no {type(pipe).__name__} is needed")

    def poll_and_apply(self, timeout: float | None = None) -> bool:
        """Loads the newest version if it is not loaded yet.

        timeout: seconds to wait for a version that is not loaded yet; False where none came. Left
        out, nothing is waited for: True where the engine serves the newest version now, as TorchRL
        says it.

        Raises `SourceError` where nothing was written yet and nothing is waited for, and for a
        buffer that is not what its writer wrote. Raises what `WeightSync.push` raises.
        """
        found = self._transport.newest(timeout, self.version)
        if found is None:
            if timeout is None and self.version is None:
                raise SourceError(f"nothing was written to {self._transport.local_addr} yet")
            return timeout is None
        with closing(found):
            self._to_engine().push(found, found.version)
        self.version = found.version
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Brings weights at hand to the engine."""
        if not inplace:
            raise ValueError("an engine's weights are changed in place")
        self._to_engine().push(open_weights(weights))

    def _to_engine(self) -> LocalPush:
        self._local = self._local or LocalPush(self._engine(), self._settings)
        return self._local
