"""A plain training loop for `accelerate launch`: MODEL OUT.json."""

import json
import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import midus  # noqa: F401  # registers the up-scaled classes
from midus.training.distributed import leave_together

if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    model.freeze_base()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.5))
    rows = torch.arange(48).view(4, 12) * 7 % 90 + 5
    share = rows.chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(share, labels=share).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        with open(sys.argv[2], "w") as file:
            json.dump({"processes": accelerator.num_processes, "losses": losses}, file)
    leave_together()
