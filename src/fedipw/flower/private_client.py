"""For a ClientApp: train, and add to sums that show the server no term of them.

What a client keeps between the messages of a sum is in its own context. It sends public keys,
sealed boxes, one masked vector and shares, and no model, metric, covariate or weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from typing import Any, Final, TypeAlias, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedipw.errors import InputError
from fedipw.flower.client import SERVER_ROUND, declined
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_probability
from fedipw.private.calibration import PURPOSE, Covariates, RoundTerms
from fedipw.private.noisy import NOISY, NoisyTerms
from fedipw.private.protocol import Delivery, Invitation, Member, Neighbours, Opening, ProtocolError
from fedipw.private.sums import SumRequest, contribution_words

ACTION: Final = "fedipw_sum"  # of the queries that lead through a sum
RECORD: Final = "fedipw-sum"  # of questions, answers and what a client keeps
OWN: Final = "fedipw-own"  # what one client alone is sent of a training round
STAGE, BEGIN, SHARE, MASK, OPEN = "stage", "begin", "share", "mask", "open"
BASE, PARTICIPATION, MODEL = "base", "participation", "model"
_VECTOR: Final = "vector"
_LOG = getLogger("flwr.fedipw")

Train: TypeAlias = Callable[[Message, Context], Message]
OwnContribution: TypeAlias = Callable[[Context, SumRequest], FloatArray | None]
OwnCovariates: TypeAlias = Callable[[Context, int], Covariates]


@final
class PrivateClient:
    """A ClientApp whose update, weight and covariates leave it only inside of secure sums.

    It answers no invitation to train in clear. Each invitation is for one sum: the client trains,
    computes its weight, keeps its vector in the context and sends public keys; three queries later
    the sum is opened or given up, and what was kept is gone.

    Parameters
    ----------
    app
        The app; ``train`` and the query ``fedipw_sum`` are registered with it.
    covariates
        Called with the context and the number of the round: the covariates that targets and a
        participation model name. They stay here.
    smallest
        Fewest clients, itself among them, with which it lets a sum be opened, whatever the server
        asks for.
    least_noise
        Smallest noise multiplier of a training round that it takes part in; 0 for any, or none.

    Examples
    --------
    >>> from flwr.app import MetricRecord
    >>> app = ClientApp()
    >>> private = PrivateClient(app, covariates=lambda context, server_round: {"age": 41.0})
    >>> @private.train
    ... def train(message, context):
    ...     arrays = message.content["arrays"]  # train them on the client's own data
    ...     return Message(RecordDict({"arrays": arrays}), reply_to=message)
    >>> @private.contribution("age")  # to other sums than those of training
    ... def age(context, request):
    ...     return np.array([41.0])
    """

    def __init__(
        self,
        app: ClientApp,
        *,
        covariates: OwnCovariates,
        smallest: int = 5,
        least_noise: float = 0.0,
    ) -> None:
        self._app, self._covariates, self._smallest = app, covariates, smallest
        self._least_noise = least_noise
        self._contributions: dict[str, OwnContribution] = {}
        app.query(ACTION)(self._answer)

    def contribution(self, purpose: str) -> Callable[[OwnContribution], OwnContribution]:
        """Register the function that makes the vector for a purpose; none for no part in it."""

        def register(function: OwnContribution) -> OwnContribution:
            self._contributions[purpose] = function
            return function

        return register

    def train(self, function: Train) -> Train:
        """Register the function that trains: as for ``app.train``, its reply has the arrays."""

        @self._app.train()
        def private_train(message: Message, context: Context) -> Message:
            records = message.content.config_records
            if RECORD not in records or OWN not in records:
                return declined(message, "this client adds to private sums only")
            try:
                invitation = Invitation.of_plain(dict(records[RECORD]))
                if invitation.purpose not in {PURPOSE, NOISY}:
                    raise ProtocolError(f"A sum for {invitation.purpose!r} is not for training.")
                self._check_noise(invitation.request)
                reply = function(message, context)
                if reply.has_error():
                    return reply
                vector = self._weighted(message, context, reply, invitation.request)
                return self._begun(message, context, invitation, vector)
            except Exception as error:  # a traceback would take values of this client along
                return _declined(message, error)

        del private_train
        return function

    def _check_noise(self, request: SumRequest) -> None:
        """Raise before training if a round has less noise than this client asks for."""
        if self._least_noise > 0.0:
            found = NoisyTerms.of(request.public).multiplier if request.purpose == NOISY else 0.0
            if found < self._least_noise:
                raise ProtocolError(
                    f"A noise multiplier of {found:g}, and this client asks for "
                    f"{self._least_noise:g} at least."
                )

    def _weighted(
        self, message: Message, context: Context, reply: Message, request: SumRequest
    ) -> FloatArray:
        """Return what the client adds to the sum of a training round, (M4) or with noise (N6)."""
        terms, own = RoundTerms.of(request.public), message.content.config_records[OWN]
        covariates = self._covariates(context, int(own[SERVER_ROUND]))  # type: ignore[arg-type]
        base = float(own[BASE])  # type: ignore[arg-type]
        base /= _participation_prob(json.loads(str(own[PARTICIPATION])), covariates)
        sent = message.content.array_records[str(own[MODEL])]
        update = flat_update(sent, next(iter(reply.content.array_records.values())))
        if update.shape != (terms.parameters,):
            raise InputError(f"{update.size} parameters were trained, not {terms.parameters}.")
        columns = terms.balance.columns(covariates)
        if request.purpose == NOISY:
            return NoisyTerms.of(request.public).contribution(base, columns, update)
        return terms.contribution(base, columns, update)

    def _begun(
        self, message: Message, context: Context, invitation: Invitation, vector: FloatArray
    ) -> Message:
        if vector.shape != (invitation.length,) or not np.isfinite(vector).all():
            raise InputError("The vector for a sum has another length, or is not finite.")
        member, keys = Member.begun(invitation, self._smallest)
        kept = np.asarray(vector, dtype="<f8").tobytes()
        context.state[RECORD] = ConfigRecord({**member.to_plain(), _VECTOR: kept})
        return _answer_of(message, keys.to_plain())

    def _answer(self, message: Message, context: Context) -> Message:
        """Take one stage of a sum, or decline it."""
        try:
            told = dict(message.content.config_records[RECORD])
            stage = told.pop(STAGE)
            if stage == BEGIN:
                invitation = Invitation.of_plain(told)
                make = self._contributions.get(invitation.purpose)
                vector = None if make is None else make(context, invitation.request)
                if vector is None:
                    return declined(message, f"no part in sums for {invitation.purpose!r}")
                return self._begun(message, context, invitation, vector)
            return _answer_of(message, self._next(stage, told, context))
        except Exception as error:
            return _declined(message, error)

    def _next(self, stage: object, told: Mapping[str, Any], context: Context) -> dict[str, Any]:
        if RECORD not in context.state:
            raise ProtocolError("No sum is open here.")
        kept = dict(context.state.config_records[RECORD])
        vector = kept.pop(_VECTOR)
        member = Member.of_plain(kept)
        if stage == SHARE:
            member, boxes = member.shared(Neighbours.of_plain(told))
            context.state[RECORD] = ConfigRecord({**member.to_plain(), _VECTOR: vector})
            return boxes.to_plain()
        if stage == MASK:
            values = np.frombuffer(vector, dtype="<f8")  # type: ignore[arg-type]
            request = SumRequest(purpose="", length=member.length, bound=member.bound)
            words = contribution_words(values, request, member.code())
            member, masked = member.masked(Delivery.of_plain(told), words)
            context.state[RECORD] = ConfigRecord({**member.to_plain(), _VECTOR: b""})
            return masked.to_plain()
        shares = member.opened(Opening.of_plain(told))
        del context.state[RECORD]
        return shares.to_plain()


def _participation_prob(steps: Sequence[Mapping[str, Any]], covariates: Covariates) -> float:
    """Return the product of the steps' probabilities, 1 if there is no model."""
    if not steps:
        return 1.0
    # every message starts a process, and most need no model
    from fedipw.flower.secure import StageProbability  # noqa: PLC0415

    found = math.prod(StageProbability.from_json(saved).prob(covariates) for saved in steps)
    return float(check_probability(found, "participation_prob"))


def flat_update(sent: ArrayRecord, trained: ArrayRecord) -> FloatArray:
    """Return what training changed, all arrays in one vector, (P,), in the order they were sent.

    >>> from flwr.app import Array
    >>> sent = ArrayRecord({"w": Array(np.zeros((1, 2))), "c": Array(np.array(1.0))})
    >>> trained = ArrayRecord({"c": Array(np.array(1.5)), "w": Array(np.ones((1, 2)))})
    >>> flat_update(sent, trained)
    array([1. , 1. , 0.5])
    """
    if set(sent) != set(trained):
        raise InputError("The trained model has other arrays than the model sent.")
    parts = []
    for name, before in sent.items():
        after = trained[name].numpy()
        if after.shape != tuple(before.shape):
            raise InputError(f"{name!r} has another shape than it was sent in.")
        parts.append(np.ravel(after.astype(np.float64) - before.numpy()))
    return np.concatenate(parts)


def _answer_of(message: Message, plain: Mapping[str, Any]) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(dict(plain))}), reply_to=message)


def _declined(message: Message, error: Exception) -> Message:
    """Return a refusal that says nothing of this client; what happened is in its own log."""
    if isinstance(error, ProtocolError):  # is about messages alone
        return declined(message, str(error))
    _LOG.warning("FedIPW: no part in a sum: %s", error, exc_info=error)
    return declined(message, f"cannot take part ({type(error).__name__})")
