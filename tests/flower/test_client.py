"""A client's description and refusal, and what client and server import."""

import subprocess
import sys
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedipw import flower
from fedipw.flower import InProcessGrid, declined, describes
from fedipw.flower.client import UNIT_ID
from fedipw.tables.columns import ID


def asked(told: dict[str, Any], columns: list[str]) -> Message:
    app = ClientApp()
    describes(app)(lambda _, server_round: {**told, "round": server_round})
    grid = InProcessGrid(app, {5: {}})
    question = RecordDict({"fedipw": ConfigRecord({"server-round": 3, "columns": columns})})
    message = Message(question, dst_node_id=5, message_type="query.fedipw")
    return next(iter(grid.send_and_receive([message])))


def test_only_what_is_asked_leaves_the_client() -> None:
    told = {"unit_id": "a", "battery": 0.5, "diary": "private", "wifi": True}
    answer = asked(told, ["battery", "round", "unheard of"]).content.config_records["fedipw"]
    assert dict(answer) == {"unit_id": "a", "battery": 0.5, "round": 3}


def test_a_description_names_the_client() -> None:
    reply = asked({"battery": 0.5}, [])
    assert reply.has_error()
    assert "needs 'unit_id'" in str(reply.error.reason)


def test_no_is_an_error_of_its_own_kind() -> None:
    message = Message(RecordDict(), dst_node_id=5, message_type="train")
    said = declined(message, "on battery")
    assert (said.error.code, said.error.reason) == (1000, "on battery")


def test_a_client_does_not_import_the_server() -> None:
    code = (
        "import sys\n"
        "from fedipw.flower import declined, describes\n"
        "print(sorted({'polars', 'numba', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_does_not_import_the_lab_or_plotting() -> None:
    code = (
        "import sys\n"
        "import fedipw.flower.strategy\n"
        "unwanted = ('fedipw.lab', 'fedipw.cli', 'matplotlib', 'jinja2')\n"
        "print([name for name in sys.modules if name.startswith(unwanted) or 'theory' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_there_when_asked_for() -> None:
    assert [getattr(flower, name).__name__ for name in flower.__all__] == flower.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = flower.Nothing
    assert UNIT_ID == ID
