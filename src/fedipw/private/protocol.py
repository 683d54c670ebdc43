r"""Sums of masked vectors over clients that may drop out at every stage (Bell et al. 2020).

Four exchanges, each led by the server. N(i) are the neighbours of client i in the graph
(:mod:`fedipw.private.graph`).

1. *Keys.* A client draws two secrets and sends two public keys: one to seal boxes with, one to
   agree on masks with.
2. *Shares.* It receives its neighbours' keys, draws the seed of a mask of its own, and splits that
   seed and the secret behind its mask key among N(i): t of them can restore either. Each pair of
   shares is sealed for its holder; the server carries boxes it cannot open. A commitment to the
   seed goes with them.
3. *Masked vector.* It receives the boxes made for it and sends

   .. math:: y_i = \text{code}(x_i) + m(b_i)
      + \sum_{j \in N(i)} \text{sign}(j - i)\, m(s_{ij}) \bmod 2^k \qquad (M3)

   with :math:`s_{ij}` the key it agrees on with j, :math:`b_i` its seed, over the neighbours whose
   boxes came.
4. *Opening.* It is told which neighbours' vectors arrived and which did not, and answers with its
   shares of the seed :math:`b_j` of the former and of the mask secret of the latter, never both of
   one client, and once. The server restores them, checks each against the commitment or the public
   key, and takes the masks that are left out of the sum of the :math:`y_i`.

Secure against a server that follows these steps and combines all it sees with up to t - 1
neighbours of a client (honest but curious): it learns the sum over the clients whose vectors
arrived. A server that departs from them is held to some of it only: a client answers each stage of
a session once, never gives both secrets of a neighbour, and refuses below its threshold; but there
is no public-key infrastructure and no signed list of survivors, so that a server which invents
clients, gives different clients different keys, or asks for vectors that only one client can have
anything in, is not covered. A client that lies is not found
out by the protocol: see :mod:`fedipw.private.calibration` for what its sums must satisfy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self, TypeVar, final

import numpy as np

from fedipw.errors import FedIPWError
from fedipw.private import masking
from fedipw.private.graph import Graph
from fedipw.private.quantise import FixedPointCode, Words
from fedipw.private.sums import SumNotOpenedError, SumRequest, SumResult, check_enough

SESSION: Final = 16  # bytes that name a sum
Plain = str | int | float | bytes | list[int] | list[bytes]
W = TypeVar("W", bound="Wire")


class ProtocolError(FedIPWError, ValueError):
    """A message that does not fit the protocol: of another session or stage, or out of range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A message: fields of plain types, and the session it belongs to."""

    session: bytes

    def to_plain(self) -> dict[str, Plain]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of_plain(cls, record: Mapping[str, Any]) -> Self:
        """Return the message of fields that may be anything; ProtocolError if it is none."""
        names = {f.name: _KINDS[str(f.type)] for f in fields(cls)}
        if set(record) != set(names):
            raise ProtocolError(f"{cls.__name__} has other fields: {sorted(record)[:9]}.")
        for name, (kind, of) in names.items():
            value: Any = record[name]
            parts = value if of is not None and isinstance(value, list) else []
            if type(value) is not kind or any(type(part) is not of for part in parts):
                raise ProtocolError(f"{cls.__name__}.{name} is of another type.")
        return cls(**{name: record[name] for name in names})


_KINDS: Final[Mapping[str, tuple[type, type | None]]] = {
    "bytes": (bytes, None),
    "int": (int, None),
    "float": (float, None),
    "str": (str, None),
    "list[int]": (list, int),
    "list[bytes]": (list, bytes),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(Wire):
    """What a client is asked to add to: the request, and the bits of a word."""

    purpose: str
    length: int
    bound: float
    public: str  # as JSON
    bits: int
    minimum: int  # fewest clients whose sum is opened

    @classmethod
    def of(cls, session: bytes, request: SumRequest, bits: int, minimum: int) -> Self:
        """Return the invitation to a sum."""
        return cls(
            session=session, purpose=request.purpose, length=request.length,
            bound=float(request.bound), public=json.dumps(dict(request.public)), bits=bits,
            minimum=minimum,
        )  # fmt: skip

    @property
    def request(self) -> SumRequest:
        """The request, as the function for its purpose receives it."""
        public = json.loads(self.public)
        return SumRequest(purpose=self.purpose, length=self.length, bound=self.bound, public=public)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Keys(Wire):
    """A client's public keys."""

    box_key: bytes
    mask_key: bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours(Wire):
    """A client's own number, and its neighbours with their keys, sorted."""

    own: int
    ids: list[int]
    box_keys: list[bytes]
    mask_keys: list[bytes]
    threshold: int
    terms: int  # clients that may be in the sum: sets the step of the code


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes(Wire):
    """One box for each neighbour, in their order, and the commitment to the seed."""

    boxes: list[bytes]
    seal: bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Wire):
    """The boxes made for a client, by sender."""

    ids: list[int]
    boxes: list[bytes]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Masked(Wire):
    """A client's masked vector."""

    words: bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(Wire):
    """Which neighbours' vectors are in the sum, and which did not arrive."""

    alive: list[int]
    lost: list[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shares(Wire):
    """Shares of the seeds of those alive and of the mask secrets of those lost, in this order.

    Empty where a box could not be opened.
    """

    shares: list[bytes]


def _pair(session: bytes, use: str, one: int, other: int) -> bytes:
    """Return the name of a key or a box, of one use in one session."""
    return session + f"/{use}/{one}/{other}".encode()


def _own(session: bytes, use: str, client: int) -> bytes:
    return session + f"/{use}/{client}".encode()


def _pairwise_mask(
    key: bytes, session: bytes, one: int, other: int, shape: tuple[int, np.dtype[Any]]
) -> Words:
    """Return the mask that two clients share, from the secret they agreed on."""
    low, high = sorted((one, other))
    return masking.mask(masking.derived(key, _pair(session, "mask", low, high)), *shape)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client in one sum: what it has to remember between stages, as plain values.

    Each stage returns the next state and the answer. A stage is taken once and in order; anything
    else is a :class:`ProtocolError`, and the client says nothing.

    Parameters
    ----------
    smallest
        Fewest clients, itself among them, with which it lets a sum be opened, whatever the server
        asks for.
    """

    session: bytes
    box_secret: bytes
    mask_secret: bytes
    smallest: int
    bits: int
    length: int
    bound: float
    stage: int = 1
    seed: bytes = b""
    neighbours: Neighbours | None = None
    boxes: Delivery | None = None

    @classmethod
    def begun(cls, invitation: Invitation, smallest: int = 2) -> tuple[Member, Keys]:
        """Return the state after the first exchange, and the public keys."""
        if len(invitation.session) != SESSION or invitation.bits not in {32, 64}:
            raise ProtocolError("An invitation without a session, or with other words.")
        made = cls(
            session=invitation.session, box_secret=masking.new_seed(),
            mask_secret=masking.new_seed(), smallest=max(smallest, invitation.minimum),
            bits=invitation.bits, length=invitation.length, bound=invitation.bound,
        )  # fmt: skip
        keys = Keys(
            session=made.session,
            box_key=masking.public_key(made.box_secret),
            mask_key=masking.public_key(made.mask_secret),
        )
        return made, keys

    def shared(self, told: Neighbours) -> tuple[Member, Boxes]:
        """Return the state and the sealed shares for the neighbours."""
        self._expect(1, told)
        count = len(told.ids)
        if not (count == len(told.box_keys) == len(told.mask_keys) == len(set(told.ids))):
            raise ProtocolError("Neighbours without their keys, or twice.")
        if told.own in told.ids or told.ids != sorted(told.ids):
            raise ProtocolError("A client among its own neighbours, or out of order.")
        if len({*told.box_keys, *told.mask_keys}) != 2 * count:
            raise ProtocolError("Neighbours with the same key.")
        if not max(count // 2 + 1, self.smallest - 1) <= told.threshold <= count:
            raise ProtocolError(
                f"A threshold of {told.threshold} among {count} neighbours would open sums of "
                f"fewer than {self.smallest} clients, or to less than a majority."
            )
        seed = masking.new_seed()
        own, lost = (
            masking.shares_of(secret, told.threshold, count) for secret in (seed, self.mask_secret)
        )
        boxes = []
        for place, (other, key) in enumerate(zip(told.ids, told.box_keys, strict=True)):
            text = own[place] + lost[place]
            boxes.append(masking.sealed(
                self._box_key(key, told.own, other), text,
                _pair(self.session, "box", told.own, other),
            ))  # fmt: skip
        seal = masking.commitment(seed, _own(self.session, "seed", told.own))
        state = replace(self, stage=2, seed=seed, neighbours=told)
        return state, Boxes(session=self.session, boxes=boxes, seal=seal)

    def code(self) -> FixedPointCode:
        """Return how its vector is coded; known after the second exchange."""
        assert self.neighbours is not None
        return FixedPointCode(bound=self.bound, terms=self.neighbours.terms, bits=self.bits)

    def masked(self, told: Delivery, words: Words) -> tuple[Member, Masked]:
        """Return the state and the masked vector (M3) of coded words, (length + 1,)."""
        self._expect(2, told)
        near = self.neighbours
        assert near is not None
        if len(told.ids) != len(told.boxes) or len(set(told.ids)) != len(told.ids):
            raise ProtocolError("Boxes without their senders, or twice.")
        if not set(told.ids) <= set(near.ids) or len(told.ids) < near.threshold:
            raise ProtocolError("Boxes of fewer neighbours than the threshold, or of others.")
        dtype = self.code().dtype
        if words.shape != (self.length + 1,) or words.dtype != dtype:
            raise ProtocolError("Words of another length or type than the sum's.")
        shape = (self.length + 1, dtype)
        out = words + masking.mask(masking.derived(self.seed, b"self"), *shape)
        key_of = dict(zip(near.ids, near.mask_keys, strict=True))
        for other in told.ids:
            key = masking.agreed_key(self.mask_secret, key_of[other], b"mask")
            term = _pairwise_mask(key, self.session, near.own, other, shape)
            out = out + term if other > near.own else out - term
        state = replace(self, stage=3, boxes=told, seed=b"", mask_secret=b"")
        return state, Masked(session=self.session, words=out.tobytes())

    def opened(self, told: Opening) -> Shares:
        """Return the shares that open the sum; the state is to be forgotten."""
        self._expect(3, told)
        near, came = self.neighbours, self.boxes
        assert near is not None
        assert came is not None
        named = [*told.alive, *told.lost]
        if len(set(named)) != len(named) or set(named) != set(came.ids):
            raise ProtocolError("Each neighbour is alive or lost, and none is both or neither.")
        if len(told.alive) < near.threshold:
            raise ProtocolError("Fewer neighbours are left than the threshold: nothing is opened.")
        box_of = dict(zip(came.ids, came.boxes, strict=True))
        key_of = dict(zip(near.ids, near.box_keys, strict=True))
        out = []
        for place, other in enumerate(named):
            text = masking.unsealed(
                self._box_key(key_of[other], near.own, other), box_of[other],
                _pair(self.session, "box", other, near.own),
            )  # fmt: skip
            if text is None or len(text) != 2 * masking.SHARE:
                out.append(b"")
                continue
            own, lost = text[: masking.SHARE], text[masking.SHARE :]
            out.append(own if place < len(told.alive) else lost)
        return Shares(session=self.session, shares=out)

    def to_plain(self) -> dict[str, Plain]:
        """Return the state as plain values for ``of_plain``; it holds secrets of this sum."""
        out: dict[str, Plain] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Wire):
                out |= {f"{f.name}.{name}": part for name, part in value.to_plain().items()}
            elif value is not None:
                out[f.name] = value
        return out

    @classmethod
    def of_plain(cls, record: Mapping[str, Any]) -> Member:
        """Return the state of plain values."""
        nested: dict[str, dict[str, Any]] = {"neighbours": {}, "boxes": {}}
        plain: dict[str, Any] = {}
        for name, value in record.items():
            outer, _, inner = name.partition(".")
            if inner:
                nested[outer][inner] = value
            else:
                plain[name] = value
        near, boxes = nested["neighbours"], nested["boxes"]
        return cls(
            **plain,
            neighbours=Neighbours.of_plain(near) if near else None,
            boxes=Delivery.of_plain(boxes) if boxes else None,
        )

    def _box_key(self, other_key: bytes, own: int, other: int) -> bytes:
        low, high = sorted((own, other))
        try:
            return masking.agreed_key(
                self.box_secret, other_key, _pair(self.session, "box", low, high)
            )
        except ValueError as error:
            raise ProtocolError(f"The key of neighbour {other} is none.") from error

    def _expect(self, stage: int, told: Wire) -> None:
        if told.session != self.session:
            raise ProtocolError("A message of another session.")
        if stage != self.stage:
            raise ProtocolError(f"Stage {stage} of a sum that is at stage {self.stage}.")


@final
class SumServer:
    """The server in one sum: messages in, messages out; it sees masked vectors only.

    The four methods are called in turn with the answers that came, by client. Answers that do not
    fit are left out and their senders are in ``faults``, by client with the reason; too few that
    fit raise :class:`~fedipw.private.sums.SumNotOpenedError`.

    Examples
    --------
    >>> request = SumRequest(purpose="age", length=1, bound=120.0)
    >>> server, ages = SumServer(request, minimum=3), {1: 31.0, 2: 40.0, 3: 52.0, 4: 33.0}
    >>> begun = {i: Member.begun(server.invitation) for i in ages}
    >>> near = server.keys({i: keys for i, (_, keys) in begun.items()})
    >>> shared = {i: begun[i][0].shared(near[i]) for i in ages}
    >>> carried = server.boxes({i: boxes for i, (_, boxes) in shared.items()})
    >>> from fedipw.private.sums import contribution_words
    >>> masked = {}
    >>> for i in (1, 2, 3):  # the fourth drops out here
    ...     words = contribution_words(np.array([ages[i]]), request, shared[i][0].code())
    ...     masked[i] = shared[i][0].masked(carried[i], words)
    >>> told = server.masked({i: vector for i, (_, vector) in masked.items()})
    >>> found = server.shares({i: masked[i][0].opened(told[i]) for i in told})
    >>> found.total.round(4).tolist(), found.contributors, found.dropped
    ([123.0], 3, 1)
    """

    def __init__(
        self,
        request: SumRequest,
        *,
        minimum: int,
        bits: int = 32,
        degree: int | None = None,
        asked: int | None = None,
    ) -> None:
        self.request, self.minimum, self.bits, self.degree = request, minimum, bits, degree
        session = os.urandom(SESSION)
        self.invitation = Invitation.of(session, request, bits, minimum)
        self.asked = asked  # clients that were invited, those that sent keys if none
        self.faults: dict[int, str] = {}
        self.graph: Graph | None = None
        self._keys: dict[int, Keys] = {}
        self._near: dict[int, tuple[int, ...]] = {}  # those that can still answer
        self._places: dict[int, dict[int, int]] = {}  # of the holders of a client's shares
        self._seals: dict[int, bytes] = {}
        self._total: Words = np.empty(0, dtype=np.uint32)
        self._alive: frozenset[int] = frozenset()

    @property
    def session(self) -> bytes:
        """The name of this sum, drawn at random."""
        return self.invitation.session

    @property
    def code(self) -> FixedPointCode:
        """How vectors are coded, known after the keys."""
        return FixedPointCode(bound=self.request.bound, terms=len(self._keys), bits=self.bits)

    def keys(self, answers: Mapping[int, Keys]) -> dict[int, Neighbours]:
        """Return what each client that sent keys is told of its neighbours."""
        seen: set[bytes] = set()
        for client, keys in sorted(self._of_session(answers)):
            both = {keys.box_key, keys.mask_key}
            if len(both) != 2 or both & seen or not all(map(masking.is_public_key, both)):
                self.faults[client] = "keys that are none, or another's"
                continue
            seen |= both
            self._keys[client] = keys
        self._enough(self._keys)
        graph = self.graph = Graph.fitting(
            len(self._keys), minimum=self.minimum, degree=self.degree
        )
        self._near = graph.neighbours(sorted(self._keys))
        self._places = {i: {j: k for k, j in enumerate(near)} for i, near in self._near.items()}
        return {
            i: Neighbours(
                session=self.session, own=i, ids=list(near),
                box_keys=[self._keys[j].box_key for j in near],
                mask_keys=[self._keys[j].mask_key for j in near],
                threshold=graph.threshold, terms=len(self._keys),
            )
            for i, near in self._near.items()
        }  # fmt: skip

    def boxes(self, answers: Mapping[int, Boxes]) -> dict[int, Delivery]:
        """Return the boxes for each client that sent its own."""
        came: dict[int, Boxes] = {}
        for client, boxes in self._of_session(answers):
            if client not in self._near or len(boxes.boxes) != len(self._near[client]):
                self.faults[client] = "not one box for each neighbour"
            elif any(len(box) > 200 for box in boxes.boxes) or len(boxes.seal) != masking.KEY:
                self.faults[client] = "boxes of another size"
            else:
                came[client] = boxes
        assert self.graph is not None
        threshold, left = self.graph.threshold, set(came)
        while lonely := {i for i in left if len(left & set(self._near[i])) < threshold}:
            left -= lonely  # nobody could restore what they lose
        self._enough(left)
        self._seals = {i: came[i].seal for i in left}
        self._near = {i: tuple(j for j in self._near[i] if j in left) for i in left}
        return {
            i: Delivery(
                session=self.session,
                ids=list(self._near[i]),
                boxes=[came[j].boxes[self._places[j][i]] for j in self._near[i]],
            )
            for i in sorted(left)
        }

    def masked(self, answers: Mapping[int, Masked]) -> dict[int, Opening]:
        """Add the masked vectors; return who is told what of its neighbours."""
        dtype = self.code.dtype
        size = (self.request.length + 1) * dtype.itemsize
        total, alive = np.zeros(self.request.length + 1, dtype=dtype), set()
        for client, vector in self._of_session(answers):
            if client not in self._seals or len(vector.words) != size:
                self.faults[client] = "a vector of another length, or without shares"
                continue
            total += np.frombuffer(vector.words, dtype=dtype)
            alive.add(client)
        self._enough(alive)
        assert self.graph is not None
        self._total, self._alive = total, frozenset(alive)
        short = [i for i in self._seals if len(alive & set(self._near[i])) < self.graph.threshold]
        if short:
            raise SumNotOpenedError(
                f"{len(short)} clients have fewer than {self.graph.threshold} neighbours left, who "
                "could restore what they lost: nothing is opened."
            )
        return {
            i: Opening(
                session=self.session,
                alive=[j for j in self._near[i] if j in alive],
                lost=[j for j in self._near[i] if j not in alive],
            )
            for i in sorted(alive)
        }

    def shares(self, answers: Mapping[int, Shares]) -> SumResult:
        """Take the masks that are left out of the sum, and return it."""
        of: dict[int, dict[int, bytes]] = {i: {} for i in self._seals}  # by owner, by holder
        for holder, given in self._of_session(answers):
            if holder not in self._alive:
                self.faults[holder] = "shares of a client that has no part in the sum"
                continue
            near = self._near[holder]
            named = sorted(near, key=lambda j: j not in self._alive)  # as in its opening
            if len(given.shares) != len(named):
                self.faults[holder] = "not one share for each neighbour"
                continue
            for owner, share in zip(named, given.shares, strict=True):
                if len(share) == masking.SHARE:
                    of[owner][holder] = share
        shape = (self.request.length + 1, self.code.dtype)
        total, suspects = self._total.copy(), set[int]()
        for owner in sorted(self._seals):
            secret = self._restored(owner, of[owner], suspects)
            if owner in self._alive:
                total -= masking.mask(masking.derived(secret, b"self"), *shape)
                continue
            for other in self._near[owner]:
                if other in self._alive:
                    key = masking.agreed_key(secret, self._keys[other].mask_key, b"mask")
                    term = _pairwise_mask(key, self.session, owner, other, shape)
                    # what `other` added for `owner` is taken out
                    total = total - term if owner > other else total + term
        for client in suspects:
            self.faults[client] = "shares that do not fit"
        asked = len(self._keys) if self.asked is None else self.asked
        alive = len(self._alive)
        return SumResult.of(total, self.code, contributors=alive, dropped=asked - alive)

    def _restored(self, owner: int, shares: Mapping[int, bytes], suspects: set[int]) -> bytes:
        """Return the seed of a client in the sum, or the mask secret of one that was lost."""
        assert self.graph is not None
        place_of = self._places[owner]
        holder_of = {place: holder for holder, place in place_of.items()}
        about = _own(self.session, "seed", owner)

        def fits(secret: bytes) -> bool:
            if owner in self._alive:
                return masking.same(masking.commitment(secret, about), self._seals[owner])
            return masking.same(masking.public_key(secret), self._keys[owner].mask_key)

        doubted = {place_of[holder] for holder in suspects if holder in place_of}
        by_place = {place_of[holder]: share for holder, share in shares.items()}
        found = masking.checked_seed(by_place, self.graph.threshold, fits, doubted)
        if found is None:
            self.faults[owner] = "its shares do not give its secret"
            raise SumNotOpenedError(
                f"{len(shares)} shares of client {owner} came, {self.graph.threshold} are needed "
                "and none of their sets gives its secret: nothing is opened."
            )
        suspects.update(holder_of[place] for place in doubted)
        return found

    def _of_session(self, answers: Mapping[int, W]) -> Iterable[tuple[int, W]]:
        """Return the answers that belong to this sum."""
        for client, answer in answers.items():
            if answer.session != self.session:
                self.faults[client] = "an answer of another session"
            else:
                yield client, answer

    def _enough(self, clients: Iterable[int]) -> None:
        check_enough(len(list(clients)), self.minimum)
