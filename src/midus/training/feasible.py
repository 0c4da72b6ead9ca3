"""What a run asks for that cannot be, refused before texts are cut and weights are read."""

from typing import Any

from midus.errors import MidusError
from midus.models.fitting import refuse_too_long
from midus.models.record import inserted_positions, record_of
from midus.training.options import TrainOptions
from midus.training.starting import planned_config

_PRODUCT_KEYS = ("hml", "pkm")


def refuse_impossible(
    options: TrainOptions, is_sharded: bool = False, base_config: Any = None
) -> None:
    """Refuses blocks that the base cannot have, and options that exclude each other.

    Args:
        options: The run.
        is_sharded: Whether its weights are split over processes.
        base_config: Config of ``options.model`` where it is known already.
    """
    planned = planned_config(options, base_config)
    is_whole_cpt = options.stage == "cpt" and not is_sharded
    if options.optimizer.matrices == "muon" and is_sharded:
        raise MidusError(
            "optimizer.matrices='muon' needs whole matrices, and sharding=fsdp2 splits them; leave "
            "one of them out"
        )
    if options.optimizer.is_by_stream and not is_whole_cpt:
        raise MidusError(
            "by_stream in optimizer.parts is for stage cpt without sharding; leave it out"
        )
    if options.stage == "cpt":
        refuse_too_long(options.data.seq_len, planned, "data.seq_len")
    if options.load_in_4bit:
        _refuse_in_4bit(options, planned)
    if options.key_start != "queries":
        return
    if not is_whole_cpt:
        raise MidusError(
            "key_start='queries' is for stage cpt without sharding; grow the model in such a run"
        )
    if options.control != "none" or record_of(planned).get("memory") not in _PRODUCT_KEYS:
        raise MidusError(
            "key_start='queries' needs memory layers with product keys (hml, pkm); leave it out"
        )


def _refuse_in_4bit(options: TrainOptions, planned: Any) -> None:
    if options.control == "last_layers":
        raise MidusError(
            "control='last_layers' trains blocks of the base, which load_in_4bit packs; leave one "
            "of them out"
        )
    grows_copies = options.upscale is not None and options.upscale.method != "midus"
    if options.control == "none" and (grows_copies or not inserted_positions(planned)):
        raise MidusError(
            "load_in_4bit trains memory blocks beside a packed base, or control: lora; use "
            "upscale.method: midus, or leave it out"
        )
