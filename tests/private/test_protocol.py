"""The protocol of masked sums: exact under dropouts, closed below its minimum, hostile clients."""

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from fedipw.errors import InputError
from fedipw.private import masking
from fedipw.private.graph import Graph
from fedipw.private.protocol import (
    Boxes,
    Invitation,
    Keys,
    Masked,
    Member,
    Opening,
    ProtocolError,
    Shares,
    SumServer,
    Wire,
)
from fedipw.private.sums import SumNotOpenedError, SumRequest

from .worlds import STAGES, Protocol, without

CLIENTS = 10
FALSE_ALARM = 1e-9  # of each test of uniformity; the masks come from the system, without a seed


def vectors(clients: int = CLIENTS, length: int = 6) -> dict[int, Any]:
    rng = np.random.default_rng(3)
    return {i: rng.uniform(-1.0, 1.0, length) for i in range(clients)}


def plain_sum(found: Mapping[int, Any], clients: Any) -> Any:
    return np.sum([found[i] for i in clients], axis=0)


@pytest.mark.parametrize("lost", [(), (4,), (4, 7)], ids=["none", "one", "a fifth"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_is_that_of_the_clients_whose_vectors_came(
    stage: str, lost: tuple[int, ...]
) -> None:
    given = vectors()
    world = Protocol(given, changes=without(stage, *lost))
    found = world.run()
    inside = [i for i in given if i not in lost or stage == "shares"]
    assert np.abs(found.total - plain_sum(given, inside)).max() <= found.error
    assert (found.contributors, found.dropped) == (len(inside), CLIENTS - len(inside))
    assert found.clipped == 0
    assert world.server.faults == {}


@pytest.mark.parametrize("bits", [32, 64])
def test_a_ring_gives_the_same_sum(bits: int) -> None:
    given = vectors(16)
    world = Protocol(given, degree=6, bits=bits, changes=without("masked", 1, 9))
    found = world.run()
    assert world.server.graph == Graph(clients=16, degree=6, threshold=4)
    inside = [i for i in given if i not in (1, 9)]
    assert np.abs(found.total - plain_sum(given, inside)).max() <= found.error
    assert found.error < (1e-7 if bits == 32 else 1e-14)


@pytest.mark.parametrize("stage", STAGES[:3])
def test_nothing_is_opened_below_the_minimum(stage: str) -> None:
    world = Protocol(vectors(6), minimum=5, changes=without(stage, 0, 1))
    with pytest.raises(SumNotOpenedError, match="nothing is opened"):
        world.run()
    assert "shares" not in world.heard


def test_too_few_shares_open_nothing() -> None:
    world = Protocol(vectors(6), minimum=4, changes=without("shares", 0, 1, 2, 3))
    with pytest.raises(SumNotOpenedError, match="2 shares of client 0 came, 3 are needed"):
        world.run()


def test_lonely_clients_are_left_out_before_they_mask() -> None:
    """On a ring of eight with two neighbours each, whoever loses one of them is lonely."""
    world = Protocol(vectors(8), minimum=2, degree=4, changes=without("boxes", 0, 1, 2, 3))
    with pytest.raises(SumNotOpenedError):
        world.run()
    assert not world.sent.get("masked")


# ---------------------------------------------------------------- clients that lie


def test_garbage_shares_of_one_client_are_left_out_and_named() -> None:
    def garbage(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "shares" and client == 2:
            assert isinstance(answer, Shares)
            return replace(answer, shares=[os.urandom(16) for _ in answer.shares])
        return answer

    given = vectors()
    world = Protocol(given, changes=garbage)
    found = world.run()
    assert np.abs(found.total - plain_sum(given, given)).max() <= found.error
    assert world.server.faults == {2: "shares that do not fit"}


def test_garbage_shares_of_most_open_nothing() -> None:
    def garbage(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "shares" and client > 2:
            assert isinstance(answer, Shares)
            return replace(answer, shares=[os.urandom(16) for _ in answer.shares])
        return answer

    with pytest.raises(SumNotOpenedError, match="none of their sets gives its secret"):
        Protocol(vectors(6), changes=garbage).run()


def test_a_client_whose_own_shares_are_garbage_is_named() -> None:
    """Its boxes are of its own making: what is in them does not give the seed it masked with."""

    def garbage(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "boxes" and client == 2:
            assert isinstance(answer, Boxes)
            return replace(answer, seal=os.urandom(32))
        return answer

    world = Protocol(vectors(6), changes=garbage)
    with pytest.raises(SumNotOpenedError, match="client 2"):
        world.run()
    assert world.server.faults == {2: "its shares do not give its secret"}


def test_boxes_that_cannot_be_opened_cost_their_shares_only() -> None:
    def broken(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "boxes" and client == 2:
            assert isinstance(answer, Boxes)
            return replace(answer, boxes=[os.urandom(60), *answer.boxes[1:]])
        return answer

    given = vectors()
    found = Protocol(given, changes=broken).run()
    assert np.abs(found.total - plain_sum(given, given)).max() <= found.error


BAD: list[tuple[str, Any]] = [
    ("keys", lambda answer: replace(answer, mask_key=bytes(32))),
    ("keys", lambda answer: replace(answer, mask_key=answer.box_key)),
    ("keys", lambda answer: replace(answer, session=bytes(16))),
    ("boxes", lambda answer: replace(answer, boxes=answer.boxes[1:])),
    ("boxes", lambda answer: replace(answer, boxes=[bytes(10**6), *answer.boxes[1:]])),
    ("boxes", lambda answer: replace(answer, session=bytes(16))),
    ("masked", lambda answer: replace(answer, words=answer.words[:-4])),
    ("masked", lambda answer: replace(answer, session=bytes(16))),
]


@pytest.mark.parametrize(("stage", "change"), BAD)
def test_an_answer_that_does_not_fit_is_a_dropout_on_record(stage: str, change: Any) -> None:
    given = vectors(6)
    world = Protocol(
        given, changes=lambda s, i, a: change(a) if (s, i) == (stage, 3) else a
    )  # fmt: skip
    found = world.run()
    inside = [i for i in given if i != 3]
    assert np.abs(found.total - plain_sum(given, inside)).max() <= found.error
    assert set(world.server.faults) == {3}


def test_keys_of_another_client_are_refused() -> None:
    first: dict[str, Wire] = {}

    def copies(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "keys" and client == 0:
            first["keys"] = answer
        return first["keys"] if stage == "keys" and client == 5 else answer

    world = Protocol(vectors(6), changes=copies)
    assert world.run().contributors == 5
    assert world.server.faults == {5: "keys that are none, or another's"}


def test_a_replayed_vector_is_of_another_session() -> None:
    old = Protocol(vectors(6))
    old.run()
    replayed = old.heard["masked"][3]
    world = Protocol(vectors(6), changes=lambda s, i, a: replayed if (s, i) == ("masked", 3) else a)
    assert world.run().contributors == 5
    assert world.server.faults == {3: "an answer of another session"}


# ---------------------------------------------------------------- what a client refuses


def member_at(stage: str) -> tuple[Member, Protocol]:
    """Return client 0 of six before it answers a stage."""
    kept: dict[str, Member] = {}
    world = Protocol(vectors(6), minimum=4)

    def keeps(at: str, client: int, answer: Wire) -> Wire:
        following = STAGES[min(STAGES.index(at) + 1, 3)]
        if client == 0 and at != "shares":
            kept[following] = world.members[0]
        return answer

    world.changes = keeps
    world.run()
    return kept[stage], world


def test_a_client_answers_a_stage_once() -> None:
    member, world = member_at("masked")
    with pytest.raises(ProtocolError, match="Stage 1 of a sum that is at stage 2"):
        member.shared(world.sent["boxes"][0])
    with pytest.raises(ProtocolError, match="Stage 3 of a sum that is at stage 2"):
        member.opened(world.sent["shares"][0])


@pytest.mark.parametrize(
    ("alive", "lost"),
    [([1, 2, 3, 4, 5], [5]), ([1, 2, 3, 4], []), ([1, 2], [3, 4, 5]), ([1, 2, 3, 4, 9], [5])],
    ids=["both", "neither", "below the threshold", "a stranger"],
)
def test_a_client_refuses_an_opening_that_gives_too_much(alive: list[int], lost: list[int]) -> None:
    member, world = member_at("shares")
    opening = Opening(session=world.server.session, alive=alive, lost=lost)
    with pytest.raises(ProtocolError):
        member.opened(opening)


def test_a_client_refuses_messages_of_another_session() -> None:
    member, world = member_at("boxes")
    with pytest.raises(ProtocolError, match="another session"):
        member.shared(replace(world.sent["boxes"][0], session=bytes(16)))


NEIGHBOURS: list[dict[str, Any]] = [
    {"threshold": 2},  # less than a majority of five
    {"threshold": 6},
    {"own": 3},
    {"ids": [1, 2, 3, 4, 4]},
    {"ids": [5, 4, 3, 2, 1]},
    {"box_keys": []},
    {"mask_keys": [bytes([1] * 32)] * 5},
]


@pytest.mark.parametrize("change", NEIGHBOURS)
def test_a_client_refuses_neighbours_that_cannot_be(change: dict[str, Any]) -> None:
    member, world = member_at("boxes")
    told = world.sent["boxes"][0]
    with pytest.raises(ProtocolError):
        member.shared(replace(told, **change))


def test_a_client_holds_the_server_to_its_own_minimum() -> None:
    request = SumRequest(purpose="x", length=1)
    server = SumServer(request, minimum=3)
    begun = {i: Member.begun(server.invitation, smallest=5) for i in range(4)}
    near = server.keys({i: keys for i, (_, keys) in begun.items()})
    with pytest.raises(ProtocolError, match="fewer than 5 clients"):
        begun[0][0].shared(near[0])


HOSTILE: list[tuple[type[Wire], dict[str, Any]]] = [
    (Keys, {"session": b"x", "box_key": b"x"}),
    (Keys, {"session": b"x", "box_key": b"x", "mask_key": "text"}),
    (Masked, {"session": b"x", "words": [1, 2]}),
    (Shares, {"session": b"x", "shares": [b"x", 3]}),
    (Boxes, {"session": b"x", "boxes": [], "seal": b"x", "more": 1}),
    (Opening, {"session": b"x", "alive": [True], "lost": []}),
]


@pytest.mark.parametrize(("kind", "record"), HOSTILE)
def test_a_record_of_other_types_is_no_message(kind: type[Wire], record: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        kind.of_plain(record)


def test_messages_come_back_from_plain_values() -> None:
    request = SumRequest(purpose="x", length=2, bound=3.0, public={"lambda": [0.1, 0.2]})
    sent = Invitation.of(bytes(16), request, 32, 5)
    assert Invitation.of_plain(sent.to_plain()) == sent
    assert sent.request == request


# ---------------------------------------------------------------- what the server sees


def uniform(words: Any) -> bool:
    """Return whether bytes pass a chi-square test of uniformity; false alarms once in 1e9."""
    counts = np.bincount(np.frombuffer(bytes(words), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256.0
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(FALSE_ALARM, 255)


def test_masked_vectors_look_uniform_and_codes_do_not() -> None:
    rng = np.random.default_rng(5)
    given = {i: 0.01 * rng.normal(size=3000) for i in range(5)}
    world = Protocol(given)
    world.run()
    for client, member in enumerate(world.heard["masked"].values()):
        assert isinstance(member, Masked)
        assert uniform(member.words), client
    code = world.server.code
    assert not uniform(code.coded(given[0]).words.tobytes())


def test_all_masks_but_one_pair_leave_the_sum_of_the_pair() -> None:
    """Server and three of five clients pool what they have: of the other two it is their sum."""
    rng = np.random.default_rng(6)
    given = {i: rng.uniform(-1.0, 1.0, 3000) for i in range(5)}
    world, secrets, seeds = Protocol(given), {}, {}

    def keeps(stage: str, client: int, answer: Wire) -> Wire:
        if stage == "boxes":
            secrets[client] = world.members[client].mask_secret
            seeds[client] = world.members[client].seed
        return answer

    world.changes = keeps
    world.run()
    session, code = world.server.session, world.server.code
    shape: Any = (3001, code.dtype)
    left = {}
    for i in (0, 1):  # honest; opening tells the server their own seeds, too
        masked = world.heard["masked"][i]
        assert isinstance(masked, Masked)
        y = np.frombuffer(masked.words, dtype=code.dtype)
        y = y - masking.mask(masking.derived(seeds[i], b"self"), *shape)
        for j in (2, 3, 4):  # all pairwise masks that the coalition can make
            public = masking.public_key(secrets[i])
            key = masking.agreed_key(secrets[j], public, b"mask")
            name = session + f"/mask/{i}/{j}".encode()
            y = y - masking.mask(masking.derived(key, name), *shape)
        left[i] = y
    assert uniform(left[0].tobytes())
    assert uniform(left[1].tobytes())
    both = code.decoded((left[0] + left[1])[:-1])
    assert np.abs(both - given[0] - given[1]).max() <= code.error(2)


def test_secrets_are_fresh_in_every_sum() -> None:
    one, two = Protocol(vectors(4)), Protocol(vectors(4))
    one.run(), two.run()
    for stage in ("keys", "masked"):
        for client in range(4):
            assert one.heard[stage][client] != two.heard[stage][client]


# ---------------------------------------------------------------- shares and graphs


def test_any_three_of_five_shares_give_the_seed_and_no_two_do() -> None:
    seed = masking.new_seed()
    shares = masking.shares_of(seed, 3, 5)
    for chosen in combinations(range(5), 3):
        assert masking.seed_of({k: shares[k] for k in chosen}) == seed
    for fewer in combinations(range(5), 2):
        assert masking.seed_of({k: shares[k] for k in fewer}) != seed


def test_a_seed_is_found_among_garbage_and_the_suspects_are_named() -> None:
    seed, suspects = masking.new_seed(), set[int]()
    shares = dict(enumerate(masking.shares_of(seed, 3, 6)))
    shares[1] = os.urandom(16)
    assert masking.checked_seed(shares, 3, lambda s: s == seed, suspects) == seed
    assert suspects == {1}
    assert masking.checked_seed({0: shares[0]}, 3, lambda s: s == seed, suspects) is None


@pytest.mark.parametrize(("clients", "degree"), [(9, 4), (12, 11), (30, 10)])
def test_neighbours_are_mutual_and_equally_many(clients: int, degree: int) -> None:
    near = Graph(clients=clients, degree=degree, threshold=degree).neighbours(
        range(100, 100 + clients)
    )
    for client, others in near.items():
        assert len(set(others)) == degree
        assert client not in others
        assert all(client in near[other] for other in others)


def test_the_bounds_are_those_of_an_enumeration() -> None:
    """Of seven clients two are corrupt: in how many placements two of four neighbours are."""
    graph = Graph(clients=7, degree=4, threshold=2)
    exposed = [len({2, 3, 4, 5}.intersection(bad)) >= 2 for bad in combinations(range(2, 8), 2)]
    tail = 7 * np.mean(exposed)
    assert graph.exposure(2 / 7, 0.0) == pytest.approx(min(1.0, tail + 7 * (2 / 7) ** 2))
    assert Graph(clients=7, degree=6, threshold=3).exposure(2 / 7, 0.0) == 0.0
    lost = [len({2, 3, 4, 5}.intersection(bad)) > 3 for bad in combinations(range(2, 8), 4)]
    made = Graph(clients=7, degree=4, threshold=1).failure(4 / 7)
    assert made == pytest.approx(7 * np.mean(lost))


def test_graphs_that_cannot_be_are_refused() -> None:
    for clients, degree, threshold in ((1, 0, 1), (9, 3, 2), (9, 9, 2), (9, 4, 5)):
        with pytest.raises(InputError):
            Graph(clients=clients, degree=degree, threshold=threshold)


def test_the_threshold_keeps_the_minimum() -> None:
    for clients in range(5, 60, 7):
        graph = Graph.fitting(clients, minimum=5)
        assert graph.threshold >= 4
        assert 2 * graph.threshold > graph.degree
