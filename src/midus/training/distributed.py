"""Several processes: who reads first, and sharding that stays sharding on a CPU."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FSDP2 = {
    "version": 2,
    "reshard_after_forward": True,
    # The first rank alone reads the weights; the others receive their share.
    "cpu_ram_efficient_loading": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def keep_sharding_on_cpu(trainer: Any) -> None:
    """Turns FSDP2 on where accelerate leaves it out: it shards on GPUs only, and says nothing.

    torch's own ``fully_shard`` works on gloo, which is how sharding is tested without GPUs.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    wanted = trainer.args.fsdp_plugin_args
    if wanted is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    # The other state copies its type from this one whenever it is made anew.
    PartialState().distributed_type = DistributedType.FSDP
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**wanted)
    trainer.is_fsdp_enabled = True


@contextmanager
def first_rank_first() -> Iterator[None]:
    """The first process of each machine goes in before the others."""
    from accelerate import PartialState

    with PartialState().local_main_process_first():
        yield


def from_first_rank(value: Any) -> Any:
    """What the first rank holds, on every rank."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    if PartialState().num_processes == 1:
        return value
    return broadcast_object_list([value])[0]


def is_first_rank() -> bool:
    """Whether this process speaks for the run."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def leave_together() -> None:
    """Ends a process of several once all are here; a process on its own just goes on.

    gloo's threads drop their last tensors when they get to it, and a thread that does so while the
    interpreter is torn down aborts a run that is done (pytorch#190489). Destroying the group ends
    them only if nothing else holds it, and a sharded model does. So what is due at exit is done
    here, and the interpreter is never torn down.
    """
    from accelerate import PartialState

    world = PartialState()
    if world.num_processes == 1:
        return
    world.wait_for_everyone()
    world.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as any exit does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
