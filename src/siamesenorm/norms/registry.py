"""Names of operators, and the frozen description of one that configurations hold.

Installed packages add theirs through entry points of the group "siamesenorm.norms": a subclass of `Norm` under the
name of the entry point, or a module or function that calls `register_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from siamesenorm.errors import unknown
from siamesenorm.norms.dyt import Derf, DyT
from siamesenorm.norms.norm import Norm, Role
from siamesenorm.norms.scale_invariant_norms import LayerNorm, RMSNorm, ScaleNorm
from siamesenorm.norms.seed_norm import SeeDNorm
from siamesenorm.options import EntryPointGroup, Scalar, parse_specification, read_scalar, require_name, widen

NORMS: dict[str, type[Norm]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
    "dyt": DyT,
    "derf": Derf,
    "seednorm": SeeDNorm,
}


def register_norm(name: str, operator: type[Norm]) -> None:
    """Add an operator under a new name of letters, digits, dashes, dots and underscores.

    Raises ValueError if the name is another one or taken, or if the operator is not a subclass of `Norm`.
    """
    require_name(name)
    if not (isinstance(operator, type) and issubclass(operator, Norm)):
        raise ValueError(f"{operator!r} is not a subclass of Norm: register the class of an operator")
    if NORMS.setdefault(name, operator) is not operator:
        raise ValueError(f"norm name {name!r} is taken by {NORMS[name].__name__}: choose another")


def _register_found(name: str, found: Any) -> bool:
    is_operator = isinstance(found, type) and issubclass(found, Norm)
    if is_operator:
        register_norm(name, found)
    return is_operator


ENTRY_POINTS = EntryPointGroup("siamesenorm.norms", _register_found)


def available_norms() -> tuple[str, ...]:
    """Return the names that `build_norm` accepts."""
    ENTRY_POINTS.load()
    return tuple(NORMS)


def norm_options(name: str) -> dict[str, Scalar]:
    """Return the options of an operator with their default values; raises UserError for an unknown name."""
    if name not in NORMS:  # the package's own operators are used while it is imported, before others can be
        ENTRY_POINTS.load()
    if name not in NORMS:
        raise unknown("norm", name, NORMS)
    return NORMS[name].option_defaults()


@dataclass(frozen=True)
class NormSpec:
    """An operator by name with the options that differ from its defaults, as sorted pairs; JSON-serialisable.

    Raises UserError for an unknown name or option.
    """

    name: str = "rmsnorm"
    options: tuple[tuple[str, Scalar], ...] = field(default=())

    def __post_init__(self) -> None:
        defaults = norm_options(self.name)
        for key, _ in self.options:
            if key not in defaults:
                raise unknown(f"option of norm {self.name}", key, defaults)
        hints = NORMS[self.name].option_hints()
        spelled = {key: widen(value, hints[key]) for key, value in self.options}
        object.__setattr__(self, "options", tuple(sorted((k, v) for k, v in spelled.items() if v != defaults[k])))

    @classmethod
    def parse(cls, text: str, **overrides: Scalar) -> NormSpec:
        """Read "name" or "name:option=value,..."; raises UserError naming the nearest name or option."""
        name, given = parse_specification("norm", text, norm_options)
        return cls(name, tuple(given.items())).with_options(**overrides)

    def with_options(self, **overrides: Scalar) -> NormSpec:
        """Return the operator with options overridden; raises UserError for an unknown option or a wrong value."""
        what, defaults = f"norm {self.name}", norm_options(self.name)
        read = {k: read_scalar(f"option {k} of {what}", str(v), defaults.get(k, "")) for k, v in overrides.items()}
        return NormSpec(self.name, tuple({**dict(self.options), **read}.items()))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> NormSpec:
        """Read a record of `to_json`."""
        options = {key: value for key, value in record.items() if key != "name"}
        return cls.parse(record["name"], **options)

    def to_json(self) -> dict[str, Scalar]:
        """Return the name and every option, defaults included."""
        return {"name": self.name, **norm_options(self.name), **dict(self.options)}

    def __str__(self) -> str:
        """Return the text from which `parse` returns this."""
        options = ",".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}:{options}" if options else self.name

    def build(self, dim: int, *, role: Role | None = None, affine: bool = True, axis: int = -1) -> Norm:
        """Return the operator for width `dim`, set up for its role."""
        operator = NORMS[self.name]
        options: dict[str, Any] = {**dict(self.options), "affine": affine, "axis": axis}
        return operator(dim, **options) if role is None else operator.for_role(dim, role, **options)


def build_norm(name: str, dim: int, *, affine: bool = True, axis: int = -1, **options: Scalar) -> Norm:
    """Return the operator `name` ("rmsnorm", "seednorm:heads=4", ...) for vectors of width `dim`.

    Raises UserError for an unknown name or option.
    """
    return NormSpec.parse(name, **options).build(dim, affine=affine, axis=axis)
