"""A fitted selection stage: the design and the coefficients together, saved as one small file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.logistic import sigmoids
from fedipw.numerics.newton import NewtonStatus
from fedipw.selection.classifiers import Fit
from fedipw.selection.logistic import LogisticFit
from fedipw.storage.atomic import write_text
from fedipw.tables.design import Design
from fedipw.tables.partitions import Block, Frame

if TYPE_CHECKING:
    import polars as pl

    from fedipw.numerics import BoolArray

FORMAT, VERSION = "fedipw-model", 1
ENROLLMENT: Final = "enrollment"
PARTICIPATION: Final = "participation"
AVAILABILITY: Final = "availability"
REPLY: Final = "reply"
_LARGEST = 256 * 2**20  # bytes of a saved model
STAGES = (ENROLLMENT, PARTICIPATION, AVAILABILITY, REPLY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageModel:
    """P(selected | x) of one stage: which columns, which levels, which coefficients.

    New rows go through the same design, so a later command, a client or an audit computes the same
    probabilities to the last digit.

    Examples
    --------
    >>> import tempfile
    >>> import polars as pl
    >>> from fedipw.tables import Table
    >>> from fedipw.selection.coded import table_model
    >>> path = Path(tempfile.mkdtemp()) / "people.csv"
    >>> people = pl.DataFrame({"unit_id": range(5), "os": ["ios", "ios", "web", "web", "web"],
    ...                        "enrolled": [True, False, True, False, True]})
    >>> people.write_csv(path)
    >>> model = table_model(Table(path), "os")
    >>> model.prob(people.head(1))[0].round(6)
    array([0.5])
    >>> saved = path.with_suffix(".json")
    >>> model.save(saved)
    >>> StageModel.load(saved).fit.coefficients == model.fit.coefficients
    array([ True])
    """

    stage: str
    design: Design
    fit: Fit
    left_out: int = 0  # rows without a value or with an unknown level, under the policy drop
    note: str = ""  # why it has a penalty nobody asked for: without one it has no maximum

    def prob(
        self, frame: pl.DataFrame, where: str = "table"
    ) -> tuple[FloatArray, BoolArray | None]:
        """Return probabilities of the rows kept, (m,), and which rows those are; all if None."""
        rows = self.design.rows(frame, where)
        return self.fit.prob(rows.columns), rows.kept

    def logistic(self) -> LogisticFit:
        """Return the logistic fit, or raise if this is another classifier."""
        if not isinstance(self.fit, LogisticFit):
            raise InputError(
                f"The model of {self.stage} is a classifier without coefficients: it cannot be "
                "saved or tabulated. Use logistic regression."
            )
        return self.fit

    @property
    def dropped(self) -> tuple[str, ...]:
        """Columns that were left out of the fit."""
        return getattr(self.fit, "dropped", ())

    def save(self, path: Path) -> None:
        """Write the model to a file, whole or not at all."""
        self.logistic()  # a classifier cannot be written
        write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path, stage: str | None = None) -> StageModel:
        """Return a saved model; with ``stage`` it must be one of that stage."""
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"{path.stat().st_size} bytes are more than any model has")
            saved = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"No file {path}.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} is not a saved model: {error}.") from error
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise InputError(f"{path} is not a saved model of this program.")
        if saved.get("version") != VERSION:
            raise InputError(
                f"{path} has version {saved.get('version')}, this program reads {VERSION}."
            )
        try:
            model = cls.from_json(saved)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__} {error}.") from error
        if stage is not None and model.stage != stage:
            raise InputError(f"{path} is a model of {model.stage}, not of {stage}.")
        return model

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which ``from_json`` makes the same model."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "stage": self.stage,
            "left_out": self.left_out,
            "note": self.note,
            "design": self.design.to_json(),
            "fit": _fit_json(self.logistic()),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> StageModel:
        """Return the model of plain values."""
        design, fit = Design.from_json(saved["design"]), _fit_of(saved["fit"])
        if design.names != fit.names:
            raise ValueError("design and coefficients name different columns")
        if saved["stage"] not in STAGES:
            raise ValueError(f"no stage {saved['stage']!r}")
        return cls(
            stage=saved["stage"], design=design, fit=fit, left_out=int(saved["left_out"]),
            note=str(saved.get("note", "")),
        )  # fmt: skip


BlockProb = Callable[[Block], FloatArray]


def block_prob(fit: Fit, frame: Frame) -> BlockProb:
    """Return what gives the fitted probability of every row of a block whose columns are framed."""
    if isinstance(fit, LogisticFit):
        beta = frame.matrix() @ fit.point
        return partial(_logistic_prob, beta=beta)
    return partial(_fitted_prob, fit=fit, frame=frame)


def _logistic_prob(block: Block, beta: FloatArray) -> FloatArray:
    return sigmoids(np.ascontiguousarray(beta[:-1] @ block.columns + beta[-1]), shift=0.0)


def _fitted_prob(block: Block, fit: Fit, frame: Frame) -> FloatArray:
    columns = block.columns * frame.scale[:, None] + frame.centre[:, None]
    return fit.prob(columns, np.arange(block.start, block.start + block.rows))


_PLAIN = ("rows", "total_weight", "selected", "log_likelihood", "l2", "iterations", "passes")


def _fit_json(fit: LogisticFit) -> dict[str, Any]:
    errors = [None if np.isnan(e) else e for e in fit.standard_errors.tolist()]
    return {
        "coefficients": dict(zip(fit.names, fit.coefficients.tolist(), strict=True)),
        "intercept": fit.intercept,
        "standard_errors": dict(zip((*fit.names, "(intercept)"), errors, strict=True)),
        "covariance": fit.covariance.tolist(),
        "constant": list(fit.constant),
        "collinear": list(fit.collinear),
        "gradient_norm": fit.gradient_norm,
        "status": fit.status.value,
        **{name: getattr(fit, name) for name in _PLAIN},
    }


def _fit_of(saved: Mapping[str, Any]) -> LogisticFit:
    names = tuple(saved["coefficients"])
    coefficients = np.array([float(v) for v in saved["coefficients"].values()])
    covariance = np.array(saved["covariance"], dtype=np.float64)
    if covariance.shape != (len(names) + 1, len(names) + 1):
        raise ValueError(f"covariance of shape {covariance.shape} for {len(names)} columns")
    if not np.isfinite([*coefficients, saved["intercept"], *covariance.flat]).all():
        raise ValueError("a coefficient or covariance is not a finite number")
    return LogisticFit(
        names=names,
        coefficients=coefficients,
        intercept=float(saved["intercept"]),
        frame=Frame.unchanged(len(names)),
        saved_covariance=covariance,
        constant=tuple(saved["constant"]),
        collinear=tuple(saved["collinear"]),
        gradient_norm=float(saved["gradient_norm"]),
        status=NewtonStatus(saved["status"]),
        **{name: saved[name] for name in _PLAIN},
    )
