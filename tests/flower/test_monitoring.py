"""The callback for Prometheus in the documentation, run as it stands there and scraped."""

import re
import urllib.request
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import FedAvg
from loopback import free_ports

from shown import blocks_of

from .federations import Small

PAGE = Path(__file__).parents[2] / "docs" / "flower-monitoring.md"
ROUNDS = 2


def test_the_example_for_prometheus_is_scraped(tmp_path: Path) -> None:
    code = "".join(block.text for block in blocks_of(PAGE) if "prometheus_client" in block.text)
    (port,) = free_ports(1)
    assert "9000" in code
    names: dict[str, Any] = {}
    exec(code.replace("9000", str(port)), names)
    try:
        result = Small(tmp_path).trained(
            ROUNDS, FedAvg(min_available_nodes=1), callbacks=[names["to_prometheus"]]
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            text = reply.read().decode()
    finally:
        names["server"].shutdown()
        names["server"].server_close()
        names["thread"].join(20)
    told = result.evaluate_metrics_clientapp[ROUNDS]
    for bound, key in (("estimate", ""), ("low", "-low"), ("high", "-high")):
        found = re.search(rf'fl_target{{bound="{bound}",metric="loss"}} (\S+)', text)
        assert found is not None, text
        assert float(found[1]) == told[f"loss-target{key}"]
    assert f'fl_round{{work="evaluate"}} {ROUNDS}.0' in text
    assert 'fl_clients{outcome="replied",work="train"} 12.0' in text
