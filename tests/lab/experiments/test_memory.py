"""Memory follows the data: a population a tenth of a million clients wide, in its own process."""

import subprocess
import sys

SCRIPT = """
import resource
from dataclasses import replace
from fedipw.lab.testbed import Testbed
from fedipw.lab.scenario import Scenario

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

small = Scenario(rounds=3, population=Testbed(size=100)).simulation(limits=False)
small.advance(3)
before = peak()
run = Scenario(rounds=3, population=Testbed(size=100_000)).simulation(limits=False)
run.advance(3)
data = run.federation.clients.features.nbytes / 2**20
print(peak() - before, data)
"""


def test_a_run_needs_little_more_memory_than_its_data() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    used, data = (float(value) for value in done.stdout.split())
    assert data > 70  # megabytes of features
    assert used < 3.5 * data
