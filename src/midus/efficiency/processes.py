"""A process for each model, so that no memory, cache or compiled code of one reaches the next.

Importing PyTorch and transformers takes longer than most measurements. A fork server imports them
once, without touching CUDA, and every process is forked from it.
"""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOADED = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "midus.efficiency.rows",
    "midus.models.fast",
]
_PATIENCE_S = 5.0

Send = Callable[[str, Any], None]
"""Tells the parent a kind of message and its content."""


def start_server() -> None:
    """Starts the server, if it does not run yet; it imports while the caller goes on."""
    from multiprocessing import forkserver

    # PyTorch's usual check asks the CUDA runtime, after which no fork may use CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _context().set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


def run_in_process(
    function: Callable[[Any, Send], None], argument: Any, receive: Callable[[str, Any], None]
) -> str | None:
    """Runs a function in a process of its own and hands on what it sends.

    Args:
        function: A module's function; what it is given and sends must be picklable.
        argument: Its first argument.
        receive: Gets the kind and content of every message.

    Returns:
        None, or a sentence on how the process ended where it did not end well.
    """
    start_server()
    parent, child = _context().Pipe(duplex=False)
    process = _context().Process(target=_run, args=(function, argument, child))
    process.start()
    child.close()
    try:
        while True:
            try:
                receive(*parent.recv())
            except EOFError:
                break
        process.join()
    finally:
        _end(process)
        parent.close()
    return None if process.exitcode == 0 else _how_it_ended(process.exitcode)


def _context() -> Any:
    return multiprocessing.get_context("forkserver")


def _run(function: Callable[[Any, Send], None], argument: Any, pipe: Connection) -> None:
    gc.freeze()  # what the server imported stays; collections between phases need not look at it
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        function(argument, lambda kind, content: pipe.send((kind, content)))
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)


def _follow_parent() -> None:
    """Ends this process when the one that asked for it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _end(process: Any) -> None:
    if process.is_alive():
        process.terminate()
        process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"
    return f"the process ended with code {code}"
