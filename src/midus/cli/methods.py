"""`midus methods`: every method and memory layer, what it does and where it is written."""

from midus.cli import options


def methods(as_json: options.AsJson = False) -> None:
    """List the up-scaling methods and memory layers."""
    from midus.cli import console
    from midus.upscaling.catalogue import list_memory_layers, list_methods

    if as_json:
        console.print_json({"methods": list_methods(), "memory_layers": list_memory_layers()})
        return
    console.print_rows("method", list_methods())
    console.print_rows("memory layer, for --method midus", list_memory_layers())
