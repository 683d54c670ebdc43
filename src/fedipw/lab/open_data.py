"""Two open data sets in which selection was observed, read from a path the user gives.

Neither is part of fedipw. The Michigan Behavioral Risk Factor Surveillance Survey is the data set
``mibrfss`` of the R package PracTools, saved as a table. The Open University Learning Analytics
Dataset (Kuzilek, Hlosta and Zdrahal 2017) is three tables in one directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.lab.observed import (
    DrawnReplies,
    ModelRows,
    ObservedSource,
    ObservedTables,
    RecordedReplies,
    check_cells,
    check_codes,
    model_rows,
    read,
)
from fedipw.numerics.checks import some
from fedipw.tables.columns import ENROLLED, ID


@dataclass(frozen=True, slots=True)
class SurveyOutcome:
    """A yes or no of every person: its title and the codes of its column that mean yes."""

    title: str
    codes: tuple[int, ...]


OUTCOMES: Final[Mapping[str, SurveyOutcome]] = {
    "GENHLTH": SurveyOutcome("General health fair or poor", (4, 5)),
    "PHYSACT": SurveyOutcome("Physically active", (1,)),
    "HIGHBP": SurveyOutcome("High blood pressure", (1,)),
    "ARTHRIT": SurveyOutcome("Arthritis", (1,)),
    "ASTHMA": SurveyOutcome("Asthma", (1,)),
    "SMOKE100": SurveyOutcome("Smoked 100 cigarettes", (1,)),
    "BMICAT3": SurveyOutcome("Obese", (3,)),
    "CHOLCHK": SurveyOutcome("Cholesterol checked", (1,)),
    "BINGE2": SurveyOutcome("Binge drinking", (2,)),
}
COVARIATES: Final = {
    "AGECAT": "age",
    "RACECAT": "race",
    "EDCAT": "education",
    "INCOMC3": "income",
    "GENDER": "gender",
}
INTERNET: Final = "INETHOME"  # 1 yes, 2 no
USE: Final = "WEBUSE"
# Days of a week on which a person of each code uses the internet: the middle of what it says.
DAYS: Final = {0: 0.0, 1: 7.0, 2: 5.5, 3: 3.0, 4: 1.0, 5: 0.5, 6: 0.0}
_CODES: Final[Mapping[str, tuple[int, ...]]] = {
    "AGECAT": (1, 2, 3, 4, 5, 6),
    "RACECAT": (1, 2, 3),
    "EDCAT": (1, 2, 3, 4),
    "INCOMC3": (1, 2, 3, 4, 5),
    "GENDER": (1, 2),
    INTERNET: (1, 2),
    USE: tuple(DAYS),
    "GENHLTH": (1, 2, 3, 4, 5),
    "PHYSACT": (1, 2),
    "HIGHBP": (1, 2, 3),
    "ARTHRIT": (1, 2, 3),
    "ASTHMA": (1, 2),
    "SMOKE100": (1, 2),
    "BMICAT3": (1, 2, 3),
    "CHOLCHK": (1, 2),
    "BINGE2": (1, 2),
}


class SurveyReplies(Enum):
    """What a reply of a person of the survey is."""

    DAILY = "daily"  # who uses the internet at least daily replied, in one round
    FREQUENCY = "frequency"  # replies are drawn by how often a person uses it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MichiganPopulation(ObservedSource):
    """Persons of the Michigan survey: enrolled by internet at home, replying by its use.

    Enrollment is INETHOME = 1. With ``replies = "daily"`` who uses the internet at least daily
    (WEBUSE = 1) replied in the one round there is. With ``"frequency"`` replies are drawn in every
    round, with a probability of one seventh of the days a week on which a person uses it: this is
    a model of the rounds, and only its rates are observed.

    The model's label is one of :data:`OUTCOMES`; ``features`` is a formula of the other outcomes,
    as 0 or 1 under the names of their columns, and of the covariates age, race, education, income
    and gender.
    """

    outcome: str = "HIGHBP"
    features: str = "GENHLTH + PHYSACT + ARTHRIT + ASTHMA + SMOKE100 + BMICAT3 + CHOLCHK + BINGE2"
    replies: SurveyReplies = SurveyReplies.DAILY

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise InputError(f"No outcome {self.outcome!r}; there are {', '.join(OUTCOMES)}.")

    def tables(self) -> ObservedTables:
        """Return persons, replies and all outcomes; a wrong cell is named."""
        table = read(self.path, "the data `mibrfss` of the R package PracTools, saved as a table")
        check_codes(table, _CODES, str(self.path))
        table = table.with_columns(pl.Series(ID, np.arange(table.height)))
        online = (table[INTERNET] == 1).to_numpy()
        categories = [pl.col(old).cast(pl.String).alias(new) for old, new in COVARIATES.items()]
        yes = [
            pl.col(name).is_in(list(one.codes)).cast(pl.Float64) for name, one in OUTCOMES.items()
        ]
        return ObservedTables(
            clients=table.select(ID, pl.Series(ENROLLED, online), *categories),
            replies=self._replies(table[USE].to_numpy(), online),
            outcomes=table.select(yes),
        )

    def _replies(self, use: np.ndarray, online: np.ndarray) -> RecordedReplies | DrawnReplies:
        if self.replies is SurveyReplies.FREQUENCY:
            return DrawnReplies(rate=np.array([DAYS[code] for code in use.tolist()]) / 7.0)
        return RecordedReplies(
            replied=(online & (use == 1))[None],
            covariates=np.empty((1, len(use), 0)),
            cycle=True,
            where=str(self.path),
        )

    def rows(self, tables: ObservedTables) -> ModelRows:
        """Return one row a person: other outcomes and covariates, and the outcome."""
        frame = tables.outcomes.hstack(tables.clients.select(tables.covariates))
        names = [name for name in frame.columns if name != self.outcome]
        return model_rows(frame, self.features, names, frame[self.outcome], str(self.path))


STUDENTS: Final = ("oulad_students.parquet", "registrations, one row each")
ASSESSMENTS: Final = ("oulad_assessments.csv", "assessments with their dates")
SUBMISSIONS: Final = ("oulad_submissions.parquet", "submissions of assessments")
PASSED: Final = "passed"
_RESULTS: Final = ("Distinction", "Fail", "Pass", "Withdrawn")
_MONTH: Final = 30  # days
_STUDENT: Final = {
    "gender": "gender",
    "region": "region",
    "highest_education": "education",
    "imd_band": "deprivation",
    "age_band": "age",
    "num_of_prev_attempts": "attempts",
    "studied_credits": "credits",
    "disability": "disability",
}
# Levels that a presentation has too few students of, with the level they are counted as.
_MERGED: Final = {
    "education": {
        "No Formal quals": "Lower Than A Level",
        "Post Graduate Qualification": "HE Qualification",
    },
    "age": {"55<=": "35-55"},
    "deprivation": {"": "not recorded"},
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OuladPopulation(ObservedSource):
    """Registrations of a course presentation; a round is an assessment, a reply a submission.

    ``path`` is a directory with the three tables. ``presentation`` is a module and a presentation,
    such as ``AAA-2013J``. Its rounds are the tutor-marked assessments by date: computer-marked ones
    have in many presentations the date they were collected on, after the deadline, and exams decide
    the result. A reply is a submission not after the date; results banked from an earlier
    presentation are none. Everybody registered is enrolled: the tables hold nothing of before the
    course that keeps a student from submitting, so there is no first stage.

    Covariates are what is known at registration: gender, region, education, deprivation, age,
    earlier attempts, credits, disability and when it was. Rare levels of education and age are
    merged, and a column with one value in the presentation is left out.

    The label is ``passed``, a final result of Pass or Distinction; withdrawn students did not pass.
    """

    presentation: str
    features: str = "."

    def tables(self) -> ObservedTables:
        """Return registrations, replies and the final result; a wrong cell is named."""
        students = self._of(STUDENTS, ["id_student", *_STUDENT, "final_result"])
        where = str(self.path / STUDENTS[0])
        check_codes(students, {"final_result": _RESULTS}, where)
        if students["id_student"].n_unique() != students.height:
            raise InputError(f"{where}: a student is twice in {self.presentation}.")
        replied, where = self._replied(students["id_student"]), str(self.path / SUBMISSIONS[0])
        clients = students.select(
            pl.col("id_student").alias(ID),
            pl.lit(value=True).alias(ENROLLED),
            *(pl.col(old).alias(new) for old, new in _STUDENT.items()),
            _registered(),
        ).with_columns(pl.col(name).replace(levels) for name, levels in _MERGED.items())
        flat = [n for n in clients.columns[2:] if clients[n].n_unique() == 1]
        rounds = len(replied)
        return ObservedTables(
            clients=clients.drop(flat),
            replies=RecordedReplies(
                replied=replied, covariates=np.empty((rounds, clients.height, 0)), cycle=True,
                where=where,
            ),
            outcomes=students.select(
                pl.col("final_result").is_in(["Pass", "Distinction"]).cast(pl.Float64).alias(PASSED)
            ),
        )  # fmt: skip

    def _of(self, file: tuple[str, str], needed: list[str]) -> pl.DataFrame:
        """Return the rows of the presentation."""
        name, what = file
        place = self.path / name
        table = read(place, f"OULAD's {what}")
        check_cells(table, ["code_module", "code_presentation"], str(place))
        both = table["code_module"] + "-" + table["code_presentation"]
        part = table.filter(both == self.presentation)
        if not part.height:
            known = sorted(both.unique().to_list())
            raise InputError(
                f"{place} has no presentation {self.presentation!r}; it has {some(known)}."
            )
        check_cells(part, needed, f"{place}, {self.presentation}")
        return part

    def _replied(self, students: pl.Series) -> np.ndarray:
        """Return who submitted each assessment in time, (R, N)."""
        listed = self._of(ASSESSMENTS, ["id_assessment", "assessment_type"])
        rounds = listed.filter(pl.col("assessment_type") == "TMA").sort("date", "id_assessment")
        if not rounds.height:
            raise InputError(
                f"{self.path / ASSESSMENTS[0]}: {self.presentation} has no assessment of type TMA."
            )
        check_cells(rounds, ["date"], f"{self.path / ASSESSMENTS[0]}, {self.presentation}, TMA")
        place = self.path / SUBMISSIONS[0]
        made = read(place, f"OULAD's {SUBMISSIONS[1]}")
        check_cells(
            made, ["id_assessment", "id_student", "date_submitted", "is_banked"], str(place)
        )
        in_time = made.join(rounds.select("id_assessment", "date"), on="id_assessment").filter(
            (pl.col("date_submitted") <= pl.col("date")) & (pl.col("is_banked") == 0)
        )
        return np.array([
            students.is_in(in_time.filter(pl.col("id_assessment") == one)["id_student"].implode())
            .to_numpy()
            for one in rounds["id_assessment"]
        ])  # fmt: skip

    def rows(self, tables: ObservedTables) -> ModelRows:
        """Return one row a registration: its covariates, and whether it was passed."""
        frame = tables.clients.select(tables.covariates)
        label = tables.outcomes[PASSED]
        return model_rows(frame, self.features, tables.covariates, label, str(self.path))


def _registered() -> pl.Expr:
    """Return when a student registered; what is not recorded is counted as late."""
    days = pl.col("date_registration")
    return (
        pl.when(days > -_MONTH).then(pl.lit("last month, later or not recorded"))
        .when(days > -3 * _MONTH).then(pl.lit("one to three months before"))
        .when(days.is_not_null()).then(pl.lit("earlier"))
        .otherwise(pl.lit("last month, later or not recorded"))
        .alias("registered")
    )  # fmt: skip


def oulad_presentations(path: Path) -> tuple[str, ...]:
    """Return the presentations of the registrations in a directory, in order."""
    table = read(path / STUDENTS[0], f"OULAD's {STUDENTS[1]}")
    check_cells(table, ["code_module", "code_presentation"], str(path / STUDENTS[0]))
    both = table["code_module"] + "-" + table["code_presentation"]
    return tuple(sorted(both.unique().to_list()))
