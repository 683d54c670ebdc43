"""Private training on a server: rounds whose terms it never sees (M4), stepped by their totals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedipw.errors import DivergedError, InputError
from fedipw.flower.arrays import array_view, packed_array
from fedipw.flower.client import SERVER_ROUND
from fedipw.flower.outcomes import InvitedRounds, RoundOutcomes, Values
from fedipw.flower.privacy import NoisySums
from fedipw.flower.private import FlowerSums, Private
from fedipw.flower.private_client import BASE, MODEL, OWN, PARTICIPATION, RECORD
from fedipw.flower.probe import counts_unsaid
from fedipw.flower.screen import SentModel
from fedipw.flower.weighted_sum import finished_model
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import some
from fedipw.private.augmentation import TEMPER, PrivateRegression
from fedipw.private.calibration import (
    BalanceMap,
    PrivateCalibration,
    RoundTerms,
    RoundTotals,
    TermLimits,
)
from fedipw.private.noisy import NoisyTerms
from fedipw.private.protocol import SumServer
from fedipw.private.quantise import FixedPointCode
from fedipw.private.sums import SumNotOpenedError, SumResult
from fedipw.tables.targets import Targets
from fedipw.weighting.online import OnlineSums

_LOG = getLogger("flwr.fedipw")
METHOD = "calibrated-online"  # by secure sums


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """The open round: what was asked for, and of whom."""

    terms: RoundTerms
    noisy: NoisyTerms | None  # where there is noise
    sums: FlowerSums
    server: SumServer
    places: Mapping[int, int]  # by node
    inverse: Mapping[int, float]  # 1 / invitation probability over its mean, by place


@final
class PrivateTraining:
    """Rounds of training by secure sums, and what is kept between them.

    Parameters
    ----------
    private
        The settings.
    targets
        Population means of what clients are calibrated to.
    clip
        C, the norm that clients clip their updates to.
    strategy, key
        The wrapped strategy and the metric by which it weights.
    enrolled
        Number of enrolled clients.
    noise
        What clients add noise by, and the privacy spent.
    """

    def __init__(
        self,
        private: Private,
        targets: Targets,
        clip: float,
        *,
        strategy: Strategy,
        key: str,
        enrolled: int,
        noise: NoisySums | None = None,
    ) -> None:
        if noise is not None and noise.settings.seed is not None:
            raise InputError("Clients draw noise from the operating system: leave the seed out.")
        if noise is not None and private.augmented:
            raise InputError("Noise does not go with augmented=True: the products need too much.")
        self._noise = noise
        self._private, self._strategy, self._key, self._enrolled = private, strategy, key, enrolled
        self.balance = BalanceMap.of(targets, private.spread)
        self.calibration = PrivateCalibration.begun(self.balance, private.online)
        self._limits = TermLimits(
            clip=clip, largest_weight=private.largest_weight,
            largest_column=private.largest_column,
            largest_exponent=private.online.largest_exponent,
        )  # fmt: skip
        q = len(self.balance.names)
        self._rule = PrivateRegression(q, q, enrolled) if private.augmented else None
        self._open: _Open | None = None

    def lines(self) -> list[str]:
        """Return the log's lines at the start: what is private, and the range of numbers."""
        how, limits = self._private, self._limits
        code = FixedPointCode(bound=1.0, terms=max(self._enrolled, 1), bits=how.bits)
        known = f"{self._enrolled} enrolled clients, {len(self.balance.names)} population means"
        bound = limits.largest_weight * limits.clip
        ranges = (
            f"weights of at most {limits.largest_weight:g} x the mean weight u, updates of norm "
            f"{limits.clip:g}: words of {how.bits} bits within +-{bound:g} u, in steps of "
            f"{code.step * bound:.2g} u if all are in it"
        )
        seen = (
            "no client's covariates, weight or update reach the server; a client that lies can "
            "move a sum as far as its range, and is found out only by (M5)"
        )
        first = f"{METHOD} by secure sums of {how.minimum} clients and more; {known}"
        return [first, ranges, seen]

    def invite(self, grid: Grid, index: int, rounds: InvitedRounds, sent: SentModel) -> None:
        """Add to the invitations of an open round what clients need to take part in its sum."""
        if sent.buffers:
            raise InputError(
                f"Buffers are not part of private sums: {some(sorted(sent.buffers))}. Use layers "
                "without running statistics, such as GroupNorm, or leave them out of what clients "
                "send."
            )
        invited, prob = rounds.invited, rounds.invite_prob
        if not invited:
            self._open = None
            return
        inverse = {place: 1.0 / float(prob[place]) for place in invited}
        mean = sum(inverse.values()) / len(inverse)
        inverse = {place: value / mean for place, value in inverse.items()}
        terms = RoundTerms(
            balance=self.balance, coefficients=self.calibration.online.coefficients,
            unit=self.calibration.unit(1.0), limits=self._limits,
            parameters=sum(array.size for array in sent.arrays.values()),
            augmented=self._private.augmented, temper=TEMPER if self._private.augmented else 1.0,
        )  # fmt: skip
        places = {message.metadata.dst_node_id: place for place, message in invited.items()}
        sums, noisy = FlowerSums(grid, places, self._private), self._noisy(terms)
        request = terms.request if noisy is None else noisy.request
        server, steps = sums.server(request), json.dumps(self._private.steps)
        plain: dict[str, Any] = dict(server.invitation.to_plain())
        invitation = ConfigRecord(plain)
        for place, message in invited.items():
            (model,) = message.content.array_records  # strategies send one
            own = ConfigRecord({
                BASE: inverse[place], SERVER_ROUND: index, PARTICIPATION: steps, MODEL: model,
            })  # fmt: skip
            content = {**dict(message.content.items()), RECORD: invitation, OWN: own}
            message.content = RecordDict(content)
        self._open = _Open(terms, noisy, sums, server, places, inverse)

    def _noisy(self, terms: RoundTerms) -> NoisyTerms | None:
        """Return the terms of a round with noise, where there is some."""
        if self._noise is None:
            return None
        how = self._private
        return NoisyTerms(
            terms=terms, radius=how.radius, multiplier=self._noise.settings.multiplier,
            fewest=how.minimum, without=how.without,
        )  # fmt: skip

    def _totals(self, found: _Open, result: SumResult) -> RoundTotals:
        """Return the totals of a sum that was opened; InputError if they are of no use."""
        if found.noisy is not None and self._noise is not None:
            self._noise.spend()  # the server has seen it, whatever becomes of the round
            return found.noisy.totals(result)
        totals = RoundTotals.of(found.terms, result)
        fault = totals.fault(found.terms)
        if fault:
            raise InputError(f"the sum is one that no clients can have: {fault}")
        return totals

    def step(
        self, index: int, outcomes: RoundOutcomes, sent: SentModel
    ) -> tuple[ArrayRecord | None, MetricRecord, Values]:
        """Lead the sum to its end and let the wrapped strategy step by it.

        Returns the model, none if the round is skipped, the strategy's metrics, and values of the
        round. Replies that are not in the sum are dropped from ``outcomes``.
        """
        found, self._open = self._open, None
        if found is None:
            return None, MetricRecord(), {"sum-opened": 0}
        replies = {
            node: outcomes.replies[place]
            for node, place in found.places.items()
            if place in outcomes.replies
        }
        values: Values = {"sum-opened": 0}
        try:
            totals = self._totals(found, found.sums.opened(found.server, replies))
        except (SumNotOpenedError, InputError) as error:
            self._skipped(index, outcomes, found, str(error))
            return None, MetricRecord(), values | _cost(found)
        first = next(reply for node, reply in replies.items() if node in found.sums.inside)
        self._dropped(outcomes, found)
        if found.noisy is not None:
            noise = found.noisy.noise_sd("update", totals.contributors)
            # of a coordinate of the step
            values["noise-sd"] = noise / (totals.contributors * found.terms.unit)
        inside = [found.inverse[found.places[node]] for node in found.sums.inside]
        totals = _scaled(totals, len(inside) / sum(inside))  # base weights with mean 1 (W21)
        step = totals.step if self._rule is None else self._rule.corrected(totals)
        self.calibration = self.calibration.after(totals)
        arrays, own = self._stepped(index, sent, step, first)
        return (
            arrays,
            own,
            values
            | _cost(found)
            | {
                "sum-opened": 1,
                "contributors": totals.contributors,
                "effective-replies": totals.effective_replies,
                "weights-cut": totals.cut[0],
                "columns-cut": totals.cut[1],
                "updates-clipped": totals.cut[2],
                "mean-weight": totals.online.count / totals.contributors,
                "imbalance-respondents": self.calibration.online.imbalance,
            },
        )

    def _skipped(self, index: int, outcomes: RoundOutcomes, found: _Open, why: str) -> None:
        _LOG.warning("FedIPW: no step in round %d: %s", index, why)
        by_place = {found.places[node]: text for node, text in found.sums.faults.items()}
        for place in list(outcomes.replies):
            outcomes.drop(place, by_place.get(place, "its sum was not opened"))

    def _dropped(self, outcomes: RoundOutcomes, found: _Open) -> None:
        """Take clients that are not in the sum as having dropped out, and log who misbehaved."""
        for node, place in found.places.items():
            reason = found.sums.faults.get(node, "")
            if node not in found.sums.inside and place in outcomes.replies:
                outcomes.drop(place, reason or "dropped out of the sum")
            elif node in found.sums.inside and reason:
                _LOG.warning("FedIPW: node %d in a sum: %s", node, reason)

    def _stepped(
        self, index: int, sent: SentModel, step: FloatArray, reply: Message
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the wrapped strategy's model after one reply of weight 1, the mean's."""
        given, first = ArrayRecord(), 0
        for name, model in sent.arrays.items():
            part = step[first : first + model.size].reshape(model.shape)
            first += model.size
            made = model + part.astype(np.result_type(model.dtype, np.float32))
            if not np.isfinite(made).all():
                raise DivergedError(METHOD, index, self._limits.largest_weight)
            given[name] = packed_array(made, sent.layouts[name].name)
        told = MetricRecord({self._key: 1.0})
        message = Message(RecordDict({"arrays": given, "metrics": told}), reply_to=reply)
        with counts_unsaid():
            arrays, metrics = self._strategy.aggregate_train(index, [message])
        if arrays is not None:
            arrays = finished_model(arrays, sent, {})
            if not all(np.isfinite(array_view(array)).all() for array in arrays.values()):
                raise DivergedError(METHOD, index, self._limits.largest_weight)
        return arrays, MetricRecord() if metrics is None else metrics

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        rule = None if self._rule is None else self._rule.state()
        return {"calibration": self.calibration.to_arrays(), "regression": rule}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self.calibration = self.calibration.restored(state["calibration"])
        if self._rule is not None:
            self._rule.restore(state["regression"])


def _scaled(totals: RoundTotals, factor: float) -> RoundTotals:
    """Return the totals with all weights times a factor."""
    online = totals.online
    return replace(
        totals,
        online=OnlineSums(
            count=factor * online.count, first=factor * online.first,
            second=factor * online.second,
        ),
        square=factor**2 * totals.square,
        update=factor * totals.update,
        cross=None if totals.cross is None else factor * totals.cross,
    )  # fmt: skip


def _cost(found: _Open) -> Values:
    traffic = found.sums.traffic
    return {
        "sum-messages": traffic.messages, "sum-bytes-sent": traffic.sent,
        "sum-bytes-received": traffic.received, "sum-seconds": traffic.seconds,
    }  # fmt: skip
