"""Stored grown models with filled tables, as users of other programs have them."""

from tiny import fill_tables, load, save_base

from midus import MemoryConfig, UpscaleConfig, upscale


def save_grown(folder, family="llama", kind="hml", bypass="none", **overrides):
    """Folders ``base``, ``full`` and ``delta``; the grown model comes back."""
    save_base(folder / "base", family, **overrides)
    config = UpscaleConfig(memory=MemoryConfig(kind=kind, num_subkeys=8, bypass=bypass))
    model = fill_tables(upscale(load(folder / "base"), config), scale=0.3)
    model.save_pretrained(folder / "full")
    model.save_pretrained(folder / "delta", delta=True)
    return model.eval()
