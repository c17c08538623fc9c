"""What the core counts arrives in the metrics, once."""

import subprocess
import sys
from pathlib import Path

from tgi.kernel import metrics

ROOT = Path(__file__).parent.parent.parent
# In a process of its own, since samples go where the first one of a process went.
RUN = """
import sys
from pathlib import Path
from tgi.kernel import metrics
metrics.use(Path(sys.argv[1]))
from tests.scheduler.house import House
from tgi.scheduler.meter import Meter
from tgi.worker.scripted import Script

house = House(Script(pages=64, page_size=4, slots=2, vocab_size=128, max_total_tokens=64))
meter = Meter()
house.worker_up()
house.broken.add(99)
for first in (1, 1, 2, 99):
    house.add([first, 2, 3, 4, 5], 6)
    house.step()
    meter.publish(house.core)
house.worker_up()
house.run()
meter.publish(house.core)
meter.publish(house.core)
house.add([1, 2, 3, 4, 5], 6)
house.step()
meter.publish(house.core)
"""


def test_sums_and_gauges(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], check=True, cwd=ROOT)
    lines = [line for line in metrics.render(tmp_path).splitlines() if not line.startswith("#")]
    samples = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line)}
    methods = ["prefill", "decode"]
    started, ended, broken = [
        {method: samples.get(f'tgi_batch_inference_{what}{{method="{method}"}}', 0.0) for method in methods}
        for what in ("count", "success", "failure")
    ]
    assert min(started.values()) > 0
    assert sum(broken.values()) == 2  # with others, and alone
    assert sum(started.values()) > sum(ended.values()) + sum(broken.values())  # some were lost with the worker
    for method in methods:
        for duration in ("inference", "forward"):
            assert samples[f'tgi_batch_{duration}_duration_count{{method="{method}"}}'] == ended[method]
    assert samples["tgi_worker_losses"] == 1
    assert samples["tgi_resumed_tokens"] > 0
    assert samples['tgi_batch_concat{reason="chunking"}'] > 0
    assert samples["tgi_batch_next_size_count"] > 0
    assert samples["tgi_prefix_cache_hit_tokens"] > 0
    assert (samples["tgi_queue_size"], samples["tgi_batch_current_size"]) == (0, 1)
    assert samples["tgi_pages_used"] + samples["tgi_pages_free"] == 64
    assert samples["tgi_batch_current_max_tokens"] == samples["tgi_pages_used"] * 4 > 0
    assert samples["tgi_batch_max_total_tokens"] == 256
