"""What a user can ask for: the memory layer and the up-scaling, checked on creation.

Each option is written once, as a field with a docstring under it; the command line reads its
help text from here (`field_help`).
"""

import ast
import inspect
import textwrap
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from midus.errors import MidusError

QUERY_NORMS = ("none", "batch", "layer")
VALUE_KINDS = ("hive", "shared", "independent")
BYPASSES = ("none", "attention", "stream", "both", "joined")
KEY_INITS = ("uniform", "normal")
VALUE_PROJ_INITS = ("normal", "identity")
# Far beyond any use, and small enough that no product of sizes overflows.
_LARGEST_SIZE = 65_536


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise MidusError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


def _names(config: Any, field_name: str) -> None:
    value = getattr(config, field_name)
    if not isinstance(value, str):
        raise MidusError(f"{field_name}={value!r} must be a name")


def _whole_number(name: str, value: Any, smallest: int, largest: int) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not (is_number and smallest <= value <= largest):
        raise MidusError(
            f"{name}={value!r} must be a whole number from {smallest:,} to {largest:,}"
        )


def _scale(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Zero would stop every gradient at the start.
    if not (is_number and 1e-6 <= value <= 1e6):
        raise MidusError(f"{name}={value!r} must be a number from 1e-06 to 1e+06")


def _from_dict(cls: type[Any], values: dict[str, Any]) -> Any:
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            raise MidusError(
                f"unknown option {key!r} for {cls.__name__}; known options: {', '.join(known)}"
            )
    return cls(**values)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The memory layer of every inserted block (paper, Section 4.2)."""

    kind: str = "hml"
    """Memory layer: hml (the paper's), linear, pkm or ultramem."""
    num_subkeys: int = 64
    """Row and column sub-keys per head (paper: n); a head addresses n * n slots."""
    top_k: int = 4
    """Slots retrieved per head and token (paper: k)."""
    latent_dim: int | None = None
    """Width of HML's latent value table (paper: r); default: the width one head writes."""
    values: str = "hive"
    """HML's values: hive, shared (one bank for all heads) or independent (one bank a head)."""
    query_norm: str = "none"
    """Norm on the memory queries: none, batch (BatchNorm1d) or layer (LayerNorm per head)."""
    attention_residual: bool | None = None
    """Add the block's input to the attention before the memory; default: all but hml."""
    attn_output_proj: bool | None = None
    """Keep the attention's output projection before the memory; default: all but hml."""
    query_proj: bool | None = None
    """Project what the memory reads into queries; default: all but hml."""
    memory_output_proj: bool = False
    """Add a linear map after the memory, started as the identity (beyond the paper)."""
    bypass: str = "none"
    """A linear map beside the memory, started at zero: none, attention (of what attention found),
    stream (of what attention reads), both, or joined (of what attention and memory found, added
    up); beyond the paper."""
    key_init: str = "uniform"
    """Start of the sub-keys: uniform in ±1/sqrt(width) or normal with std 1/sqrt(width)."""
    value_proj_init: str = "normal"
    """Start of the head projections W_h: normal with std r^-0.5, or identity."""
    key_scale: float = 1.0
    """What the sub-keys' start is multiplied by (beyond the paper)."""
    value_proj_scale: float = 1.0
    """What the start of the head projections W_h is multiplied by (beyond the paper)."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        _whole_number("num_subkeys", self.num_subkeys, 1, _LARGEST_SIZE)
        _whole_number("top_k", self.top_k, 1, _LARGEST_SIZE)
        if self.latent_dim is not None:
            _whole_number("latent_dim", self.latent_dim, 1, _LARGEST_SIZE)
        if self.top_k > self.num_subkeys:
            raise MidusError(
                f"top_k={self.top_k} is more than num_subkeys={self.num_subkeys}; "
                "lower top_k or raise num_subkeys"
            )
        _names(self, "kind")
        _one_of("values", self.values, VALUE_KINDS)
        for name in ("attention_residual", "attn_output_proj", "query_proj", "memory_output_proj"):
            value, is_optional = getattr(self, name), name != "memory_output_proj"
            if not isinstance(value, bool) and not (value is None and is_optional):
                raise MidusError(f"{name}={value!r} must be true or false")
        self._refuse_unused()
        # The other layers read a(x) = x + Attn(LN(x)) through a query projection (Eq. 2); HML
        # reads the head outputs as they are.
        for name in ("attention_residual", "attn_output_proj", "query_proj"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.kind != "hml")
        _one_of("query_norm", self.query_norm, QUERY_NORMS)
        _one_of("bypass", self.bypass, BYPASSES)
        if self.bypass == "joined" and self.memory_output_proj:
            raise MidusError(
                "bypass='joined' maps what the memory found together with attention's, and "
                "memory_output_proj=True would map it twice; leave one of them out"
            )
        _one_of("key_init", self.key_init, KEY_INITS)
        _one_of("value_proj_init", self.value_proj_init, VALUE_PROJ_INITS)
        for name in ("key_scale", "value_proj_scale"):
            _scale(name, getattr(self, name))

    def _refuse_unused(self) -> None:
        """Refuses options that this memory layer would ignore."""
        hive = self.kind == "hml" and self.values == "hive"
        used_by = {
            "values": ("hml", self.kind == "hml"),
            "latent_dim": ("hml with hive values", hive),
            "value_proj_init": ("hml with hive values", hive),
            "value_proj_scale": ("hml with hive values", hive),
            "key_init": ("hml, linear and pkm", self.kind != "ultramem"),
            "key_scale": ("hml, linear and pkm", self.kind != "ultramem"),
        }
        for name, (owners, is_used) in used_by.items():
            default = type(self).__dataclass_fields__[name].default
            if not is_used and getattr(self, name) != default:
                raise MidusError(
                    f"{name}={getattr(self, name)!r} is an option of {owners}; leave it out for "
                    f"memory layer {self.kind!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MemoryConfig":
        config: MemoryConfig = _from_dict(cls, values)
        return config


@dataclass(frozen=True, kw_only=True)
class UpscaleConfig:
    """How a base model grows: method, where the new blocks stand, and what is in them."""

    method: str = "midus"
    """Up-scaling method: midus inserts memory blocks; `midus methods` lists the others."""
    num_inserted: int | None = None
    """Number of inserted blocks (paper: D); default: half of the base's blocks, or the
    placement's own number."""
    placement: str | None = None
    """Placement: distributed, llama_pro, top_heavy, bottom_heavy or dense (five for six of the
    base's, none at its first; beyond the paper); default: the method's."""
    positions: tuple[int, ...] | None = None
    """Indices of the inserted blocks in the final stack, instead of a placement policy."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory layer of the inserted blocks."""
    seed: int = 0
    """Seed of everything that starts at random in the inserted blocks."""
    ot_reg: float = 0.06
    """opt_deus: strength of the entropic regularisation."""
    ot_max_iter: int = 10_000
    """opt_deus: most Sinkhorn iterations per transport problem."""
    ot_tolerance: float = 1e-6
    """opt_deus: error of the marginals at which a problem counts as solved."""
    ot_normalize_cost: bool = False
    """opt_deus: divide each cost matrix by its largest entry."""
    ot_rescale: bool = False
    """opt_deus: multiply each plan by its number of rows, as the method it builds on does."""
    lesa_epochs: int = 10
    """lesa: passes over the training pairs of each predictor."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        _names(self, "method")
        if self.placement is not None:
            _names(self, "placement")
        if self.num_inserted is not None:
            _whole_number("num_inserted", self.num_inserted, 1, _LARGEST_SIZE)
        _whole_number("seed", self.seed, 0, 2**32 - 1)
        _whole_number("ot_max_iter", self.ot_max_iter, 1, 10**9)
        _whole_number("lesa_epochs", self.lesa_epochs, 1, 10**6)
        for name in ("ot_reg", "ot_tolerance"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 1e-12 <= value <= 1e12:
                raise MidusError(f"{name}={value!r} must be a number from 1e-12 to 1e12")
        for name in ("ot_normalize_cost", "ot_rescale"):
            if not isinstance(getattr(self, name), bool):
                raise MidusError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.memory, MemoryConfig):
            raise MidusError(f"memory={self.memory!r} must be a MemoryConfig")
        if self.positions is None:
            return
        try:
            object.__setattr__(self, "positions", tuple(self.positions))
        except TypeError as error:
            raise MidusError(
                f"positions={self.positions!r} must be a list of whole numbers"
            ) from error
        for position in self.positions:
            _whole_number("position", position, -_LARGEST_SIZE, _LARGEST_SIZE)
        if self.placement is not None:
            raise MidusError(
                f"placement={self.placement!r} and positions={list(self.positions)} "
                "exclude each other; give one of them"
            )
        if self.num_inserted not in (None, len(self.positions)):
            raise MidusError(
                f"num_inserted={self.num_inserted} does not match the {len(self.positions)} "
                f"positions {list(self.positions)}; leave one of them out"
            )


def field_help(cls: type) -> dict[str, str]:
    """The docstring under each field of a config class, by field name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for previous, node in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(previous, ast.AnnAssign)
            and isinstance(previous.target, ast.Name)
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
        ):
            texts[previous.target.id] = " ".join(str(node.value.value).split())
    return texts
