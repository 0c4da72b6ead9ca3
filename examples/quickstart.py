"""Grow the embedded SmolLM2-135M in memory and show that nothing changed (a CPU will do)."""

import torch

import midus
from midus.models.loading import load_model, load_tokenizer

tokenizer = load_tokenizer("smollm2-135m")
base = load_model("smollm2-135m")
model = midus.upscale(base, midus.UpscaleConfig(num_inserted=15))

trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
total = sum(p.numel() for p in model.parameters())
depth = f"{len(base.model.layers)} -> {len(model.model.layers)} blocks"
print(f"{depth}, {trainable:,} of {total:,} parameters train")

inputs = tokenizer("Call me Ishmael.", return_tensors="pt").to(base.device)
with torch.no_grad():
    difference = (model(**inputs).logits - base(**inputs).logits).abs().max().item()
print(f"largest |Δ logit|: {difference}")
