"""One run as `torchrun` starts it; writes what the test compares."""

import json
import sys
from pathlib import Path

from runs import make_options
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from midus.training import run as runs_module
from midus.training.distributed import leave_together


class Gradients(TrainerCallback):
    """Whole gradients of every step, and how the model is wrapped."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for name, parameter in self.trainer._bare_model().named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                self.gradients[f"{state.global_step}.{name}"] = whole.clone()


def main(
    folder: Path, name: str, sharding: str, per_device: int, control: str, resume: bool
) -> None:
    options = make_options(
        folder, name, precision="float64", sharding=sharding, batch_size=4, control=control,
        optimizer={"recipe": "short", "relative_lr": 3e-3},  # which the first rank has to measure
        trainer={"per_device_train_batch_size": per_device, "max_steps": 6, "save_steps": 3},
    )  # fmt: skip
    seen = {}
    real = runs_module.make_trainer

    def make_trainer(*args, **kwargs):
        made = real(*args, **kwargs)
        seen["trainer"] = made[0]
        seen["callback"] = Gradients(made[0])
        made[0].add_callback(seen["callback"])
        return made

    runs_module.make_trainer = make_trainer
    runs_module.train(options, resume=resume)
    trainer = seen["trainer"]
    if trainer.args.process_index == 0:
        facts = {
            "world_size": trainer.args.world_size,
            "type": str(trainer.accelerator.distributed_type),
            "wrapped": type(trainer.model_wrapped).__name__,
            "sharded": sum(isinstance(p, DTensor) for p in trainer.model.parameters()),
            "parameters": sum(1 for _ in trainer.model.parameters()),
        }
        (folder / name / "facts.json").write_text(json.dumps(facts))
        save_file(seen["callback"].gradients, folder / name / "gradients.safetensors")
    leave_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), sys.argv[5], "resume" in sys.argv)
